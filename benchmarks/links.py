"""Tables and figures of runs over slow links: loss against time, parts of a step, speed-up."""

import collections
import json
import pathlib
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import _style as style
import numpy as np
from _record import markdown, save
from _style import styles
from job import HEADERS
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter
from network import bits_per_second

PARTS = {
    "compute_s": ("gradient", style.MUTED),
    "optimizer_s": ("optimizer", style.INK),
    "encode_s": ("encode", style.LOW_RANK),
    "decode_s": ("decode, memory", style.BASIS),
    "wire_s": ("wire", style.FEW_BITS),
    "hook_s": ("PyTorch's exchange", style.PEER),
}
EVENS = ("dense", "bf16", "top-k", "top-k-mille", "fft-16", "powersgd", "random-k")
LINES = ("fft-16", "top-k-mille", "powersgd", "top-k")
"""Those of the figure."""
SHOWN = {
    "local-4": "4 local steps, signs",
    "powersgd": "PowerSGD rank 4",
    "sign": "signs, two stages",
    "bf16": "dense, 16 bits",
    "torch-powersgd": "PyTorch, PowerSGD rank 4",
}
"""The curves of the figure, by their names in it."""
BARS = (
    "random-k", "top-k-mille", "top-k", "fft-16", "powersgd", "local-4", "sign", "qsgd", "bf16",
    "dense", "torch", "torch-fp16", "torch-powersgd",
)  # fmt: skip
SIXTEEN = {"dense": "bf16", "torch": "torch-fp16"}
"""The dense mean of each framework in float32, and in 16 bits."""
DENSE = {"dense", SIXTEEN["dense"]}
Record = dict[str, Any]
Turns = dict[str, dict[int, Record]]


def load(folder: pathlib.Path, name: str) -> list[Record]:
    """A file, and those that go on with it, `name-2.json` and so on."""
    paths = (folder / f"{name}.json", *sorted(folder.glob(f"{name}-[0-9].json")))
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def runs(folder: pathlib.Path, name: str) -> list[Record]:
    """The finished runs of a file. Those of one turn have the same first parameters and batches."""
    return [
        run | {"turn": content["settings"]["seed"] + run["repeat"]}
        for content in load(folder, name)
        for run in content["runs"]
        if run["status"] == "done"
    ]


def turns(folder: pathlib.Path, name: str) -> Turns:
    """The finished runs by method and turn."""
    out = collections.defaultdict[str, dict[int, Record]](dict)
    for run in runs(folder, name):
        out[run["method"]][run["turn"]] = run
    return dict(out)


def methods(folder: pathlib.Path, name: str) -> dict[str, Record]:
    """A record for each method: its first turn, with the medians of all in place of its times."""
    out = dict[str, Record]()
    for method, same in turns(folder, name).items():
        first, *_ = same.values()
        keys = [key for key in first if key.endswith("_s")]
        out[method] = first | {k: statistics.median(r[k] for r in same.values()) for k in keys}
    return out


def opponents(all_turns: Turns, run: Record) -> tuple[Record | None, Record | None]:
    """The dense runs of the same framework and turn, in float32 and in 16 bits."""
    dense = "torch" if run["method"].startswith("torch") else "dense"
    wide, narrow = (all_turns.get(m, {}).get(run["turn"]) for m in (dense, SIXTEEN[dense]))
    return wide, narrow


def leads(
    all_turns: Turns, method: str, seconds: Callable[[Record, Record], float | None]
) -> tuple[list[float], list[float]]:
    """By how much a method beats dense float32 in each turn, and the best dense.

    The best dense is known of turns in which 16 bits were run too. `seconds` is what a run takes
    to be as good as the dense one, or None if it does not get there.
    """
    to_wide, to_best = list[float](), list[float]()
    for run in all_turns[method].values():
        wide, narrow = opponents(all_turns, run)
        if wide:
            own, one, other = (seconds(r, wide) if r else None for r in (run, wide, narrow))
            if own and one:
                to_wide.append(one / own)
                if narrow:
                    to_best.append(min(one, other or one) / own)
    return to_wide, to_best


def reached(run: Record, dense: Record) -> tuple[int, float] | None:
    """Steps and seconds after which a run was as good as a dense one in the end."""
    rises = dense["assessed"][-1][2] > dense["assessed"][0][2]
    target = dense["assessed"][-1][2]
    for steps, clock, metric in run["assessed"]:
        if (metric >= target) if rises else (metric <= target):
            return steps, clock
    return None


def seconds_to(run: Record, dense: Record) -> float | None:
    """Seconds after which a run was as good as a dense one in the end."""
    when = reached(run, dense)
    return when[1] if when else None


def parts(run: Record) -> dict[str, float]:
    """Seconds of a step by what they go to; what was not timed apart is counted as decoding.

    PyTorch compresses and sends while it still computes: only what that adds to a step shows.
    """
    out = {part: run.get(part, 0.0) for part in PARTS}
    rest = max(0.0, run["step_s"] - sum(out.values()))
    return out | {"hook_s" if run["method"].startswith("torch") else "decode_s": rest}


# Tables


def spread(values: Sequence[float], digits: int) -> str:
    """The median, and the least and greatest where they differ."""
    if not values:
        return ""
    median, low, high = (f"{f(values):.{digits}f}" for f in (statistics.median, min, max))
    return median if low == high else f"{median} ({low}-{high})"


def step_table(folder: pathlib.Path, name: str) -> str:
    """What a step takes."""
    all_turns, rows = turns(folder, name), list[list[str]]()
    for method, run in methods(folder, name).items():
        link, same = run["facts"].get("link_bytes"), all_turns[method].values()
        predicted = f"{(link + HEADERS * run['sent_packets']) / 1e6:.4g}" if link else ""
        wire = f"{run['wire_s']:.2f}" if "wire_s" in run else ""
        leading = leads(all_turns, method, lambda run, _: run["step_s"])
        sent = f"{run['sent_bytes'] / 1e6:.4g}"
        cells = [spread([r["step_s"] for r in same], 2), f"{run['compute_s']:.2f}", wire, sent]
        rows.append([run["label"], *cells, predicted, *(spread(lead, 2) for lead in leading)])
    columns = ["", "s a step", "of it gradient", "wire", "MB over the link", "predicted"]
    columns += ["times as fast as its framework's dense float32"]
    return markdown([*columns, "as the best dense of its framework"], rows)


def target_table(folder: pathlib.Path, name: str) -> str:
    """When each was as good as its framework's dense float32 run in the end."""
    all_turns, rows = turns(folder, name), list[list[str]]()
    for method, run in methods(folder, name).items():
        same = all_turns[method].values()
        pairs = [(opponents(all_turns, own)[0], own) for own in same]
        there = [when for dense, own in pairs if dense and (when := reached(own, dense))]
        steps = ", ".join(str(when[0]) for when in there)
        missed = len(same) - len(there)
        if missed:
            often = f" ({missed} of {len(same)})" if there else ""
            steps = f"{steps}; not in {max(len(r['seconds']) for r in same)}{often}"
        cells = [f"{run['step_s']:.2f}", f"{run['sent_bytes'] / 1e6:.4g}", steps.removeprefix("; ")]
        seconds = spread([when[1] for when in there], 1)
        leading = leads(all_turns, method, seconds_to)
        rows.append([run["label"], *cells, seconds, *(spread(lead, 2) for lead in leading)])
    columns = ["", "s a step", "MB over the link", "steps", "seconds"]
    columns += ["times shorter than dense float32", "than the best dense"]
    return markdown(columns, rows)


def links_table(folder: pathlib.Path, names: dict[str, str]) -> str:
    """Seconds a step over each link, and how many times less than our dense means of the turn."""
    found = {link: turns(folder, name) for link, name in names.items()}
    labels = {
        method: run["label"]
        for by_method in found.values()
        for method, same in by_method.items()
        for run in same.values()
    }
    rows = [
        [label, *(_beside_dense(by_method, method) for by_method in found.values())]
        for method, label in labels.items()
    ]
    return markdown(["", *found], rows)


def _beside_dense(all_turns: Turns, method: str) -> str:
    same = all_turns.get(method, {})
    seconds = spread([run["step_s"] for run in same.values()], 2)
    if not same or method in DENSE:
        return seconds
    times = list[str]()
    for dense in ("dense", "bf16"):
        others = all_turns.get(dense, {})
        ratios = [others[t]["step_s"] / run["step_s"] for t, run in same.items() if t in others]
        times += [f"{statistics.median(ratios):.1f}"] if ratios else []
    return f"{seconds}; {', '.join(times)}" if times else seconds


def in_as_many_steps(folder: pathlib.Path, name: str) -> str:
    """How long bfloat16 takes for the steps of float32, a sentence for each turn.

    They train alike, so which of them is at a loss in fewer steps is mostly luck.
    """
    all_turns, out = turns(folder, name), list[str]()
    for narrow in all_turns.get(SIXTEEN["dense"], {}).values():
        dense, _ = opponents(all_turns, narrow)
        goal = reached(dense, dense) if dense else None
        clocks = {steps: clock for steps, clock, _ in narrow["assessed"]}
        if dense and goal and goal[0] in clocks:
            rows = [run for same in all_turns.values() for run in same.values()]
            rows = [run for run in rows if opponents(all_turns, run)[0] is dense]
            least = min(when for run in rows if (when := seconds_to(run, dense)))
            took = clocks[goal[0]]
            out.append(
                f"*{narrow['label']}* makes the {goal[0]} steps of dense in {took:.1f} s, "
                f"{took / least:.2f} times as long as the fastest row takes."
            )
    return "\n".join(out)


# Figures


def time_to_loss(folder: pathlib.Path) -> Figure:
    """Held-out loss of the language model against the time that training took, for each rate."""
    rates = [name for name in ("100mbit", "1gbit") if runs(folder, f"lm-{name}")]
    figure = style.figure(0.4 + 3 * len(rates))
    panels: Any = figure.subplots(len(rates), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    looks = styles(SHOWN.values())
    for axes, rate in zip(panels, rates, strict=True):
        lines = dict[str, Line2D]()
        for run in runs(folder, f"lm-{rate}"):
            name = SHOWN.get(run["method"], "")
            if name and name not in lines and run["turn"] == 0 and run["assessed"]:
                _, clock, loss = zip(*run["assessed"], strict=True)
                (lines[name],) = axes.plot(clock, loss, **looks[name])
        axes.set(
            xscale="log",
            ylabel="held-out loss, nats a byte",
            title=f"Links of {rate[:-4]} {rate[-4].upper()}bit/s",
        )
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.legend(lines.values(), lines, loc="upper right")
    panels[-1].set_xlabel("seconds of training")
    return figure


def breakdown(folder: pathlib.Path, name: str = "alexnet-1gbit") -> Figure:
    """What a step of the 61 million parameters takes, and what for."""
    found = methods(folder, name)
    rows = sorted((found[m] for m in BARS if m in found), key=lambda run: run["step_s"])
    figure = style.figure(1.3 + 0.33 * len(rows))
    axes = figure.subplots()
    left = np.zeros(len(rows))
    for part, (label, color) in PARTS.items():
        width = np.array([parts(run)[part] for run in rows])
        axes.barh([run["label"] for run in rows], width, left=left, label=label, color=color)
        left += width
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(y=0.01)
    axes.set_xlabel("seconds a step, 4 workers on links of 1 Gbit/s")
    figure.legend(loc="outside upper center", ncols=3)
    return figure


def speed_up(folder: pathlib.Path) -> Figure:
    """How many times faster than the best dense, measured and as the bytes alone would have it."""
    figure = style.figure(4.2)
    axes = figure.subplots()
    rows, rates = methods(folder, "alexnet-1gbit"), np.logspace(7, 11, 200)
    shown = [method for method in LINES if method in rows and rows.keys() >= DENSE]
    looks = dict(zip(shown, styles(rows[m]["label"] for m in shown).values(), strict=True))
    lines = dict[str, Line2D]()
    for method in shown:
        best = np.minimum(*(step_at(rows[m], rates) for m in DENSE))
        label = rows[method]["label"]
        (lines[label],) = axes.plot(rates, best / step_at(rows[method], rates), **looks[method])
    for rate in ("100mbit", "1gbit"):
        own = methods(folder, f"alexnet-{rate}")
        for method in shown:
            if method in own and own.keys() >= DENSE:
                ratio = min(own[m]["step_s"] for m in DENSE) / own[method]["step_s"]
                axes.plot(bits_per_second(rate), ratio, "o", color=looks[method]["color"])
    axes.axhline(1.0, color=style.INK, linewidth=0.8)
    axes.annotate("the best dense", (1.2e7, 1.0), (0, 4), textcoords="offset points")
    axes.set(xscale="log", yscale="log", xlabel="bit/s of each link")
    axes.set(ylabel="times as fast as the best dense")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(lines.values(), lines, loc="upper right")
    return figure


def step_at(run: Record, rates: Any) -> Any:
    """Predicted seconds of a step over links of these rates: its bytes, and what else it took."""
    return run["step_s"] - run["wire_s"] + 8 * run["facts"]["link_bytes"] / rates


def break_even(dense: Record, run: Record) -> float:
    """The rate in bit/s beyond which the dense mean is faster than what sends fewer bytes."""
    saved = 8 * (dense["facts"]["link_bytes"] - run["facts"]["link_bytes"])
    spent = step_at(run, np.inf) - step_at(dense, np.inf)
    return saved / spent if spent > 0 else float("inf")


def break_evens(rows: dict[str, Record]) -> dict[str, float]:
    """The rate in bit/s beyond which another dense mean is faster, of each method but float32's."""
    return {
        method: min(break_even(rows[dense], rows[method]) for dense in DENSE - {method})
        for method in EVENS[1:]
        if method in rows and rows.keys() >= DENSE
    }


def show(folder: pathlib.Path) -> None:
    """Prints the tables of all files, and draws the figures."""
    names = [path.stem for path in sorted(folder.glob("*.json"))]
    for name in (n for n in names if not re.fullmatch(r".+-\d", n)):
        print(f"{name}\n")
        if any(run["assessed"] for run in runs(folder, name)):
            print(f"{target_table(folder, name)}\n\n{in_as_many_steps(folder, name)}\n")
        else:
            print(f"{step_table(folder, name)}\n")
    for draw in (time_to_loss, breakdown, speed_up):
        save(draw(folder), folder, draw.__name__)
