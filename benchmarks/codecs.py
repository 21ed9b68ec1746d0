"""Time codecs, their stages and their peers against a memory copy, on a real gradient.

One process, compiled functions, medians over rounds in which everything takes its turn, fresh
outputs for all, the memory copy too. The data is the gradient of `gradients.py`, tiled
to length; each tile has a sign and a scale of its own, so that no magnitude repeats.
"""

import argparse
import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _record import head, parser, table, write
from gradients import SAVED
from jax import lax
from rich.console import Console

import fftgrad as fg

BLOCK = 4096
BYTES = fg.RangeFloat(bits=8)
CODECS: dict[str, fg.Codec] = {
    "bfloat16": fg.Cast("bfloat16"),
    "8 bits": BYTES,
    "top-k 10 %, 8 bits": fg.chain(fg.TopK(fraction=0.1), BYTES),
    "top-k 1 %, 8 bits": fg.chain(fg.TopK(fraction=0.01), BYTES),
    "top-k 1 %, 6 bits": fg.chain(fg.TopK(fraction=0.01), fg.LogQuantizer(bits=6)),
    "top-k 0.1 %, 8 bits": fg.chain(fg.TopK(fraction=0.001), BYTES),
    "FFT 4096, 5 %, 8 bits": fg.chain(fg.Fft(block=BLOCK), fg.TopK(fraction=0.05), BYTES),
    "FFT 64, 5 %, 8 bits": fg.chain(fg.Fft(block=64), fg.TopK(fraction=0.05), BYTES),
    "DCT 64, 5 %, 8 bits": fg.chain(fg.Dct(block=64), fg.TopK(fraction=0.05), BYTES),
    "Hadamard 4096, 4 bits": fg.chain(
        fg.Hadamard(block=BLOCK), fg.RangeFloat(bits=4, rounding="stochastic")
    ),
}
STEP = fg.Step.of(0)


@dataclasses.dataclass
class Task:
    """Something to time, on several inputs in turn."""

    what: str
    kind: str
    run: Callable[[Any], Any]
    inputs: list[Any]
    bytes: int | None = None
    temp: int | None = None
    compile_s: float | None = None
    times: list[float] = dataclasses.field(default_factory=list[float])


def gradients(n: int, source: pathlib.Path) -> list[np.ndarray[Any, Any]]:
    """Three vectors of length n made of the saved gradient."""
    tile = np.load(source)
    out: list[np.ndarray[Any, Any]] = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        tiles = -(-n // tile.size)
        factor = rng.choice([-1.0, 1.0], tiles) * np.exp(rng.uniform(-0.7, 0.7, tiles))
        whole = np.outer(factor.astype(np.float32), np.roll(tile, int(rng.integers(tile.size))))
        out.append(whole.ravel()[:n])
    return out


def compiled(what: str, kind: str, function: Any, inputs: list[Any], **fields: Any) -> Task:
    """A task of a JAX function, with what its compilation tells."""
    start = time.perf_counter()
    program = jax.jit(function).lower(inputs[0]).compile()
    compile_s = time.perf_counter() - start
    memory = program.memory_analysis()
    temp = None if memory is None else memory.temp_size_in_bytes
    return Task(
        what,
        kind,
        lambda x: jax.block_until_ready(program(x)),
        inputs,
        temp=temp,
        compile_s=compile_s,
        **fields,
    )


def stages(xs: list[jax.Array]) -> list[Task]:
    """Parts that top-k 1 % and the FFT pipeline are made of."""
    n, top, fft = xs[0].size, fg.TopK(fraction=0.01), fg.Fft(block=BLOCK)
    sparse = [jax.jit(lambda x: fg.compress(top, x))(x) for x in xs]
    kept = [payload.main for payload in sparse]
    places = [top.positions(payload.side, n, STEP) for payload in sparse]
    spectra = [jnp.fft.rfft(x.reshape(-1, BLOCK), norm="ortho") for x in xs]
    in_place: Any = {"indices_are_sorted": True, "unique_indices": True}

    def scatter(item: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.zeros(n).at[item[1]].set(item[0], **in_place)

    rows: dict[str, tuple[Any, list[Any]]] = {
        "read once: max |x|": (lambda x: jnp.max(jnp.abs(x)), xs),
        "select, index and gather": (lambda x: fg.compress(top, x), xs),
        "quantize and pack": (lambda v: fg.compress(BYTES, v), kept),
        "indices to positions": (lambda p: top.positions(p.side, n, STEP), sparse),
        "scatter": (scatter, list(zip(kept, places, strict=True))),
        "rfft 4096": (lambda x: jnp.fft.rfft(x.reshape(-1, BLOCK)), xs),
        "Fft 4096": (lambda x: fg.compress(fft, x), xs),
        "irfft 4096": (lambda c: jnp.fft.irfft(c, n=BLOCK, norm="ortho"), spectra),
    }
    return [compiled(what, "stage", *row) for what, row in rows.items()]


def pipelines(xs: list[jax.Array]) -> list[Task]:
    """Every codec both ways, and averaging many payloads against one."""
    tasks: list[Task] = []
    like = jax.ShapeDtypeStruct(xs[0].shape, "float32")
    averaged = ("top-k 1 %, 8 bits", "FFT 4096, 5 %, 8 bits")
    for name, codec in CODECS.items():
        size = fg.wire_bytes(codec, like)

        def down(x: jax.Array, codec: fg.Codec = codec) -> fg.Payload:
            return fg.compress(codec, x, step=STEP)

        def up(payload: fg.Payload, codec: fg.Codec = codec) -> jax.Array:
            return fg.decompress(codec, payload, like, step=STEP)

        tasks.append(compiled(name, "compress", down, xs, bytes=size))
        payloads = [tasks[-1].run(x) for x in xs]
        tasks.append(compiled(name, "decompress", up, payloads, bytes=size))
        for workers in (1, 8) if name in averaged else ():

            def mean(stacked: Any, codec: fg.Codec = codec) -> jax.Array:
                return fg.tools.decompress_mean(codec, stacked, like, step=STEP)

            stacked = [
                jax.tree.map(
                    lambda *leaves: jnp.stack(leaves),
                    *(payloads[(i + j) % len(payloads)] for j in range(workers)),
                )
                for i in range(len(payloads))
            ]
            tasks.append(compiled(f"{name}: mean of {workers}", "mean", mean, stacked))
    return tasks


def jax_peers(xs: list[jax.Array]) -> list[Task]:
    """What one would write without this library."""
    tasks: list[Task] = []
    for percent in (10, 1, 0.1):
        k = max(1, int(xs[0].size * percent / 100))

        def top(x: jax.Array, k: int = k) -> Sequence[jax.Array]:
            return lax.top_k(jnp.abs(x), k)

        tasks.append(compiled(f"lax.top_k {percent:g} %", "peer", top, xs, bytes=8 * k))
    k = max(1, xs[0].size // 100)
    bound = jnp.sort(jnp.abs(xs[0]))[-k]
    tasks.append(
        compiled(
            "jnp.nonzero 1 %, bound given",
            "peer",
            lambda x: jnp.nonzero(jnp.abs(x) >= bound, size=k, fill_value=0)[0],
            xs,
            bytes=8 * k,
        )
    )
    return tasks


def measure(n: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one length."""
    arrays = gradients(n, args.gradient)
    xs = [jnp.asarray(x) for x in arrays]
    tasks = [compiled("memory copy", "copy", lambda x: -x, xs, bytes=4 * n)]
    tasks += [*stages(xs), *pipelines(xs), *jax_peers(xs)]
    for i in range(-1, args.repeats):
        for task in tasks:
            # Everything three times; what takes long, no more.
            if i >= 3 and sum(task.times) > args.budget:
                continue
            value = task.inputs[i % len(task.inputs)]
            start = time.perf_counter()
            result = task.run(value)
            elapsed = 1e3 * (time.perf_counter() - start)
            del result
            if i >= 0:
                task.times.append(elapsed)
    copy = statistics.median(tasks[0].times)
    rows: list[dict[str, Any]] = []
    for task in tasks:
        ms = statistics.median(task.times)
        row = {"n": n, "what": task.what, "kind": task.kind, "ms": ms, "least_ms": min(task.times)}
        row |= {"copies": ms / copy, "gb_per_s": 4 * n / ms / 1e6, "wire_bytes": task.bytes}
        temp = None if task.temp is None else task.temp / (4 * n)
        rows.append(row | {"temp": temp, "compile_s": task.compile_s})
    return rows


def shown(rows: list[dict[str, Any]]) -> list[list[Any]]:
    """The rows, for a person."""

    def told(value: float | None, digits: int) -> str | None:
        return None if value is None else f"{value:.{digits}f}"

    return [
        [
            f"2^{row['n'].bit_length() - 1}",
            row["what"],
            row["kind"],
            *(told(row[key], 2) for key in ("ms", "gb_per_s", "copies")),
            told(row["wire_bytes"] and 8 * row["wire_bytes"] / row["n"], 3),
            told(row["temp"], 2),
            told(row["compile_s"], 1),
        ]
        for row in rows
    ]


COLUMNS = (
    "n",
    "",
    "",
    "ms",
    "GB/s",
    "copies",
    "bits a\nvalue",
    "temporaries\n/ input",
    "compile\ns",
)


def main() -> None:
    """Measures, prints, and writes cpu.json or gpu.json."""
    args = parser(
        __doc__,
        "codecs",
        log2n=([20, 22, 24, 26], "lengths"),
        repeats=(11, "rounds"),
        budget=(2000.0, "ms for one row"),
        device=("cpu", "cpu or gpu"),
        gradient=(SAVED, "what the data is made of"),
    ).parse_args()
    if args.smoke:
        args.log2n, args.repeats = [16], 3
    jax.config.update("jax_platforms", {"cpu": "cpu", "gpu": "cuda"}[args.device])
    record: dict[str, Any] = head() | {"rows": []}
    for log2n in args.log2n:
        rows = measure(2**log2n, args)
        Console(width=110).print(table("", COLUMNS, shown(rows)))
        record["rows"] = sorted([*record["rows"], *rows], key=lambda row: row["n"])
        # After each length, so that an interrupted run leaves what it has.
        write(args.out / f"{args.device}.json", record, "rows")


if __name__ == "__main__":
    main()
