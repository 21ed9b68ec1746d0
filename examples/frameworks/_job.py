"""What the examples of this folder share: batches, first parameters, and a digest of the last.

The job is to guess the next byte of the source of Python's standard library, which every machine
has, from the bits of the 8 bytes before it, by two dense layers.
"""

import hashlib
import os
import pathlib
import sysconfig
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

WORKERS, STEPS, BATCH, CONTEXT = 8, 60, 256, 8
INPUTS, HIDDEN, OUTPUTS = 8 * CONTEXT, 32, 256

Array = np.ndarray[Any, Any]


def use_cpu_devices() -> None:
    """Simulates the workers, before JAX starts."""
    os.environ.setdefault("PJRT_NPROC", str(4 * WORKERS))  # more threads than waiting workers
    jax.config.update("jax_num_cpu_devices", WORKERS)


def batches() -> Iterator[tuple[Array, Array]]:
    """Scaled bits float32[BATCH, INPUTS], and the bytes that come after them, int32[BATCH]."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = b"\n".join(file.read_bytes() for file in sorted(folder.glob("[a-c]*.py")))
    corpus, rng = np.frombuffer(text, np.uint8), np.random.default_rng(0)
    # Bits that are equal in a batch would have equal gradients, and of these top-k takes the first,
    # which another framework may count as the last.
    gains = rng.uniform(0.5, 1.5, INPUTS).astype(np.float32)
    for _ in range(STEPS):
        starts = rng.integers(0, corpus.size - CONTEXT, BATCH)
        windows = corpus[starts[:, None] + np.arange(CONTEXT + 1)]
        bits = np.unpackbits(windows[:, :-1], axis=1)
        yield bits * gains[None], windows[:, -1].astype(np.int32)


def first_params() -> dict[str, Array]:
    """The parameters that all examples begin with."""
    rng = np.random.default_rng(1)

    def normal(rows: int, columns: int) -> Array:
        return (rng.standard_normal((rows, columns)) / rows**0.5).astype(np.float32)

    w1, w2 = normal(INPUTS, HIDDEN), normal(HIDDEN, OUTPUTS)
    zeros = [np.zeros(size, np.float32) for size in (HIDDEN, OUTPUTS)]
    return {"w1": w1, "b1": zeros[0], "w2": w2, "b2": zeros[1]}


def report(first: Any, last: Any, params: dict[str, Any]) -> None:
    """The losses of the first and the last step, and a digest of every bit of the parameters."""
    whole = b"".join(np.asarray(params[name]).tobytes() for name in ("w1", "b1", "w2", "b2"))
    digest = hashlib.sha256(whole).hexdigest()[:16]
    print(f"loss {float(first):.3f} -> {float(last):.3f}, parameters {digest}")
