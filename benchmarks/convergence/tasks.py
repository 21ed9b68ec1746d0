"""What is trained: three tasks, each with the optimizer that people use for it."""

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


def cosine(peak: float, steps: int) -> Callable[[int], Any]:
    """A rise, and half a cosine down to a tenth."""
    return optax.warmup_cosine_decay_schedule(0.0, peak, max(1, steps // 10), steps + 1, peak / 10)


def plateau(peak: float, steps: int) -> Callable[[int], Any]:
    """A short rise, a plateau, and a straight fall to nothing in the last three tenths."""
    rise, fall = max(1, steps // 20), max(1, 3 * steps // 10)
    parts = [
        optax.linear_schedule(0.0, peak, rise),
        optax.constant_schedule(peak),
        optax.linear_schedule(peak, 0.0, fall + 1),
    ]
    return optax.join_schedules(parts, [rise, steps - fall])


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
    schedule: Callable[[float, int], Callable[[int], Any]] = cosine


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a language model and its batches."""

    context: int
    width: int
    layers: int
    per_worker: int


TINY = Sizes(context=16, width=32, layers=1, per_worker=2)


def source(smoke: bool) -> Task:
    """Nats per byte of Python's standard library."""
    sizes = TINY if smoke else Sizes(context=64, width=64, layers=2, per_worker=4)
    return language_model("lm", 8e-3, sizes, *train_lm.corpus())


def prose(smoke: bool) -> Task:
    """Nats per byte of Python's reference manual, of which every tenth topic is held out."""
    topics = importlib.import_module("pydoc_data.topics").topics
    texts = [topics[name].encode() for name in sorted(topics)]
    held_out = b"\n".join(texts[9::10])
    train = b"\n".join(text for i, text in enumerate(texts) if i % 10 != 9)
    sizes = TINY if smoke else Sizes(context=96, width=96, layers=3, per_worker=2)
    parts = (np.frombuffer(part, np.uint8) for part in (train, held_out))
    task = language_model("prose", 4e-3, sizes, *parts)
    return dataclasses.replace(task, schedule=plateau)


def language_model(
    name: str, rate: float, sizes: Sizes, train: np.ndarray, held_out: np.ndarray
) -> Task:
    """Nats per byte of a text, by Adam."""
    context, per_worker = sizes.context, sizes.per_worker
    model = train_lm.ByteLM(sizes.width, sizes.layers)

    def loss(params: Params, batch: jax.Array) -> jax.Array:
        logits: Any = model.apply(params, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    def batches(seed: int) -> Iterator[Any]:
        rng = np.random.default_rng(seed)
        while True:
            yield train_lm.sample(rng, train, WORKERS * per_worker, context)

    def assess(params: Params) -> dict[str, float]:
        rng = np.random.default_rng(1)
        parts = [train_lm.sample(rng, held_out, 256, context) for _ in range(8)]
        return {"loss": float(np.mean([evaluate(params, part) for part in parts]))}

    evaluate = jax.jit(loss)
    return Task(
        name,
        rate,
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


TASKS: dict[str, Callable[[bool], Task]] = {"lm": source, "digits": digits, "prose": prose}
