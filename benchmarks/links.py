"""Tables of runs over slow links: seconds of a step, and when a loss is reached."""

import collections
import json
import pathlib
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from _record import markdown

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
        run | {"turn": content["settings"]["seed"] + run.get("repeat", 0)}
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
    target = dense["assessed"][-1][2]
    for steps, clock, metric in run["assessed"]:
        if metric <= target:
            return steps, clock
    return None


def seconds_to(run: Record, dense: Record) -> float | None:
    """Seconds after which a run was as good as a dense one in the end."""
    when = reached(run, dense)
    return when[1] if when else None


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
        same = all_turns[method].values()
        leading = leads(all_turns, method, lambda run, _: run["step_s"])
        sent = f"{run['sent_bytes'] / 1e6:.4g}"
        cells = [spread([r["step_s"] for r in same], 2), sent]
        rows.append([run["label"], *cells, *(spread(lead, 2) for lead in leading)])
    columns = ["", "s a step", "MB over the link", "times as fast as its framework's dense float32"]
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


def show(folder: pathlib.Path) -> None:
    """Prints the tables of all files."""
    names = [path.stem for path in sorted(folder.glob("*.json"))]
    for name in (n for n in names if not re.fullmatch(r".+-\d", n)):
        print(f"{name}\n")
        if any(run["assessed"] for run in runs(folder, name)):
            print(f"{target_table(folder, name)}\n")
        else:
            print(f"{step_table(folder, name)}\n")
