"""What is trained: models, their data, and the optimizer that people use for each.

A task is the same for every method, and in both frameworks: the same first parameters, the same
batches in the same order, the same held-out data.
"""

import dataclasses
import functools
import importlib
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _record import ROOT

sys.path.insert(0, str(ROOT / "examples"))

import train_lm

WORKERS = 8
"""That are simulated where nothing else is said."""
Params = Any
Batch = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
Draw = Callable[[np.random.Generator, int], Batch]


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """A model, its data, and its optimizer."""

    name: str
    model: nn.Module  # from inputs to logits; `peer.py` has the twin of a language model
    rate: float  # the peak of Adam's learning rate
    batch: int  # examples per worker and step
    draw: Draw  # that many random examples to train on
    held_out: tuple[Batch, ...]  # batches to assess on

    def params(self, seed: int) -> Params:
        """The first parameters."""
        return self._init(jax.random.key(seed), jnp.asarray(self.held_out[0][0][:1]))

    def loss(self, params: Params, batch: Any) -> jax.Array:
        """Mean cross-entropy in nats."""
        logits: Any = self.model.apply(params, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    def batches(self, seed: int | tuple[int, int], workers: int) -> Iterator[Batch]:
        """Those of so many workers together."""
        rng = np.random.default_rng(seed)
        while True:
            yield self.draw(rng, workers * self.batch)

    def schedule(self, peak: float, steps: int) -> Callable[[Any], Any]:
        """The learning rate: a rise, and half a cosine down to a tenth."""
        rise = max(1, steps // 10)
        return optax.warmup_cosine_decay_schedule(0.0, peak, rise, steps + 1, peak / 10)

    def assess(self, params: Params) -> float:
        """The mean loss over the held-out batches."""
        return float(np.mean([self._evaluate(params, batch) for batch in self.held_out]))

    @functools.cached_property
    def _init(self) -> Callable[[jax.Array, jax.Array], Params]:
        return jax.jit(self.model.init)

    @functools.cached_property
    def _evaluate(self) -> Callable[[Params, Batch], jax.Array]:
        return jax.jit(self.loss)


# Data


def passages_of(text: np.ndarray[Any, Any], context: int) -> Draw:
    """Draws passages, and what follows each of their bytes."""

    def draw(rng: np.random.Generator, count: int) -> Batch:
        passages = train_lm.sample(rng, text, count, context)
        return passages[:, :-1], passages[:, 1:]

    return draw


def source_of(package: str, limit: int = 4_000_000) -> tuple[Any, Any]:
    """The Python source of a package without its tests, of which every tenth file is held out."""
    root = pathlib.Path(importlib.import_module(package).__file__ or "").parent
    files = [
        file for file in sorted(root.rglob("*.py")) if "test" not in str(file.relative_to(root))
    ]
    chosen = np.random.default_rng(0).permutation(len(files))
    texts = [files[i].read_bytes() for i in chosen]
    parts = [text for i, text in enumerate(texts) if i % 10 != 9], texts[9::10]
    train, held_out = (np.frombuffer(b"\n".join(part)[:limit], np.uint8) for part in parts)
    return train, held_out


# Tasks


TINY = (16, 32, 1, 2)


def language_model(
    name: str,
    rate: float,
    texts: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]],
    sizes: tuple[int, int, int, int],
    smoke: bool = False,
    assessed: tuple[int, int] = (8, 256),
    model: Callable[[int, int], Any] = train_lm.ByteLM,
    kind: type[Task] = Task,
) -> Task:
    """Nats per byte of a text, by Adam.

    Args:
      name: of the task.
      rate: the peak of the learning rate.
      texts: to train on, and to assess on.
      sizes: bytes of context, width, layers, and passages per worker.
      smoke: whether the sizes are tiny ones.
      assessed: batches that are held out, and passages of each.
      model: of a width and a number of layers.
      kind: of the task.
    """
    sizes, assessed = (TINY, (1, 8)) if smoke else (sizes, assessed)
    context, width, layers, batch = sizes
    draw, rng = passages_of(texts[1], context), np.random.default_rng(1)
    held_out = tuple(draw(rng, assessed[1]) for _ in range(assessed[0]))
    draw, own = passages_of(texts[0], context), model(width, layers)
    return kind(name, own, rate, batch, draw, held_out)


TASKS: dict[str, Callable[[bool], Task]] = {
    "lm": lambda smoke: language_model("lm", 8e-3, train_lm.corpus(), (64, 64, 2, 4), smoke),
    # A narrow and deep one of 5.4 million on JAX's own source, which no setting was chosen on.
    "large": lambda smoke: language_model(
        "large", 2e-3, source_of("jax"), (64, 192, 12, 2), smoke, (1, 256)
    ),
}
"""A small one, for many runs, and one for slow links; smaller still with `True`."""
