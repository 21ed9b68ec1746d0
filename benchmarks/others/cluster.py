"""What others measured on their clusters, beside what `fg.advise.predict_step` says of it.

Each file of `clusters/` is one source: whose, where, and rows of a bandwidth, workers, bytes and
seconds. A row is predicted with the bandwidth as it is stated or as iperf measured it; where
`short_queue.py` has done to such a link what NCCL does, with the share of it that rings got there;
and where the source has a reference run over the same link, with what its collective got. No other
figure is taken from the runs that are predicted.
"""

import json
import pathlib
import statistics
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from matplotlib.figure import Figure
from rich.console import Console

import fftgrad as fg

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # what the benchmarks share
import _style as style
from _record import RESULTS, head, markdown, parser, save, table, write

SOURCES = ("l40s", "one_bit_adam", "p3dn", "horovod", "ddp")
FILES = pathlib.Path(__file__).parent / "clusters"
AXIS = "data"
EMULATED = RESULTS / "others/short_queue.json"
SENT_ALIKE = "DiLoCo", "LocalSGD"
"""Averages of parameters every H steps, which send the same."""


class Run(NamedTuple):
    """A row of a source."""

    source: str
    kind: str
    setting: str
    workers: int
    every: int
    gradient: int  # bytes that a worker hands to the all-reduce
    bandwidth: float  # bytes per second, stated or by iperf
    got: float  # by the all-reduce of the reference run over the same link; 0 without one
    step: float  # seconds without exchange
    buckets: int
    passed_on: int  # bytes of a broadcast in each step, beside the gradient
    measured: float  # the median over runs
    model: str
    held_back: bool
    reference: bool

    @property
    def name(self) -> str:
        """What tells it from the others of its kind and setting."""
        return self.model or (f"H = {self.every}" if self.kind in SENT_ALIKE else "")


def source(name: str) -> dict[str, Any]:
    """What a file says."""
    return json.loads((FILES / f"{name}.json").read_text())


def runs(name: str) -> list[Run]:
    """The rows of a source."""
    rows = source(name)["rows"]
    got = {(r["kind"], r["setting"]): _bandwidth(r) for r in rows if r.get("reference")}
    by_setting = {setting: found for (_, setting), found in got.items()}
    return [
        Run(
            name,
            row["kind"],
            row["setting"],
            row["workers"],
            row["every"],
            row["gradient_bytes"],
            row["bits_per_s"] / 8,
            by_setting.get(row["setting"], 0.0),
            row["step_s"],
            row.get("buckets", 1),
            row.get("passed_on_bytes", 0),
            statistics.median(row["seconds"]),
            row.get("model", ""),
            row.get("held_back", False),
            row.get("reference", False),
        )
        for row in rows
    ]


def _bandwidth(row: dict[str, Any]) -> float:
    """What the ring of a run without overlap got."""
    sent = 2 * (row["workers"] - 1) / row["workers"] * row["gradient_bytes"]
    return sent / (statistics.median(row["seconds"]) - row["step_s"])


def chain(run: Run) -> optax.GradientTransformation:
    """What sends as the run does."""
    if run.every > 1:
        outer = optax.sgd(0.7, 0.9, nesterov=True)
        return fg.optimizers.diloco(
            optax.sgd(1.0), outer, run.every, fg.AllReduce(), axis_name=AXIS
        )
    mean = fg.compressed_pmean(fg.AllReduce(), axis_name=AXIS)
    return optax.chain(mean, passing_on(run)) if run.passed_on else mean


def passing_on(run: Run) -> optax.GradientTransformation:
    """A broadcast along a ring: each worker but the last hands all of it to the next."""
    along = [(worker, worker + 1) for worker in range(run.workers - 1)]

    def update(updates: Any, _: Any) -> Any:
        jax.lax.ppermute(jnp.zeros(run.passed_on // 4), AXIS, along)
        return updates

    return optax.stateless(update)


def predicted(run: Run, link: fg.advise.Link | float) -> float:
    """Seconds of a step over such links, or links of such a bandwidth."""
    return fg.advise.predict_step(
        chain(run),
        jax.ShapeDtypeStruct((run.gradient // 4,), "float32"),
        step=run.step,
        link=link,
        axes={AXIS: run.workers},
        timing=fg.advise.Timing(0.0, 0.0),
        buckets=run.buckets,
    )


def emulated(setting: str) -> fg.advise.Link | None:
    """A limited link of the L40S, with the share that each collective got of one here."""
    rows = json.loads(EMULATED.read_text())["rows"]
    many = max(row["connections"] for row in rows)
    kinds = {"all-reduce": "all-reduce", "broadcast": "collective-permute"}
    limits = {fg.advise.Link(row["rate"]): row["rate"] for row in rows}
    if setting == "no limit" or (link := fg.advise.Link(setting)) not in limits:
        return None
    shares = tuple(
        (kinds[row["kind"]], min(1.0, statistics.median(row["share"])))
        for row in rows
        if row["connections"] == many and row["rate"] == limits[link]
    )
    return fg.advise.Link(link.bandwidth, link.latency, shares)


def row_of(run: Run) -> dict[str, Any]:
    """A run and what is predicted of it, in seconds a step.

    `by_emulation` is what a link of `short_queue.py` makes, `by_reference` what the bandwidth of
    the reference run does, if there are any; `gradient_alone` leaves out the broadcast.
    """
    told = ("source", "kind", "setting", "workers", "held_back", "reference", "name", "measured")
    by_reference = run.got and not run.reference
    link = emulated(run.setting) if run.source == "l40s" else None
    return {key: getattr(run, key) for key in told} | {
        "predicted": predicted(run, run.bandwidth),
        "by_emulation": link and predicted(run, link),
        "by_reference": predicted(run, run.got) if by_reference else None,
        "gradient_alone": predicted(run._replace(passed_on=0), run.bandwidth),
    }


def planned_order(setting: str) -> tuple[list[str], list[str]]:
    """DDP and DiLoCo every 8, 32 and 128 steps over a link of the L40S: planned, and measured."""
    own = [r for r in runs("l40s") if r.setting == setting and r.kind in ("DiLoCo", "DDP")]
    own = [r for r in own if r.kind == "DDP" or r.every > 1]
    names = {run.every: f"{run.kind} {run.name}".strip() for run in own}
    rows = [
        fg.advise.Candidate(
            names[run.every], fg.AllReduce(), every=run.every, dense=run.every == 1, loss="as dense"
        )
        for run in own
    ]
    found = fg.advise.plan(
        jax.ShapeDtypeStruct((own[0].gradient // 4,), "float32"),
        step=statistics.median(run.step for run in own),
        link=own[0].bandwidth,
        workers=own[0].workers,
        rows=rows,
        timings={row.name: fg.advise.Timing(0.0, 0.0) for row in rows},
    )
    ordered = sorted(own, key=lambda run: run.measured)
    return [row.name for row in found.rows], [names[run.every] for run in ordered]


# Tables


class Group(NamedTuple):
    """Rows of a source, and which of their predictions is compared."""

    source: str
    of: str
    where: dict[str, tuple[Any, ...]]  # the values that a row may have


LIMITED = {"held_back": (False,)}
GROUPS = {
    "L40S, DiLoCo": Group("l40s", "predicted", {"kind": ("DiLoCo",)} | LIMITED),
    "L40S, DiLoCo, by the emulated link": Group(
        "l40s", "by_emulation", {"kind": ("DiLoCo",)} | LIMITED
    ),
    "L40S, LocalSGD, held back": Group("l40s", "predicted", {"kind": ("LocalSGD",)}),
    "L40S, LocalSGD, by the emulated link": Group("l40s", "by_emulation", {"kind": ("LocalSGD",)}),
    "L40S, LocalSGD, by the rate of DiLoCo, H = 1": Group(
        "l40s", "by_reference", {"kind": ("LocalSGD",)}
    ),
    "L40S, DDP, its gradient alone": Group("l40s", "gradient_alone", {"kind": ("DDP",)} | LIMITED),
    "L40S, DDP, with its broadcast": Group("l40s", "predicted", {"kind": ("DDP",)} | LIMITED),
    "L40S, DDP, by the emulated link": Group("l40s", "by_emulation", {"kind": ("DDP",)} | LIMITED),
    "L40S, DDP, by the rate of DiLoCo, H = 1": Group(
        "l40s", "by_reference", {"kind": ("DDP",)} | LIMITED
    ),
    "L40S, no limit, held back": Group("l40s", "predicted", {"setting": ("no limit",)}),
    "1-bit Adam, Ethernet": Group("one_bit_adam", "predicted", {"kind": ("Ethernet",)}),
    "1-bit Adam, Ethernet, by the rate among 8": Group(
        "one_bit_adam", "by_reference", {"kind": ("Ethernet",)}
    ),
    "1-bit Adam, InfiniBand": Group("one_bit_adam", "predicted", {"kind": ("InfiniBand",)}),
    "1-bit Adam, InfiniBand, by the rate among 16": Group(
        "one_bit_adam", "by_reference", {"kind": ("InfiniBand",)}
    ),
    "p3dn, 1 and 25 Gbit/s": Group("p3dn", "predicted", {"setting": ("1 Gbit/s", "25 Gbit/s")}),
    "p3dn, 40 Gbit/s": Group("p3dn", "predicted", {"setting": ("40 Gbit/s",)}),
    "Horovod, RDMA": Group("horovod", "predicted", {"kind": ("RDMA",)}),
    "Horovod, TCP": Group("horovod", "predicted", {"kind": ("TCP",)}),
    "PyTorch DDP, InfiniBand": Group("ddp", "predicted", {}),
}
"""The rows of the page's table."""


def errors(rows: list[dict[str, Any]], group: str) -> list[float]:
    """Of what is predicted of a group, in proportion to what was measured."""
    own = GROUPS[group]
    return [
        row[own.of] / row["measured"] - 1
        for row in rows
        if row["source"] == own.source and row[own.of] is not None
        if all(row[key] in values for key, values in own.where.items())
    ]


def summary_table(rows: list[dict[str, Any]]) -> str:
    """The groups, as the page has them."""
    cells = list[list[str]]()
    for group in GROUPS:
        found = errors(rows, group)
        median = 100 * statistics.median(map(abs, found))
        worst = f"{100 * max(found, key=abs):+.0f} %".replace("-", "−")
        cells.append([group, str(len(found)), f"{median:.0f} %", worst])
    return markdown(["compared", "rows", "median error", "largest"], cells)


COLORS = {
    "l40s": ("L40S, 50 Mbit/s to 5 Gbit/s", style.INK, "o"),
    "one_bit_adam": ("V100, 1-bit Adam's tables", style.LOCAL, "s"),
    "p3dn": ("V100, p3dn", style.BASIS, "^"),
    "horovod": ("Pascal, Horovod", style.FEW_BITS, "D"),
    "ddp": ("V100, PyTorch DDP", style.PEER, "v"),
}


def draw(rows: list[dict[str, Any]]) -> Figure:
    """Measured against predicted; filled by the stated bandwidth, hollow by a reference run's."""
    figure = style.figure(5.2)
    axes = figure.add_subplot()
    seconds = [row[key] for row in rows for key in ("predicted", "measured")]
    low, high = 0.7 * min(seconds), 1.4 * max(seconds)
    axes.plot([low, high], [low, high], color=style.MUTED, lw=1)
    band = [0.8 * low, 0.8 * high], [1.2 * low, 1.2 * high]
    axes.fill_between([low, high], *band, color=style.GRID, lw=0, label="within 20 %")
    for name, (label, color, mark) in COLORS.items():
        own = [row for row in rows if row["source"] == name]
        for key, face in (("predicted", color), ("by_reference", "none")):
            some = [row for row in own if row[key] is not None]
            spots = [row[key] for row in some], [row["measured"] for row in some]
            shown = label if key == "predicted" else None
            axes.plot(*spots, mark, ms=6, mec=color, mfc=face, ls="", label=shown)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axes.set(xlabel="predicted seconds", ylabel="measured seconds")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.legend(loc="upper left")
    return figure


def main() -> None:
    """Prints the rows, and writes them and the figure."""
    show = (False, "predict nothing, print and draw what is there")
    args = parser(__doc__, "others", show=show).parse_args()
    path = args.out / "clusters.json"
    if args.show:
        told = json.loads(path.read_text())
    else:
        names = SOURCES[-1:] if args.smoke else SOURCES
        found = [row_of(run) for name in names for run in runs(name)]
        settings = dict.fromkeys(run.setting for run in runs("l40s") if not run.held_back)
        planned = {setting: planned_order(setting) for setting in settings}
        told = head() | {"orders": planned, "rows": found}
        write(path, told, "rows")
        told = json.loads(path.read_text())
    rows, console = told["rows"], Console()
    cells = [
        [
            row["source"],
            row["setting"],
            f"{row['kind']} {row['name']}",
            f"{row['predicted']:.3g}",
            row["by_emulation"] and f"{row['by_emulation']:.3g}",
            row["by_reference"] and f"{row['by_reference']:.3g}",
            f"{row['measured']:.3g}",
            f"{row['predicted'] / row['measured'] - 1:+.0%}",
        ]
        for row in rows
    ]
    columns = (
        "",
        "link",
        "what",
        "predicted, s",
        "emulated",
        "by a reference",
        "measured",
        "error",
    )
    console.print(table("Clusters that others measured", columns, cells))
    if not args.smoke:
        print(summary_table(rows))
        save(draw(rows), args.out, "others_clusters")


if __name__ == "__main__":
    main()
