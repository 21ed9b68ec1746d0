"""What is trained: two tasks, each with the optimizer that people use for it."""

import dataclasses
import importlib
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

ROOT = pathlib.Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]

import train_lm  # noqa: E402  (after the path)
from models import ResNet  # noqa: E402  (after the path)

WORKERS = 8
Params = Any


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its data, and the optimizer that people use for it."""

    name: str
    rate: float
    params: Callable[[int], Params]
    loss: Callable[[Params, Any], jax.Array]
    batches: Callable[[int], Iterator[Any]]
    assess: Callable[[Params], dict[str, float]]
    adam: bool


def language_model(smoke: bool) -> Task:
    """Nats per byte of Python's standard library."""
    context, width, layers = (16, 32, 1) if smoke else (64, 64, 2)
    per_worker = 2 if smoke else 4
    model = train_lm.ByteLM(width, layers)
    train, held_out = train_lm.corpus()

    def loss(params: Params, batch: jax.Array) -> jax.Array:
        logits: Any = model.apply(params, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    def batches(seed: int) -> Iterator[Any]:
        rng = np.random.default_rng(seed)
        while True:
            yield train_lm.sample(rng, train, WORKERS * per_worker, context)

    def assess(params: Params) -> dict[str, float]:
        rng = np.random.default_rng(1)
        parts = [train_lm.sample(rng, held_out, 256, context) for _ in range(1 if smoke else 8)]
        return {"loss": float(np.mean([evaluate(params, part) for part in parts]))}

    evaluate = jax.jit(loss)
    return Task(
        "lm",
        8e-3,
        lambda seed: model.init(jax.random.key(seed), jnp.zeros((1, context), jnp.int32)),
        loss,
        batches,
        assess,
        adam=True,
    )


def digits(smoke: bool) -> Task:
    """1,437 images to train on, 360 held out."""
    data: Any = importlib.import_module("sklearn.datasets").load_digits()
    images = (data.images[..., None] / 8 - 1).astype(np.float32)
    labels = data.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[360:], order[:360]
    model = ResNet(1, 4 if smoke else 16, pre=True)
    per_worker = 2 if smoke else 16

    def loss(params: Params, batch: Any) -> jax.Array:
        logits: Any = model.apply(params, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    def batches(seed: int) -> Iterator[Any]:
        rng = np.random.default_rng(seed)
        while True:
            chosen = rng.choice(train, WORKERS * per_worker, replace=False)
            yield images[chosen], labels[chosen]

    @jax.jit
    def evaluate(params: Params) -> tuple[jax.Array, jax.Array]:
        logits: Any = model.apply(params, images[test])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels[test])
        return losses.mean(), (logits.argmax(-1) == labels[test]).mean()

    def assess(params: Params) -> dict[str, float]:
        loss, accuracy = evaluate(params)
        return {"loss": float(loss), "accuracy": float(accuracy)}

    return Task(
        "digits",
        0.05,
        lambda seed: model.init(jax.random.key(seed), jnp.asarray(images[:1])),
        loss,
        batches,
        assess,
        adam=False,
    )


TASKS: dict[str, Callable[[bool], Task]] = {"lm": language_model, "digits": digits}
