"""What each exchange moves, for 2 to 64 workers.

The bytes are read off the compiled programs, and are what crosses a worker's link in each
direction, where the workers form a ring.
"""

import os
from typing import Any

import jax
import numpy as np
from _record import head, parser, write
from _record import markdown as table
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

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


def compiled_row(
    name: str, exchange: fg.exchanges.Exchange, workers: int, side: int
) -> dict[str, Any]:
    """What the exchange of one matrix moves, of its compiled program."""
    devices = np.array(jax.devices("cpu")[:workers])
    axes: tuple[str, ...] = ("data",)
    if isinstance(exchange, fg.Hierarchical):
        axes, devices = ("slow", "fast"), devices.reshape(-1, TO_A_HOST)
    mesh = Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(axes))
    axis_name = axes if len(axes) > 1 else axes[0]
    tx = fg.compressed_pmean(exchange, bucketing=fg.Bucketing("leaf"), axis_name=axis_name)
    state = fg.init_state(tx, np.zeros((side, side), np.float32), mesh, axis_name)
    specs, spread = fg.state_specs(state, axis_name), P(axis_name)

    def step(rows: jax.Array, state: Any) -> Any:
        return tx.update(rows[0], state)

    update = jax.shard_map(step, mesh=mesh, in_specs=(spread, specs), out_specs=(P(), specs))
    rows = jax.ShapeDtypeStruct((workers, side, side), np.float32)
    found = fg.audit(jax.jit(update).lower(rows, state).compile())
    found = [c for c in found if c.branch in ((), (1,))]
    if isinstance(exchange, fg.Hierarchical):
        found = [c for c in found if c.dtype == "u32"]  # over fast links float32 travels
    link = sum(c.link_bytes(c.workers or workers) for c in found)
    return {"name": name, "workers": workers, "link": link}


def markdown(records: list[dict[str, Any]]) -> str:
    """What crosses a link in kB, and how many times less that is than bfloat16's."""
    counts = sorted({record["workers"] for record in records})
    compared = [n for n in COMPARED if n in counts]
    of = {(record["name"], record["workers"]): record for record in records}
    columns = ["exchange", f"{counts[0]} workers", *map(str, counts[1:])]
    columns += [f"bf16 / wire at {n}" for n in compared]
    rows: list[list[str]] = []
    for name in dict.fromkeys(record["name"] for record in records):
        link = {n: of[name, n]["link"] for n in counts if (name, n) in of}
        cells = [name, *(f"{link[n] / 1e3:,.1f}" if n in link else "" for n in counts)]
        # Over slow links alone bfloat16 sends less, too.
        against = link.keys() if name != SLOW_LINKS else ()
        cells += [
            f"{of[NARROW, n]['link'] / link[n]:.1f}" if n in against else "" for n in compared
        ]
        rows.append(cells)
    return table(columns, rows)


def main() -> None:
    """Compiles, prints, and writes cpu.json."""
    args = parser(
        __doc__,
        "exchange",
        workers=([2, 4, 8, 16, 32, 64], "how many"),
        side=(1024, "of the square gradient"),
    ).parse_args()
    if args.smoke:
        args.workers, args.side = [2], 64
    # Or the devices' shared pool of threads may be full of those that wait for each other.
    os.environ.setdefault("PJRT_NPROC", str(4 * max(args.workers)))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(args.workers))
    record: dict[str, Any] = {**head(), "values": args.side**2, "rows": []}
    for workers in args.workers:
        for name, exchange in exchanges(workers).items():
            record["rows"].append(compiled_row(name, exchange, workers, args.side))
        # After each number, so that an interrupted run leaves what it has.
        write(args.out / "cpu.json", record, "rows")
    print(markdown(record["rows"]))


if __name__ == "__main__":
    main()
