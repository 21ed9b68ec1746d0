"""Tables of the studies of `convergence.py`, from their committed results."""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import links
import numpy as np
from _record import RESULTS, markdown
from methods import BY_NAME, ENDS, FOUNDING, Method
from program import score
from tasks import WORKERS

Runs = list[Any]
"""Of a result file: records, as `program.run` makes them."""
Results = dict[str, Any]
DENSE = ("dense, Adam", "dense, Muon")


# What several of them need


def chosen(runs: Runs, task: str) -> dict[str, Runs]:
    """The runs of each method at its best rate, the longest there are."""
    out: dict[str, Runs] = {}
    for name in dict.fromkeys(run["method"] for run in runs if run["task"] == task):
        own = [r for r in runs if r["task"] == task and r["method"] == name]
        own = [r for r in own if r["steps"] == max(o["steps"] for o in own)]
        best = min((r for r in own if r["seed"] == 0), key=score)
        out[name] = [r for r in own if r["rate"] == best["rate"]]
    return out


def tasks_of(runs: Iterable[Any]) -> list[str]:
    """The tasks of runs, in their order."""
    return list(dict.fromkeys(run["task"] for run in runs))


def mean_loss(found: Mapping[str, Runs], name: str) -> float:
    """The mean over the seeds of a row; infinity for a row that was not run."""
    return float(np.mean([run["loss"] for run in found[name]])) if name in found else float("inf")


def best_dense(found: Mapping[str, Runs]) -> float:
    """The lower loss of dense Adam and dense Muon."""
    return min(mean_loss(found, name) for name in ("dense", *DENSE))


def percent(loss: Any, dense: Any) -> str:
    """By how much a loss is above a dense one."""
    return f"{100 * (loss / dense - 1):+.1f} %"


def times(ratio: float) -> str:
    """A ratio in two figures, or more before its point."""
    return f"{ratio:.0f}" if ratio >= 9.95 else f"{ratio:.2g}"


# The loss at the end


def ends(results: Results, methods: Sequence[Method] = ENDS) -> str:
    """Of each row and task the loss, its distance from the best dense, and the rate."""
    tasks, rows = tasks_of(results["runs"]), list[list[str]]()
    found = {task: chosen(results["runs"], task) for task in tasks}
    for row in methods:
        own = [run for run in results["runs"] if run["method"] == row.name]
        if own:
            ran = results.get("workers", WORKERS)
            fewer = (fewer_bytes(row, own, w, ran) for w in (8, 64))
            rows.append([row.name, *fewer, *(_end(found[task], row.name) for task in tasks)])
    return markdown(["method", "on 8 links", "on 64", *tasks], rows)


def fewer_bytes(row: Method, runs: Runs, workers: int, ran: int) -> str:
    """How many times fewer bytes cross a link, from the least to the most."""
    ratios = sorted(row.on_link(run, workers, ran) for run in runs)
    return " to ".join(dict.fromkeys(times(ratio) for ratio in (ratios[0], ratios[-1])))


def _end(found: dict[str, Runs], method: str) -> str:
    if method not in found:
        return ""
    loss, dense = mean_loss(found, method), best_dense(found)
    compared = method not in DENSE and np.isfinite(dense)
    change = f", {percent(loss, dense)}" if compared else ""
    return f"{loss:.3f}{change} ({found[method][0]['rate']:g})"


FILLED = ("30x, Muon, lead 0.3", "100x, Muon, lead 0.5", "300x, Muon, lead 0.5")
"""Rows of the loss at the end that stand beside those of the founding papers."""


def founding(results: Results) -> str:
    """The founding papers' rows with 8 workers, under those of the loss at the end."""
    runs = json.loads((RESULTS / "convergence/ends.json").read_text())["runs"]
    names, tasks = (*DENSE, *FILLED), tasks_of(results["runs"])
    shared = [run for run in runs if run["method"] in names and run["task"] in tasks]
    order = [row for row in ENDS if row.name in names] + FOUNDING
    return ends(results | {"runs": shared + results["runs"]}, order)


# Seconds to a loss

TIMED = {
    "dense Adam, float32": ("dense, Adam", "dense"),
    "dense Adam, bfloat16": ("dense, Adam", "bf16"),
    "dense Muon, float32": ("dense, Muon", "dense-muon"),
    "dense Muon, bfloat16": ("dense, Muon", "bf16-muon"),
    "feedback_adam, PowerSGD": ("PowerSGD rank 4, Adam, lead 0.3", "adam-powersgd"),
    "feedback_muon, PowerSGD": ("PowerSGD rank 4, Muon, lead 0.3", "muon-powersgd"),
    "feedback_muon, 100x": ("100x, Muon, lead 0.5", "muon-100x"),
    "feedback_muon, two stages 25x": ("two stages 25x, Muon, lead 0.3", "muon-two-25x"),
    "feedback_muon, eigenbasis 25x": ("eigenbasis 25x, Muon, lead 0.3", "muon-turned-25x"),
    "feedback_muon, EDEN": ("EDEN 1 bit, Muon, lead 0.3", "muon-eden"),
    "PyTorch's PowerSGD, Adam": ("PowerSGD rank 4", "torch-powersgd"),
}
"""What was timed over a link: the row that learns as it does, and its name in `slow_network.py`."""
LARGE = list(dict.fromkeys(row for row, _ in TIMED.values()))
OVER = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}


def reached(curve: list[Any], loss: float) -> float | None:
    """The step at which a curve is as low, between two assessments along a straight line."""
    if curve[0][1] <= loss:
        return curve[0][0]
    for (before, high), (after, low) in itertools.pairwise(curve):
        if low <= loss:
            return after - (after - before) * (loss - low) / (high - low)
    return None


def seconds(results: Results) -> str:
    """Of each row the loss; and the seconds to the losses of both dense rows."""
    found = {row: runs[0] for row, runs in chosen(results["runs"], "large").items()}
    rows, ran = list[list[str]](), results["workers"]
    best = min(found[name]["loss"] for name in DENSE if name in found)
    for method, run in found.items():
        cells = [method, *(times(BY_NAME[method].on_link(run, w, ran)) for w in (ran, 64))]
        cells += [f"{run['rate']:g}", f"{run['loss']:.3f}", percent(run["loss"], best)]
        rows.append(cells)
    losses = markdown(["method", "on 4 links", "on 64", "rate", "loss", "to the best dense"], rows)
    return f"{losses}\n\n{_products(found)}"


def _products(found: dict[str, Any]) -> str:
    """The steps to each dense row's loss, times the seconds of a step."""
    titles, rows = ["", "steps"], list[list[str]]()
    goals = [name for name in DENSE if name in found]
    for link in OVER.values():
        titles += [f"s a step, {link}", *(f"to the loss of {goal}" for goal in goals)]
    by_link = {link: links.methods(f"large-{link}") for link in OVER}
    for label, (row, method) in ((label, own) for label, own in TIMED.items() if own[0] in found):
        curve = found[row]["assessed"]
        steps = [reached(curve, round(found[goal]["loss"], 4)) for goal in goals]
        cells = [label, ", ".join(f"{count:.0f}" if count else "never" for count in steps)]
        for link in OVER:
            each = by_link[link].get(method, {}).get("step_s")
            cells.append(f"{each:.2f}" if each else "")
            cells += [f"{count * each:.0f} s" if count and each else "" for count in steps]
        rows.append(cells)
    return markdown(titles, rows)
