"""What the candidates of a plan take on this machine, for the table that `fg.planning.plan` has.

Each is timed as one of so many workers, at a few sizes: `fftgrad/planning/timings.json`, from which
a plan answers at once. Nothing else may run meanwhile.

    python benchmarks/timings.py

With --check it prints how much longer each row of the table took than reading and writing the bytes
of its compiled program would. That is the error of plans for accelerators, whose codec times follow
from bytes and kernels alone.
"""

import dataclasses
import datetime
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
from _hlo import Program

import fftgrad as fg
from fftgrad.planning import _timing

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


def squares(values: int) -> dict[str, jax.ShapeDtypeStruct]:
    """A model of 16 square matrices, and a vector of the rest."""
    side = math.isqrt(values // 16)
    like = {f"matrix{i}": jax.ShapeDtypeStruct((side, side), jnp.float32) for i in range(16)}
    rest = values - 16 * side**2
    return like | {"vector": jax.ShapeDtypeStruct((rest,), jnp.float32)} if rest else like


def plain(row: fg.planning.Candidate) -> fg.planning.Candidate:
    """The row without Muon and without an eigenbasis, whose time depends on the matrices."""
    whole = getattr(row.optimizer, "func", row.optimizer)
    if whole in (fg.optimizers.feedback_muon, optax.contrib.muon):
        other = None if row.every > 1 else fg.optimizers.feedback_adam
        row = dataclasses.replace(row, optimizer=other)
    exchange = row.recipe.exchange
    if isinstance(exchange, fg.Eigenbasis):
        own = dataclasses.replace(row.recipe, exchange=exchange.exchange)
        row = dataclasses.replace(row, method=own)
    return row


def timing(row: fg.planning.Candidate, values: int, workers: int, seconds: float) -> list[float]:
    """Values, workers, and the seconds to compress and to decompress."""
    row = plain(row)
    tx, axes = row.transformation("data"), {"data": workers}
    like, every = squares(values), row.every
    took = fg.planning.time_exchange(tx, like, axes, every=every, seconds=seconds)
    return [values, workers, took.compress, took.decompress]


def counted(
    row: fg.planning.Candidate, values: int, workers: int, device: Any
) -> tuple[list[float], list[float]]:
    """Bytes and kernels until the first message and in all, of the program for a device."""
    row, axes = plain(row), {"data": workers}
    like = squares(values)

    def cost(tx: Any, cut: Callable[..., Any] = _timing.alone) -> np.ndarray:
        state = jax.eval_shape(tx.init, like)
        placed = jax.sharding.SingleDeviceSharding(device)
        run = jax.jit(
            cut(tx.update, axes),
            in_shardings=placed,
            out_shardings=placed,
            donate_argnums=1 if cut is _timing.alone else (),
        )
        compiled: Any = run.lower(like, state, like).compile()
        found = Program(compiled.as_text()).cost()
        return np.asarray([found.traffic, found.kernels])

    tx = row.transformation("data")
    whole, first = cost(tx), np.zeros(2)
    if row.every > 1:  # a conditional counts as its cheapest branch, which sends nothing
        whole = row.every * whole + cost(fg.compressed_pmean(row.recipe, axis_name="data"))
    else:
        first = cost(tx, _timing.until_sent)
    return first.tolist(), whole.tolist()


def check() -> None:
    """Print how much longer each row took than its bytes at the rate of a copy."""
    table = json.loads(TABLE.read_text())
    values, workers = SIZES[-1]
    rate = 8 * (1 << 22) / table["copy_seconds"]
    rows = {row.name: row for row in fg.planning.candidates(squares(values), workers)}
    for known in table["rows"]:
        _, (moved, _) = counted(rows[known["name"]], values, workers, jax.devices()[0])
        took = sum(known["points"][-1][2:])
        print(f"{known['name']:30} {took * rate / moved:.2f}", flush=True)


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
        check=(False, "compare the table with the bytes of compiled programs"),
    )
    parser.set_defaults(out=TABLE)
    args = parser.parse_args()
    if args.check:
        check()
        return
    points: dict[str, list[list[float]]] = {}
    for values, workers in SIZES[:1] if args.smoke else SIZES:
        found = fg.planning.candidates(squares(values), workers)
        for row in found[:2] if args.smoke else found:
            points.setdefault(row.name, []).append(timing(row, values, workers, args.seconds))
            print(row.name, points[row.name][-1], flush=True)
    record = {
        **_record.head(),
        "date": datetime.date.today().isoformat(),
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "copy_seconds": copy_seconds(),
        "rows": [{"name": name, "points": own} for name, own in points.items()],
    }
    if not args.smoke:
        _record.write(args.out, record, "rows")


if __name__ == "__main__":
    main()
