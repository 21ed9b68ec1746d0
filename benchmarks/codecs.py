"""Time codecs against a memory copy and `lax.top_k`, on a gradient-like vector.

One process, compiled functions, medians of repeated calls on inputs that are never zero and never
plain normal noise: heavy tails, serial correlation, and a scale that changes from block to block,
as it does from layer to layer.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import fftgrad as fg

CODECS = {
    "bfloat16": fg.Cast("bfloat16"),
    "range float, 8 bits": fg.RangeFloat(bits=8),
    "top-k 1 %, 8 bits": fg.chain(fg.TopK(fraction=0.01), fg.RangeFloat(bits=8)),
    "FFT 64, 10 %, 8 bits": fg.chain(
        fg.Fft(block=64), fg.TopK(fraction=0.1), fg.RangeFloat(bits=8)
    ),
    "FFT whole, 15 %, 10 bits": fg.chain(
        fg.Fft(block=None, half=True), fg.TopK(fraction=0.15), fg.RangeFloat(bits=10)
    ),
}


def gradient(n: int, seed: int) -> jax.Array:
    """A vector with a gradient's tails, correlation and changes of scale."""
    rng = np.random.default_rng(seed)
    white = rng.standard_t(3, n + 1).astype(np.float32)
    scale = np.repeat(np.exp(rng.standard_normal(-(-n // 4096))), 4096)[:n]
    return jnp.asarray((white[1:] + 0.5 * white[:-1]) * scale.astype(np.float32))


def median_ms(function: Callable[..., Any], inputs: list[Any], repeats: int) -> float:
    """Median time of a compiled call, over fresh inputs in turn."""
    compiled = jax.jit(function)
    for value in inputs:
        jax.block_until_ready(compiled(value))
    times: list[float] = []
    for i in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(compiled(inputs[i % len(inputs)]))
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def measure(n: int, repeats: int) -> list[dict[str, Any]]:
    """One row for each thing that is timed at a length."""
    inputs = [gradient(n, seed) for seed in range(3)]
    copy = median_ms(jnp.negative, inputs, repeats)
    k = max(1, n // 100)
    rows: list[dict[str, Any]] = [
        {"what": "memory copy", "compress_ms": copy, "bytes": 4 * n},
        {
            "what": "lax.top_k of |x|, 1 %",
            "compress_ms": median_ms(lambda x: jax.lax.top_k(jnp.abs(x), k), inputs, repeats),
            "bytes": 8 * k,
        },
    ]
    for name, codec in CODECS.items():
        like = inputs[0]
        payloads = [jax.jit(lambda x, c=codec: fg.compress(c, x))(x) for x in inputs]
        back = fg.decompress(codec, payloads[0], like)
        rows.append(
            {
                "what": name,
                "codec": repr(codec),
                "compress_ms": median_ms(lambda x, c=codec: fg.compress(c, x), inputs, repeats),
                "decompress_ms": median_ms(
                    lambda p, c=codec, like=like: fg.decompress(c, p, like), payloads, repeats
                ),
                "bytes": fg.wire_bytes(codec, like),
                "error": float(jnp.linalg.norm(back - like) / jnp.linalg.norm(like)),
            }
        )
    return [{"n": n, "copies": row["compress_ms"] / copy, **row} for row in rows]


def table(rows: list[dict[str, Any]]) -> Table:
    """The rows, for a person."""
    columns = ("n", "", "compress\nms", "in\ncopies", "decompress\nms", "bits a\nvalue", "error")
    out = Table(*columns, box=box.SIMPLE_HEAD)
    for row in rows:
        out.add_row(
            f"2^{row['n'].bit_length() - 1}",
            row["what"],
            f"{row['compress_ms']:.2f}",
            f"{row['copies']:.1f}",
            f"{row['decompress_ms']:.2f}" if "decompress_ms" in row else "",
            f"{8 * row['bytes'] / row['n']:.3f}",
            f"{row['error']:.3f}" if "error" in row else "",
        )
    return out


def main() -> None:
    """Measures, prints, and writes codecs.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--log2n", type=int, nargs="+", default=[18, 20, 22], help="lengths")
    parser.add_argument("--repeats", type=int, default=11, help="timed calls of each function")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benchmarks"))
    parser.add_argument("--smoke", action="store_true", help="short vectors, few calls")
    args = parser.parse_args()
    if args.smoke:
        args.log2n, args.repeats = [12], 3
    rows = [row for log2n in args.log2n for row in measure(2**log2n, args.repeats)]
    Console(width=100).print(table(rows))
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=pathlib.Path(__file__).parent,
    ).stdout.strip()
    record = {
        "command": f"python benchmarks/codecs.py --log2n {' '.join(map(str, args.log2n))}",
        "device": f"{jax.devices()[0].device_kind} ({platform.machine()}, {os.cpu_count()} cores)",
        "jax": jax.__version__,
        "commit": commit,
        "rows": rows,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "codecs.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
