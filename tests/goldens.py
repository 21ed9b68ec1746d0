"""What the wire and the methods looked like when their goldens were made.

`python tests/make_goldens.py` adds those of new rows.
"""

import functools
import pathlib
from collections.abc import Callable

import jax
import messages
import numpy as np
import optax
from cases import CODECS, EXCHANGES, METHODS, gradients, values

import fftgrad as fg

FILE = pathlib.Path(__file__).parent / "goldens.npz"
AXIS, WORKERS, STEPS = "data", 4, 4
STEP = messages.STEP
VECTOR = values((messages.N,), seed=5)
ROWS = values((WORKERS, 152), seed=9)
"""A gradient of each worker."""
LIKE = {
    "conv": jax.ShapeDtypeStruct((3, 3, 4, 8), "float32"),
    "head": jax.ShapeDtypeStruct((20, 32), "float32"),
    "last": jax.ShapeDtypeStruct((8,), "float32"),
}


BYTES = pathlib.Path(__file__).parent / "golden_bytes"
SHORT = np.round(4 * values((100,), seed=2)) / 8
"""Values that every machine adds and multiplies alike."""

STORED = {
    "identity.bin": "identity",
    "bfloat16.bin": "bfloat16",
    "sign.bin": "sign",
    "top-k-4-bits.bin": "top-k 4 bits",
    "range-float.bin": "range float",
    "random-k.bin": "random-k",
    "fft.bin": "fft",
    "budget.bin": "budget",
}
"""The files of `BYTES`, and their codecs."""


def buffer(name: str) -> tuple[np.ndarray, np.ndarray]:
    """The words that a codec sends for `VECTOR`, and what they decode to."""
    sent = messages.message(CODECS[name], VECTOR)
    return sent.words, sent.values


def stored(file: str) -> bytes:
    """What a file holds: a payload of `SHORT`."""
    codec = CODECS[STORED[file]]
    payload = messages.compress(codec, SHORT.astype(np.float32), step=STEP)
    return fg.tools.to_bytes(payload, codec, SHORT)


@functools.cache
def mapped(tx):
    """`init` and `update` on all workers, compiled once for all laws."""
    run = jax.jit(jax.vmap(lambda g, s, p: tx.update(g, s, p), axis_name=AXIS))
    return jax.jit(jax.vmap(tx.init, axis_name=AXIS)), run


@functools.cache
def method(name: str):
    """`init` and `update` of a method on all workers."""
    return mapped(METHODS[name](AXIS))


@functools.cache
def exchange(name: str):
    """`init` and `update` of an exchange behind error feedback on all workers."""
    tx = fg.compressed_pmean(EXCHANGES[name], fg.ErrorFeedback(), axis_name=AXIS)

    def update(grad, state, params):
        with jax.numpy_dtype_promotion("strict"):  # or the law of promotion had its own programs
            return tx.update(grad, state, params)

    return mapped(optax.GradientTransformation(tx.init, update))


def updates(name: str) -> np.ndarray:
    """The updates of a method on every worker, step by step."""
    params = jax.tree.map(lambda s: np.zeros((WORKERS, *s.shape), np.float32), LIKE)
    grads = [gradients(LIKE, WORKERS, seed=step) for step in range(STEPS)]
    return _run(method(name), params, grads)


def means(name: str) -> np.ndarray:
    """The means of an exchange behind error feedback, step by step."""
    return _run(exchange(name), ROWS, [ROWS * (1 + step) for step in range(STEPS)])


def _run(programs, params, grads) -> np.ndarray:
    init, run = programs
    state, out = init(params), []
    for grad in grads:
        update, state = run(grad, state, params)
        rows = [np.asarray(leaf).reshape(WORKERS, -1) for leaf in jax.tree.leaves(update)]
        out.append(np.concatenate(rows, axis=1))
    return np.stack(out)


def makers() -> dict[str, Callable[[], np.ndarray]]:
    """What makes each array of the file."""
    found: dict[str, Callable[[], np.ndarray]] = {}
    for name in CODECS:
        found[f"words {name}"] = lambda name=name: buffer(name)[0]
        found[f"values {name}"] = lambda name=name: buffer(name)[1]
    found |= {f"updates {name}": functools.partial(updates, name) for name in METHODS}
    return found | {f"means {name}": functools.partial(means, name) for name in EXCHANGES}
