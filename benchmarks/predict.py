"""What `fg.advise.plan` predicts of the runs over slow links, beside what they took.

What a step takes without exchange, and an exchange without the other workers, comes from one file
for each model; the bandwidth and the latency of a link from one dense run for each setting; what
travels from shapes alone. The machine is shared, and some runs are of days on which it was slower:
the gradients of a file's runs say by how much, one number for the file.
"""

import json
import pathlib
import statistics
from typing import Any, NamedTuple

import _style as style
import jax
import optax
from _record import RESULTS, head, parser, save, table, write
from links import load
from matplotlib.figure import Figure
from methods import AXIS, LINKS, Setting
from rich.console import Console
from scipy import stats
from tasks import WORKLOADS

import fftgrad as fg

GROUPS = (
    "alexnet-100mbit",
    "alexnet-1gbit",
    "alexnet-loopback",
    "lm-100mbit",
    "lm-1gbit",
    "lm-1gbit-quiet",
    "lm-1gbit-delay",
    "resnet-100mbit",
    "lm-250mbit",
    "resnet-250mbit",
    "lm-1gbit-2ms",
    "resnet-loopback",
)
SAME = {
    "dense": "dense float32",
    "bf16": "dense bfloat16",
    "qsgd": "QSGD 4 bits",
    "powersgd": "PowerSGD rank 4",
    "sign": "signs, two stages",
    "local-4": "4 local steps, signs",
}
"""The candidates of a plan that are a method of these runs, or its exchange."""
CODECS = ("top-k", "top-k-mille", "two-stage", "random-k", "fft-16", "fft-64")
"""Methods that are a codec, of whose loss a plan knows nothing."""
PLANNED = ("alexnet", "resnet")
MEASURED = RESULTS / "slow_network"
Link = tuple[str, str, bool]
"""Rate, delay, and whether it was over loopback."""


class Point(NamedTuple):
    """One method in one setting."""

    group: str
    method: str
    predicted: float  # seconds of a step
    measured: float  # the median over the turns

    @property
    def error(self) -> float:
        """In proportion to what was measured."""
        return self.predicted / self.measured - 1


def setting(content: dict[str, Any]) -> Link:
    """Where a file was measured."""
    own = content["settings"]
    return ("", "", True) if own["loopback"] else (own["rate"], own["delay"], False)


def links(folder: pathlib.Path) -> dict[Link, fg.advise.Link]:
    """What was measured of each, in the first file that has it."""
    out = dict[Link, fg.advise.Link]()
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        for run in content.get("runs", ()):
            if "shares" in run:
                shares = tuple((kind, share) for kind, share in run["shares"])
                link = fg.advise.Link(
                    run["bandwidth"], run["latency_s"], shares, run["link_residual"]
                )
                out.setdefault(setting(content), link)
    return out


def predicted(
    workload: str, method: str, workers: int, link: fg.advise.Link, step: float, alone: float
) -> float:
    """Seconds of a step with the exchange of a method, which takes `alone` without the others."""
    own = LINKS[method]
    return fg.advise.predict_step(
        own.assemble(Setting(workers), optax.identity()),
        _like(workload),
        step=step,
        link=link,
        axes={AXIS: workers},
        timing=fg.advise.Timing(0.0, alone),
        every=own.every,
        algorithm="ring",  # as gloo's are, at every size
    )


def points(folder: pathlib.Path) -> list[Point]:
    """All that can be predicted."""
    found, by_setting = list[Point](), links(folder)
    for group in GROUPS:
        contents = load(folder, group)
        runs = [r for c in contents for r in c["runs"] if r["method"] in LINKS]
        runs = [r for r in runs if r["status"] == "done"]
        if not runs or setting(contents[0]) not in by_setting:
            continue
        link, own = by_setting[setting(contents[0])], contents[0]["settings"]
        source = load(folder, f"{own['workload']}-loopback")
        timed = {r["method"]: r for c in source for r in c["runs"] if r["status"] == "done"}
        slower = _slower(runs, timed)
        for method in dict.fromkeys(run["method"] for run in runs):
            if "alone_s" not in timed.get(method, {}):
                continue
            step = slower * (timed["dense"]["gradient_s"] + timed["dense"]["optimizer_s"])
            alone = slower * timed[method]["alone_s"] * LINKS[method].every
            seconds = predicted(own["workload"], method, own["workers"], link, step, alone)
            measured = statistics.median(r["step_s"] for r in runs if r["method"] == method)
            found.append(Point(group, method, seconds, measured))
    return found


def decision(folder: pathlib.Path, workload: str) -> dict[str, Any]:
    """What a plan says of a workload without any limit, by what its methods take there."""
    source = load(folder, f"{workload}-loopback")
    runs = {r["method"]: r for c in source for r in c["runs"] if "alone_s" in r}
    workers, like = source[0]["settings"]["workers"], _like(workload)
    usual = {row.name: row for row in fg.advise.candidates(like, workers)}
    rows = {method: usual[name] for method, name in SAME.items()}
    for method in CODECS:
        recipe = LINKS[method].made(Setting(workers))
        rows[method] = fg.advise.Candidate(LINKS[method].name, recipe)
    rows = {method: row for method, row in rows.items() if method in runs}
    found = fg.advise.plan(
        like,
        step=runs["dense"]["gradient_s"] + runs["dense"]["optimizer_s"],
        link=links(folder)[setting(source[0])],
        workers=workers,
        rows=list(rows.values()),
        timings={
            row.name: fg.advise.Timing(0.0, runs[method]["alone_s"] * row.every)
            for method, row in rows.items()
        },
        buckets=1,
        algorithm="ring",
    )
    told = [{"row": r.name, "times": round(r.speed_up, 3), "loss": r.loss} for r in found.rows]
    return {"compress": found.compress, "best": found.best.name, "rows": told}


def _like(workload: str) -> Any:
    return jax.eval_shape(lambda: WORKLOADS[workload](False).params(0))


def _slower(runs: list[dict[str, Any]], timed: dict[str, dict[str, Any]]) -> float:
    """How many times as long the gradients of the same methods took, the median."""
    both = [run for run in runs if run["method"] in timed]
    return statistics.median(r["compute_s"] / timed[r["method"]]["compute_s"] for r in both)


def tau(predicted: list[float], measured: list[float]) -> float:
    """Kendall's, of two orders."""
    found: Any = stats.kendalltau(predicted, measured)
    return float(found.statistic)


def summary(found: list[Point]) -> dict[str, Any]:
    """How good the predictions are, over all and in each group."""
    errors = [abs(point.error) for point in found]
    groups = dict[str, Any]()
    for group in dict.fromkeys(point.group for point in found):
        own = [point for point in found if point.group == group]
        if len(own) > 2:
            groups[group] = {
                "tau": tau([p.predicted for p in own], [p.measured for p in own]),
                "predicted_best": min(own, key=lambda p: p.predicted).method,
                "measured_best": min(own, key=lambda p: p.measured).method,
                "of_predicted_best": min(p.measured for p in own)
                / min(own, key=lambda p: p.predicted).measured,
            }
    return {
        "points": len(found),
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "groups": groups,
    }


NAMES = {"lm": "language model", "resnet": "ResNet", "alexnet": "AlexNet"}
MARKS = {"lm": (style.INK, "o"), "resnet": (style.FEW_BITS, "s"), "alexnet": (style.BASIS, "^")}
NEW = ("lm-250mbit", "resnet-250mbit", "lm-1gbit-2ms")
"""Settings that no other run has."""


def draw(found: list[Point]) -> Figure:
    """Measured against predicted, on logarithmic axes; filled where the setting was new."""
    figure = style.figure(5.2)
    axes = figure.add_subplot()
    low = 0.8 * min(min(p.predicted, p.measured) for p in found)
    high = 1.25 * max(max(p.predicted, p.measured) for p in found)
    axes.plot([low, high], [low, high], color=style.MUTED, lw=1)
    band = [0.7 * low, 0.7 * high], [1.3 * low, 1.3 * high]
    axes.fill_between([low, high], *band, color=style.GRID, lw=0, label="within 30 %")
    for workload, name in NAMES.items():
        color, mark = MARKS[workload]
        own = [point for point in found if point.group.startswith(workload)]
        for is_new in (False, True):
            some = [point for point in own if (point.group in NEW) == is_new]
            if some:
                filled = color if is_new else "none"
                label = f"{name}, {'new settings' if is_new else 'settings of other runs'}"
                spots = [p.predicted for p in some], [p.measured for p in some]
                axes.plot(*spots, mark, ms=6, mec=color, mfc=filled, label=label)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axes.set(xlabel="predicted seconds a step", ylabel="measured seconds a step")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.legend(loc="upper left")
    return figure


def main() -> None:
    """Prints the table, and writes the points and the figure."""
    show = (False, "predict nothing, draw what is there")
    args = parser(__doc__, "predicted", show=show).parse_args()
    if args.show:
        rows = json.loads((args.out / "predicted.json").read_text())["rows"]
        fields = Point._fields
        save(draw([Point(*(row[name] for name in fields)) for row in rows]), args.out, "predicted")
        return
    found, console = points(MEASURED), Console()
    cells = [
        [
            p.group,
            LINKS[p.method].name,
            f"{p.predicted:.3g}",
            f"{p.measured:.3g}",
            f"{p.error:+.0%}",
        ]
        for p in found
    ]
    columns = ("", "method", "predicted, s a step", "measured", "error")
    console.print(table("What a plan predicts", columns, cells))
    used = {setting(load(MEASURED, group)[0]) for group in GROUPS}
    known = links(MEASURED).items()
    told = summary(found) | {
        "links": {" ".join(map(str, key)): repr(link) for key, link in known if key in used},
        "plans": {f"{name}-loopback": decision(MEASURED, name) for name in PLANNED},
    }
    console.print_json(json.dumps(told))
    numbers = ("predicted", "measured", "error")
    rows = [
        {"group": p.group, "method": p.method} | {k: round(getattr(p, k), 4) for k in numbers}
        for p in found
    ]
    write(args.out / "predicted.json", head() | told | {"rows": rows}, "rows")
    save(draw(found), args.out, "predicted")


if __name__ == "__main__":
    main()
