"""Time codecs and their peers against a memory copy, on a real gradient.

One process, compiled functions, medians over rounds in which everything takes its turn, fresh
outputs for all, the memory copy too. The data is a saved gradient, tiled
to length; each tile has a sign and a scale of its own, so that no magnitude repeats.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _record import SAVED, head, markdown, parser, write
from jax import lax

import fftgrad as fg

BLOCK = 4096
BYTES = fg.RangeFloat(bits=8)
CODECS: dict[str, fg.codecs.Codec] = {
    "bfloat16": fg.Cast("bfloat16"),
    "top-k 1 %, 8 bits": fg.chain(fg.TopK(fraction=0.01), BYTES),
    "FFT 4096, 5 %, 8 bits": fg.chain(fg.Fft(block=BLOCK), fg.TopK(fraction=0.05), BYTES),
    "FFT 64, 5 %, 8 bits": fg.chain(fg.Fft(block=64), fg.TopK(fraction=0.05), BYTES),
}
STEP = fg.Step.of(0)


@dataclasses.dataclass
class Row:
    """A compiled function to time, on several inputs in turn."""

    what: str
    run: Callable[[Any], Any]
    inputs: list[Any]
    wire_bytes: int | None
    temp_bytes: int
    compile_s: float
    times: list[float] = dataclasses.field(default_factory=list[float])


def gradients(n: int) -> list[jax.Array]:
    """Three vectors of length n made of the saved gradient."""
    tile = np.load(SAVED)
    out: list[jax.Array] = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        tiles = -(-n // tile.size)
        factor = rng.choice([-1.0, 1.0], tiles) * np.exp(rng.uniform(-0.7, 0.7, tiles))
        whole = np.outer(factor.astype(np.float32), np.roll(tile, int(rng.integers(tile.size))))
        out.append(jnp.asarray(whole.ravel()[:n]))
    return out


def compiled(what: str, function: Any, inputs: list[Any], wire_bytes: int | None = None) -> Row:
    """A row of a JAX function, with what its compilation tells."""
    start = time.perf_counter()
    program = jax.jit(function).lower(inputs[0]).compile()
    took = time.perf_counter() - start
    memory: Any = program.memory_analysis()
    temp = memory.temp_size_in_bytes
    return Row(what, lambda x: jax.block_until_ready(program(x)), inputs, wire_bytes, temp, took)


def rows_of(n: int) -> list[Row]:
    """A copy, every codec both ways, and peers."""
    xs, like = gradients(n), jax.ShapeDtypeStruct((n,), "float32")
    rows = [compiled("memory copy", lambda x: -x, xs, 4 * n)]
    for name, codec in CODECS.items():
        down = functools.partial(fg.compress, codec, step=STEP)
        up = functools.partial(fg.decompress, codec, like=like, step=STEP)
        size = fg.wire_bytes(codec, like)
        rows.append(compiled(f"{name}: compress", down, xs, size))
        payloads = [rows[-1].run(x) for x in xs]
        rows.append(compiled(f"{name}: decompress", up, payloads, size))
    k = max(1, n // 100)
    rows.append(compiled("rfft 4096", lambda x: jnp.fft.rfft(x.reshape(-1, BLOCK)), xs))
    rows.append(compiled("lax.top_k 1 %", lambda x: lax.top_k(jnp.abs(x), k), xs, 8 * k))
    return rows


def measure(n: int, repeats: int, budget: float) -> list[dict[str, Any]]:
    """The rows of one length, as records."""
    rows = rows_of(n)
    for i in range(-1, repeats):
        for row in rows:
            # Everything three times; what takes long, no more.
            if i >= 3 and sum(row.times) > budget:
                continue
            value = row.inputs[i % len(row.inputs)]
            start = time.perf_counter()
            result = row.run(value)
            elapsed = 1e3 * (time.perf_counter() - start)
            del result
            if i >= 0:
                row.times.append(elapsed)
    copy = statistics.median(rows[0].times)
    return [
        {
            "n": n,
            "what": row.what,
            "ms": (ms := statistics.median(row.times)),
            "copies": ms / copy,
            "bits": row.wire_bytes and 8 * row.wire_bytes / n,
            "temp": row.temp_bytes / (4 * n),
            "compile_s": row.compile_s,
        }
        for row in rows
    ]


def main() -> None:
    """Measures, prints, and writes cpu.json."""
    args = parser(
        __doc__,
        "codecs",
        log2n=([20, 22, 24, 26], "lengths"),
        repeats=(11, "rounds"),
        budget=(2000.0, "ms for one row"),
    ).parse_args()
    if args.smoke:
        args.log2n, args.repeats = [16], 3
    record: dict[str, Any] = head() | {"rows": []}
    for log2n in args.log2n:
        rows = measure(2**log2n, args.repeats, args.budget)
        cells = [
            [f"{x:.3g}" if isinstance(x, float) else x or "" for x in row.values()] for row in rows
        ]
        print(markdown(list(rows[0]), cells), flush=True)
        record["rows"] += rows
        # After each length, so that an interrupted run leaves what it has.
        write(args.out / f"{jax.default_backend()}.json", record, "rows")


if __name__ == "__main__":
    main()
