"""What the candidates of a plan take on this machine, for the table that `fg.planning.plan` has.

Each is timed as one of so many workers, at a few sizes: `fftgrad/planning/timings.json`, from which
a plan answers at once. Nothing else may run meanwhile.

    python benchmarks/timings.py
"""

import dataclasses
import json
import math
import os
import pathlib
import re
import time
from collections.abc import Callable
from typing import Any

import _record
import jax
import jax.numpy as jnp
import numpy as np
import optax

import fftgrad as fg

TABLE = _record.ROOT / "fftgrad/planning/timings.json"
SIZES = ((1 << 16, 16), (1 << 20, 4), (1 << 20, 16), (1 << 22, 16))
"""Values and workers."""


def least_seconds(run: Callable[[], Any]) -> float:
    """Of the fastest of a few runs."""
    times: list[float] = []
    for _ in range(100):
        begun = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begun)
    return min(times)


def copy_seconds() -> float:
    """What a copy of four million values takes, to where others were."""
    x, into = (np.ones(1 << 22, np.float32) for _ in range(2))
    return least_seconds(lambda: np.copyto(into, x))


def orthogonalizations_per_second(side: int = 512, matrices: int = 4) -> float:
    """Multiplications and additions of a Muon in a second."""
    tx = optax.contrib.muon(1.0)
    keys = jax.random.split(jax.random.key(0), matrices)
    gradients = [jax.random.normal(key, (side, side)) for key in keys]
    state = tx.init(gradients)
    run = jax.jit(lambda g: tx.update(g, state, g)[0])
    return matrices * 5 * 6 * side**3 / least_seconds(lambda: run(gradients))


def squares(values: int) -> dict[str, jax.ShapeDtypeStruct]:
    """A model of so many parameters, as `fftgrad plan --parameters` has it."""
    side = math.isqrt(values // 16)
    like = {f"matrix{i}": jax.ShapeDtypeStruct((side, side), jnp.float32) for i in range(16)}
    rest = values - 16 * side**2
    return like | {"vector": jax.ShapeDtypeStruct((rest,), jnp.float32)} if rest else like


def timing(row: fg.planning.Candidate, values: int, workers: int, seconds: float) -> list[float]:
    """Of a row; without what a Muon or an eigenbasis takes for matrices, which goes by shapes."""
    whole = getattr(row.optimizer, "func", row.optimizer)
    if whole in (fg.optimizers.feedback_muon, optax.contrib.muon):
        other = None if row.every > 1 else fg.optimizers.feedback_adam
        row = dataclasses.replace(row, optimizer=other)
    exchange = row.recipe.exchange
    if isinstance(exchange, fg.Eigenbasis):
        own = dataclasses.replace(row.recipe, exchange=exchange.exchange)
        row = dataclasses.replace(row, method=own)
    tx, axes = row.transformation("data"), {"data": workers}
    took = fg.planning.time_exchange(tx, squares(values), axes, seconds=seconds)
    return [values, workers, took.compress, took.decompress]


def processor() -> str:
    """Its name."""
    known = pathlib.Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*: (.*)$", known.read_text() if known.exists() else "", re.M)
    return named[1] if named else "a CPU"


def main() -> None:
    """Times all of them."""
    parser = _record.parser(
        __doc__,
        "codecs",
        seconds=(1.0, "to time each row"),
        only=("", "rows whose name contains this; the others stay as they are"),
    )
    parser.set_defaults(out=TABLE)
    args = parser.parse_args()
    points: dict[str, list[list[float]]] = {}
    for values, workers in SIZES[:1] if args.smoke else SIZES:
        found = fg.planning.candidates(squares(values), workers)
        found = [row for row in found if args.only in row.name]
        for row in found[:2] if args.smoke else found:
            points.setdefault(row.name, []).append(timing(row, values, workers, args.seconds))
            print(row.name, points[row.name][-1], flush=True)
    record = {
        **_record.head(),
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "copy_seconds": copy_seconds(),
        "muon_flops_per_second": orthogonalizations_per_second(),
        "rows": [{"name": name, "points": own} for name, own in points.items()],
    }
    if args.only:  # in the units of the machine of the table
        old = json.loads(TABLE.read_text())
        by = old["copy_seconds"] / record["copy_seconds"]
        scaled = {n: [[*p[:2], *(by * s for s in p[2:])] for p in own] for n, own in points.items()}
        names = [row.name for row in fg.planning.candidates(squares(1 << 16), 16)]
        known = {row["name"]: row["points"] for row in old["rows"]} | scaled
        record = old | {"rows": [{"name": name, "points": known[name]} for name in names]}
    if not args.smoke:
        _record.write(args.out, record, "rows")


if __name__ == "__main__":
    main()
