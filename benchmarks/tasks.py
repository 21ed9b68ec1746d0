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
Schedule = Callable[[float, int], Callable[[int], Any]]


# Learning rates, from their peak and the number of steps


def cosine(peak: float, steps: int) -> Callable[[int], Any]:
    """A rise, and half a cosine down to a tenth."""
    return optax.warmup_cosine_decay_schedule(0.0, peak, max(1, steps // 10), steps + 1, peak / 10)


def rise(peak: float, steps: int) -> Callable[[int], Any]:
    """A rise over ten steps, and then constant, so that a loss does not wait for the end."""
    del steps
    return optax.linear_schedule(peak / 10, peak, 9)


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """A model, its data, and its optimizer."""

    name: str
    model: nn.Module  # from inputs to logits; `peer.py` has twins of those of `WORKLOADS`
    adam: bool
    rate: float  # the peak of the learning rate, of SGD with momentum 0.9 or, if `adam`, of Adam
    batch: int  # examples per worker and step
    draw: Draw  # that many random examples to train on
    held_out: tuple[Batch, ...]  # batches to assess on
    metric: str = "loss"  # what counts of the assessment, "loss" (falls) or "accuracy" (rises)
    schedule: Schedule = cosine

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

    def assess(self, params: Params) -> dict[str, float]:
        """The means over the held-out batches."""
        found = [self._evaluate(params, batch) for batch in self.held_out]
        return {key: float(np.mean([one[key] for one in found])) for key in found[0]}

    @functools.cached_property
    def _init(self) -> Callable[[jax.Array, jax.Array], Params]:
        return jax.jit(self.model.init)

    @functools.cached_property
    def _evaluate(self) -> Callable[[Params, Batch], dict[str, jax.Array]]:
        def evaluate(params: Params, batch: Batch) -> dict[str, jax.Array]:
            found = {"loss": self.loss(params, batch)}
            if self.metric == "accuracy":
                logits: Any = self.model.apply(params, batch[0])
                found["accuracy"] = (logits.argmax(-1) == batch[1]).mean()
            return found

        return jax.jit(evaluate)


def trained(
    task: Task, params: Params, tx: Any, steps: int, batch: int, rng: np.random.Generator
) -> Params:
    """After so many dense steps of one worker."""

    @jax.jit
    def step(params: Params, state: Any, batch: Batch) -> tuple[Params, Any]:
        updates, state = tx.update(jax.grad(task.loss)(params, batch), state)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(steps):
        params, state = step(params, state, task.draw(rng, batch))
    return params


# Models


class Block(nn.Module):
    """Two convolutions around which the input goes."""

    channels: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # (B, H, W, C)
        y = nn.Conv(self.channels, (3, 3), self.stride, use_bias=False)(nn.relu(x))
        y = nn.relu(nn.GroupNorm(num_groups=4)(y))
        y = nn.Conv(self.channels, (3, 3), use_bias=False)(y)
        y = nn.GroupNorm(num_groups=4)(y)
        if x.shape != y.shape:
            x = nn.Conv(self.channels, (1, 1), self.stride, padding=0, use_bias=False)(x)
        return x + y


class ResNet(nn.Module):
    """A residual network of 8 layers for images of 8 × 8, with blocks that begin with a ReLU."""

    width: int = 16  # channels of the first stage

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # (B, 8, 8, 1) -> (B, 10)
        x = nn.Conv(self.width, (3, 3), padding=1, use_bias=False)(x)
        for stage in range(3):
            x = Block(self.width * 2**stage, 2 if stage else 1)(x)
        return nn.Dense(10)(nn.relu(x).mean((1, 2)))


# Data


def digits() -> tuple[Batch, Batch]:
    """scikit-learn's digits: 1,437 images to train on and 360 held out."""
    data: Any = importlib.import_module("sklearn.datasets").load_digits()
    images = (data.images[..., None] / 8 - 1).astype(np.float32)
    labels = data.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[360:], order[:360]
    return (images[train], labels[train]), (images[test], labels[test])


def images_of(examples: Batch) -> Draw:
    """Draws images and their labels."""

    def draw(rng: np.random.Generator, count: int) -> Batch:
        chosen = rng.choice(len(examples[1]), count, replace=False)
        return examples[0][chosen], examples[1][chosen]

    return draw


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
    schedule: Schedule = cosine,
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
      schedule: of the learning rate.
      assessed: batches that are held out, and passages of each.
      model: of a width and a number of layers.
      kind: of the task.
    """
    sizes, assessed = (TINY, (1, 8)) if smoke else (sizes, assessed)
    context, width, layers, batch = sizes
    draw, rng = passages_of(texts[1], context), np.random.default_rng(1)
    held_out = tuple(draw(rng, assessed[1]) for _ in range(assessed[0]))
    draw, own = passages_of(texts[0], context), model(width, layers)
    return kind(name, own, True, rate, batch, draw, held_out, schedule=schedule)


def _digits(smoke: bool) -> Task:
    train, test = digits()
    model, batch = ResNet(4 if smoke else 16), 2 if smoke else 16
    return Task("digits", model, False, 0.05, batch, images_of(train), (test,), "accuracy")


TASKS: dict[str, Callable[[bool], Task]] = {
    "lm": lambda smoke: language_model("lm", 8e-3, train_lm.corpus(), (64, 64, 2, 4), smoke),
    "digits": _digits,
}
"""Small ones, for many runs; smaller still with `True`."""


WORKLOADS: dict[str, Callable[[bool], Task]] = {
    # 10.1 million parameters on the source of Python's standard library.
    "lm": lambda smoke: language_model(
        "lm", 1e-3, train_lm.corpus(), (128, 320, 8, 2), smoke, rise, (1, 32)
    ),
    # A narrow and deep one of 5.4 million on JAX's own source, which no setting was chosen on.
    "large": lambda smoke: language_model(
        "large", 2e-3, source_of("jax"), (64, 192, 12, 2), smoke, cosine, (1, 256)
    ),
}
"""Larger ones, for slow links."""
