"""The figures of what `run.py` wrote: loss against time, parts of a step, speed-up against rate."""

import argparse
import json
import pathlib
from typing import Any

import matplotlib as mpl
import numpy as np
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
LINES = ("dense", "bf16", "top-k", "top-k-mille", "fft-16", "two-stage", "powersgd")


def runs(folder: pathlib.Path, name: str) -> list[dict[str, Any]]:
    """The finished runs of one file; none if it is not there."""
    path = folder / f"{name}.json"
    if not path.exists():
        return []
    return [run for run in json.loads(path.read_text())["runs"] if run["status"] == "done"]


def parts(run: dict[str, Any]) -> dict[str, float]:
    """Seconds of a step by what they go to; what was not timed apart is counted as decoding.

    PyTorch compresses and sends while it still computes: only what that adds to a step shows.
    """
    out = {part: run.get(part, 0.0) for part in PARTS}
    rest = max(0.0, run["step_s"] - sum(out.values()))
    return out | {"hook_s" if run["method"].startswith("torch") else "decode_s": rest}


def time_to_loss(folder: pathlib.Path, rates: tuple[str, ...] = ("100mbit", "1gbit")) -> Figure:
    """Held-out loss of the language model against the time that training took."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels: Any = figure.subplots(1, len(rates), sharey=True)
    for axes, rate in zip(panels, rates, strict=True):
        for run in runs(folder, f"lm-{rate}"):
            if run["repeat"] == 0 and run["assessed"]:
                _, clock, loss = zip(*run["assessed"], strict=True)
                dashed = "--" if run["method"].startswith("torch") else "-"
                axes.plot(clock, loss, dashed, label=run["label"], marker=".", markersize=4)
        axes.set(xlabel="seconds of training", title=f"links of {rate[:-4]} {rate[-4:-3]}bit/s")
        axes.set_xscale("log")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("held-out loss, nats per byte")
    panels[0].legend(fontsize=8)
    return figure


def breakdown(folder: pathlib.Path, name: str = "alexnet-1gbit") -> Figure:
    """What a step of the 61 million parameters takes, and what for."""
    rows = sorted(runs(folder, name), key=lambda run: run["step_s"])
    figure = Figure(figsize=(10, 0.5 + 0.32 * len(rows)), layout="constrained")
    axes = figure.subplots()
    left = np.zeros(len(rows))
    for part, (label, color) in PARTS.items():
        width = np.array([parts(run).get(part, 0.0) for run in rows])
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
    _lines(axes, {run["method"]: run for run in runs(folder, "alexnet-1gbit")})
    for rate in ("100mbit", "1gbit"):
        rows = {run["method"]: run for run in runs(folder, f"alexnet-{rate}")}
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


def break_even(dense: dict[str, Any], run: dict[str, Any]) -> float:
    """The rate in bit/s beyond which the dense mean is faster."""
    saved = 8 * (dense["facts"]["link_bytes"] - run["facts"]["link_bytes"])
    spent = _local(run) - _local(dense)
    return saved / spent if spent > 0 else float("inf")


def _local(run: dict[str, Any]) -> float:
    """Seconds of a step without its wire."""
    return run["step_s"] - run["wire_s"]


def _lines(axes: Axes, rows: dict[str, dict[str, Any]]) -> None:
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
    """Draws all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder of the JSON")
    folder = parser.parse_args().results
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
