"""Figures and tables of what `run.py` wrote: loss against time, parts of a step, speed-up."""

import argparse
import collections
import json
import pathlib
import statistics
from typing import Any

import matplotlib as mpl
import numpy as np
from job import HEADERS
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from network import bits_per_second

RESULTS = pathlib.Path(__file__).parent / "results"
PARTS = {
    "compute_s": ("gradient", "#9aa5b1"),
    "optimizer_s": ("optimizer", "#c9d1d9"),
    "encode_s": ("encode", "#2f81f7"),
    "decode_s": ("decode, memory", "#79b8ff"),
    "wire_s": ("wire", "#f0883e"),
    "hook_s": ("PyTorch's exchange, not overlapped", "#ffc680"),
}
LINES = ("dense", "bf16", "top-k", "top-k-mille", "fft-16", "powersgd", "random-k")
Record = dict[str, Any]


def runs(folder: pathlib.Path, name: str) -> list[Record]:
    """The finished runs of one file; none if it is not there."""
    path = folder / f"{name}.json"
    if not path.exists():
        return []
    return [run for run in json.loads(path.read_text())["runs"] if run["status"] == "done"]


def methods(folder: pathlib.Path, name: str) -> dict[str, Record]:
    """A record for each method: medians of its turns, and the fastest and slowest step of them."""
    turns = collections.defaultdict[str, list[Record]](list)
    for run in runs(folder, name):
        turns[run["method"]].append(run)
    out = dict[str, Record]()
    for method, same in turns.items():
        keys = [key for key in same[0] if key.endswith("_s")]
        steps = [run["step_s"] for run in same]
        medians = {key: statistics.median(run[key] for run in same) for key in keys}
        out[method] = same[0] | medians | {"spread": (min(steps), max(steps))}
    return out


def base(method: str) -> str:
    """The dense run of the same framework."""
    return "torch" if method.startswith("torch") else "dense"


def reached(run: Record, dense: Record) -> tuple[int, float] | None:
    """Steps and seconds after which a run was as good as a dense one in the end."""
    rises = dense["assessed"][-1][2] > dense["assessed"][0][2]
    target = dense["assessed"][-1][2]
    for steps, clock, metric in run["assessed"]:
        if (metric >= target) if rises else (metric <= target):
            return steps, clock
    return None


def parts(run: Record) -> dict[str, float]:
    """Seconds of a step by what they go to; what was not timed apart is counted as decoding.

    PyTorch compresses and sends while it still computes: only what that adds to a step shows.
    """
    out = {part: run.get(part, 0.0) for part in PARTS}
    rest = max(0.0, run["step_s"] - sum(out.values()))
    return out | {"hook_s" if run["method"].startswith("torch") else "decode_s": rest}


# Tables


def step_table(folder: pathlib.Path, name: str) -> str:
    """What a step takes, as Markdown."""
    rows = methods(folder, name)
    out = [
        "| | s a step | of it gradient | wire | MB over the link | predicted | "
        "times as fast as its framework's dense |",
        "|---|---|---|---|---|---|---|",
    ]
    for method, run in rows.items():
        low, high = run["spread"]
        spread = f" ({low:.2f}-{high:.2f})" if high > low else ""
        link = run["facts"].get("link_bytes")
        predicted = f"{(link + HEADERS * run['sent_packets']) / 1e6:.4g}" if link else ""
        wire = f"{run['wire_s']:.2f}" if "wire_s" in run else ""
        dense = rows.get(base(method))
        ratio = f"{dense['step_s'] / run['step_s']:.2f}" if dense else ""
        out.append(
            f"| {run['label']} | {run['step_s']:.2f}{spread} | {run['compute_s']:.2f} | {wire} | "
            f"{run['sent_bytes'] / 1e6:.4g} | {predicted} | {ratio} |"
        )
    return "\n".join(out)


def target_table(folder: pathlib.Path, name: str) -> str:
    """When each was as good as its framework's dense run in the end, as Markdown."""
    rows = methods(folder, name)
    out = [
        "| | s a step | MB over the link | steps | seconds | times shorter than dense |",
        "|---|---|---|---|---|---|",
    ]
    for method, run in rows.items():
        dense = rows.get(base(method))
        goal = reached(dense, dense) if dense else None
        when = reached(run, dense) if dense else None
        cells = f"{when[0]} | {when[1]:.1f}" if when else f"not in {len(run['seconds'])} | "
        ratio = f"{goal[1] / when[1]:.2f}" if goal and when else ""
        out.append(
            f"| {run['label']} | {run['step_s']:.2f} | {run['sent_bytes'] / 1e6:.4g} | "
            f"{cells} | {ratio} |"
        )
    return "\n".join(out)


# Figures


def time_to_loss(folder: pathlib.Path) -> Figure:
    """Held-out loss of the language model against the time that training took, for each rate."""
    rates = [name for name in ("100mbit", "1gbit") if runs(folder, f"lm-{name}")]
    figure = Figure(figsize=(4 + 4 * len(rates), 4), layout="constrained")
    panels: Any = figure.subplots(1, len(rates), sharey=True, squeeze=False)[0]
    for axes, rate in zip(panels, rates, strict=True):
        for run in runs(folder, f"lm-{rate}"):
            if run["repeat"] == 0 and run["assessed"]:
                _, clock, loss = zip(*run["assessed"], strict=True)
                dashed = "--" if run["method"].startswith("torch") else "-"
                axes.plot(clock, loss, dashed, label=run["label"], marker=".", markersize=4)
        axes.set(
            xscale="log",
            xlabel="seconds of training",
            title=f"links of {rate[:-4]} {rate[-4].upper()}bit/s",
        )
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("held-out loss, nats per byte")
    panels[-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def breakdown(folder: pathlib.Path, name: str = "alexnet-1gbit") -> Figure:
    """What a step of the 61 million parameters takes, and what for."""
    rows = sorted(methods(folder, name).values(), key=lambda run: run["step_s"])
    figure = Figure(figsize=(10, 0.5 + 0.32 * len(rows)), layout="constrained")
    axes = figure.subplots()
    left = np.zeros(len(rows))
    for part, (label, color) in PARTS.items():
        width = np.array([parts(run)[part] for run in rows])
        axes.barh([run["label"] for run in rows], width, left=left, label=label, color=color)
        left += width
    axes.invert_yaxis()
    axes.set_xlabel("seconds a step, 4 workers on links of 1 Gbit/s")
    axes.legend()
    return figure


def speed_up(folder: pathlib.Path) -> Figure:
    """How many times faster than dense, measured and as the bytes alone would have it."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    _lines(axes, methods(folder, "alexnet-1gbit"))
    for rate in ("100mbit", "1gbit"):
        rows = methods(folder, f"alexnet-{rate}")
        for index, method in enumerate(LINES):
            if method in rows and "dense" in rows and method != "dense":
                ratio = rows["dense"]["step_s"] / rows[method]["step_s"]
                axes.plot(bits_per_second(rate), ratio, "o", color=f"C{index}")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(
        xscale="log", yscale="log", xlabel="bit/s of each link", ylabel="times as fast as dense"
    )
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    return figure


def break_even(dense: Record, run: Record) -> float:
    """The rate in bit/s beyond which the dense mean is faster."""
    saved = 8 * (dense["facts"]["link_bytes"] - run["facts"]["link_bytes"])
    spent = _local(run) - _local(dense)
    return saved / spent if spent > 0 else float("inf")


def _local(run: Record) -> float:
    """Seconds of a step without its wire."""
    return run["step_s"] - run["wire_s"]


def _lines(axes: Axes, rows: dict[str, Record]) -> None:
    rates = np.logspace(7, 11, 200)
    for index, method in enumerate(LINES):
        if method in rows and "dense" in rows and method != "dense":
            dense, run = rows["dense"], rows[method]
            times = [_local(r) + 8 * r["facts"]["link_bytes"] / rates for r in (dense, run)]
            even = break_even(dense, run)
            until = f"even at {even / 1e9:.1f} Gbit/s" if np.isfinite(even) else "always faster"
            label = f"{run['label']}: {until}"
            axes.plot(rates, times[0] / times[1], color=f"C{index}", label=label)


def main() -> None:
    """Draws all of them, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder of the JSON")
    folder = parser.parse_args().results
    for path in sorted(folder.glob("*.json")):
        show = target_table if any(r["assessed"] for r in runs(folder, path.stem)) else step_table
        print(f"{path.stem}\n\n{show(folder, path.stem)}\n")
    mpl.use("agg")
    for name, draw in (
        ("time_to_loss", time_to_loss),
        ("breakdown", breakdown),
        ("speed_up", speed_up),
    ):
        draw(folder).savefig(folder / f"{name}.png", dpi=120)
        print(f"written: {folder}/{name}.png")


if __name__ == "__main__":
    main()
