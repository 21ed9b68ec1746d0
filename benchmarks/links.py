"""Tables of runs over slow links: the seconds of a step."""

import collections
import json
import statistics
from collections.abc import Mapping
from typing import Any

from _record import RESULTS, markdown

FOLDER = RESULTS / "slow_network"
DENSE = ("dense", "bf16")
"""Our dense means in float32 and in 16 bits."""
Record = dict[str, Any]
Turns = dict[str, dict[int, Record]]


def turns(name: str) -> Turns:
    """The finished runs of a file, and of those that go on with it, `name-2.json` and so on.

    By method and turn: those of one turn have the same first parameters and batches.
    """
    out = collections.defaultdict[str, dict[int, Record]](dict)
    for path in (FOLDER / f"{name}.json", *sorted(FOLDER.glob(f"{name}-[0-9].json"))):
        content = json.loads(path.read_text())
        for run in (run for run in content["runs"] if run["status"] == "done"):
            out[run["method"]][content["settings"]["seed"] + run.get("repeat", 0)] = run
    return dict(out)


def methods(name: str) -> dict[str, Record]:
    """A record for each method: its first turn, with the median seconds of a step of all."""
    return {
        method: next(iter(same.values()))
        | {"step_s": statistics.median(run["step_s"] for run in same.values())}
        for method, same in turns(name).items()
    }


def links_table(names: Mapping[str, str]) -> str:
    """Seconds a step over each link, and how many times less than our dense means of the turn."""
    found = {link: turns(name) for link, name in names.items()}
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
    if not same:
        return ""
    each = [run["step_s"] for run in same.values()]
    median, low, high = (f"{of(each):.2f}" for of in (statistics.median, min, max))
    seconds = median if low == high else f"{median} ({low}-{high})"
    times = list[str]()
    for dense in DENSE if method not in DENSE else ():
        others = all_turns.get(dense, {})
        ratios = [others[t]["step_s"] / run["step_s"] for t, run in same.items() if t in others]
        times += [f"{statistics.median(ratios):.1f}"] if ratios else []
    return f"{seconds}; {', '.join(times)}" if times else seconds
