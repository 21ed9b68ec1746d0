"""What each exchange moves and takes, for 2 to 64 workers.

The bytes are read off the compiled programs: what a worker hands to its collectives, and what then
crosses its link in each direction, where the workers form a ring. The workers are virtual devices
of one machine: the times are those of all of them together on its cores, without any link.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import _style as style
import jax
import numpy as np
from _record import head, parser, save, write
from _record import markdown as table
from _style import styles
from gradients import SAVED
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from program import simulated

import fftgrad as fg

TO_A_HOST = 8
COMPARED = (8, 64)
"""Numbers of workers among which an exchange is compared with bfloat16."""
NARROW, SLOW_LINKS = "bfloat16, two stages", "hierarchical, slow links"
BYTES = fg.RangeFloat(bits=8)
TOP_K = fg.chain(fg.TopK(fraction=0.01), BYTES)
FFT = fg.chain(fg.Fft(block=64), fg.TopK(fraction=0.01), BYTES)


def exchanges(workers: int) -> dict[str, fg.exchanges.Exchange]:
    """The rows, for that many workers."""
    rows: dict[str, fg.exchanges.Exchange] = {
        "dense": fg.AllReduce(),
        NARROW: fg.TwoStage(fg.Cast("bfloat16"), workers),
        "gather top-k 1 %": fg.AllGather(TOP_K),
        "gather FFT 1 %": fg.AllGather(FFT),
        "two stages top-k 1 %": fg.TwoStage(TOP_K, workers),
        "two stages FFT 1 %": fg.TwoStage(FFT, workers),
        "two stages sign": fg.TwoStage(fg.Sign(), workers),
        "shared top-k 1 %": fg.exchanges.LeaderTopK(fg.TopK(fraction=0.01)),
        "shared FFT 1 %": fg.exchanges.LeaderTopK(
            fg.chain(fg.Fft(block=64), fg.TopK(fraction=0.01))
        ),
        "random 1 %, summed": fg.AllReduce(fg.codecs.RandomK(fraction=0.01)),
        "PowerSGD rank 4": fg.PowerSgd(rank=4),
        "ternary sum": fg.exchanges.QuantizedAllReduce(workers=workers),
        "warm-up, then gather": fg.Scheduled({0: fg.AllReduce(), 1: fg.AllGather(TOP_K)}),
    }
    if workers > TO_A_HOST:
        rows[SLOW_LINKS] = fg.Hierarchical("fast", TO_A_HOST, fg.AllGather(TOP_K))
    return rows


def gradients(shape: tuple[int, int], workers: int) -> np.ndarray[Any, Any]:
    """The saved gradient, with noise of each worker's own."""
    gradient = np.load(SAVED)
    common = np.resize(gradient, shape)
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((workers, *shape), np.float32)
    return common * (1 + noise)


def compile_row(
    name: str, exchange: fg.exchanges.Exchange, workers: int, shape: tuple[int, int]
) -> tuple[dict[str, Any], Callable[[], None]]:
    """The exchange of one matrix, compiled and audited: what is known of it, and how to run it."""
    devices = np.array(jax.devices("cpu")[:workers])
    axes: tuple[str, ...] = ("data",)
    if isinstance(exchange, fg.Hierarchical):
        axes, devices = ("slow", "fast"), devices.reshape(-1, TO_A_HOST)
    mesh = Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(axes))
    axis_name = axes if len(axes) > 1 else axes[0]
    tx = fg.compressed_pmean(exchange, bucketing=fg.Bucketing("leaf"), axis_name=axis_name)
    state = fg.init_state(tx, np.zeros(shape, np.float32), mesh, axis_name)
    specs = fg.state_specs(state, axis_name)
    spread = NamedSharding(mesh, P(axis_name))

    def step(rows: jax.Array, state: Any) -> Any:
        return tx.update(rows[0], state)

    update = jax.shard_map(step, mesh=mesh, in_specs=(P(axis_name), specs), out_specs=(P(), specs))
    rows = jax.device_put(gradients(shape, workers), spread)
    start = time.perf_counter()
    program = jax.jit(update).lower(rows, state).compile()
    elapsed = time.perf_counter() - start
    found = [c for c in fg.audit(program) if c.branch in ((), (1,))]
    if isinstance(exchange, fg.Hierarchical):
        found = [c for c in found if c.dtype == "u32"]  # over fast links float32 travels
    link = sum(c.link_bytes(c.workers or workers) for c in found)
    handed = sum(c.bytes for c in found)
    held = [state]

    def run() -> None:
        out, held[0] = program(rows, held[0])
        jax.block_until_ready((out, held[0]))

    row = {"name": name, "workers": workers, "handed": handed, "link": link, "compile_s": elapsed}
    return row, run


def measure(workers: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows of one number of workers, in turns."""
    rows = [
        compile_row(name, exchange, workers, (args.side, args.side))
        for name, exchange in exchanges(workers).items()
    ]
    times = np.zeros((args.rounds + 1, len(rows)))
    for turn in times:
        for place, (_, run) in enumerate(rows):
            start = time.perf_counter()
            run()
            turn[place] = 1e3 * (time.perf_counter() - start)
    medians = np.median(times[1:], axis=0)  # the first is for warming up
    return [row | {"ms": float(ms)} for (row, _), ms in zip(rows, medians, strict=True)]


def markdown(records: list[dict[str, Any]]) -> str:
    """What crosses a link in kB, how many times less that is than bfloat16's, and times."""
    counts = sorted({record["workers"] for record in records})
    compared = [n for n in COMPARED if n in counts]
    of = {(record["name"], record["workers"]): record for record in records}
    columns = ["exchange", f"{counts[0]} workers", *map(str, counts[1:])]
    columns += [f"bf16 / wire at {n}" for n in compared] + [f"ms at {n}" for n in compared[:1]]
    rows: list[list[str]] = []
    for name in dict.fromkeys(record["name"] for record in records):
        link = {n: of[name, n]["link"] for n in counts if (name, n) in of}
        cells = [name, *(f"{link[n] / 1e3:,.1f}" if n in link else "" for n in counts)]
        # Over slow links alone bfloat16 sends less, too.
        against = link.keys() if name != SLOW_LINKS else ()
        cells += [
            f"{of[NARROW, n]['link'] / link[n]:.1f}" if n in against else "" for n in compared
        ]
        rows.append(cells + [f"{of[name, n]['ms']:.0f}" if n in link else "" for n in compared[:1]])
    return table(columns, rows)


SHOWN = {
    "dense": "dense",
    "bfloat16, two stages": "dense, 16 bits",
    "gather top-k 1 %": "top-k 1 %, gathered",
    "two stages top-k 1 %": "top-k 1 %, two stages",
    "PowerSGD rank 4": "PowerSGD rank 4",
}
"""The curves of the figure, by their names in it."""


def plot(records: list[dict[str, Any]]) -> Figure:
    """Bytes over a worker's link against the number of workers."""
    figure = style.figure(3.8)
    axes = figure.subplots()
    looks = styles(SHOWN.values())
    for name, shown in SHOWN.items():
        own = [r for r in records if r["name"] == name]
        if own:
            spots = [r["workers"] for r in own], [r["link"] for r in own]
            axes.plot(*spots, marker=".", label=shown, **looks[shown])
    counts = sorted({record["workers"] for record in records})
    axes.set(xscale="log", yscale="log", xlabel="workers", xticks=counts)
    axes.set_xticklabels(list(map(str, counts)))
    axes.minorticks_off()
    axes.set_title("Bytes over a worker's link a step, each way")
    axes.set_yticks([1e4, 1e5, 1e6, 1e7], ["10 kB", "100 kB", "1 MB", "10 MB"])
    axes.legend(loc="center left", labelcolor="linecolor")
    return figure


def main() -> None:
    """Measures, prints, and writes cpu.json and exchange.svg."""
    args = parser(
        __doc__,
        "exchange",
        workers=([2, 4, 8, 16, 32, 64], "how many"),
        side=(1024, "of the square gradient"),
        rounds=(5, "that are timed"),
        show=(False, "run nothing, print and draw what is there"),
    ).parse_args()
    if args.show:
        records = json.loads((args.out / "cpu.json").read_text())["rows"]
        print(markdown(records))
        save(plot(records), args.out, "exchange")
        return
    if args.smoke:
        args.workers, args.side, args.rounds = [2], 64, 1
    jax.config.update("jax_platforms", "cpu")
    simulated(max(args.workers))
    record: dict[str, Any] = {**head(), "values": args.side**2, "rows": []}
    for workers in args.workers:
        record["rows"] += measure(workers, args)
        # After each number, so that an interrupted run leaves what it has.
        write(args.out / "cpu.json", record, "rows")
        save(plot(record["rows"]), args.out, "exchange")
    print(markdown(record["rows"]))


if __name__ == "__main__":
    main()
