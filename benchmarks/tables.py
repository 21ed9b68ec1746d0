"""Tables and figures of the studies of `studies.py`, from their committed results."""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import _style as style
import links
import numpy as np
from _record import RESULTS, markdown
from _style import styles
from matplotlib.figure import Figure
from methods import DENSE, ENDS, FOUNDING, ROWS, SECONDS, Method, times
from program import score

Runs = list[Any]
"""Of a result file: records, as `program.run` makes them."""
Results = dict[str, Any]


# What several of them need


def chosen(runs: Runs, task: str) -> dict[str, Runs]:
    """The runs of each method at its best rate, the longest there are."""
    out: dict[str, Runs] = {}
    for name in names_of(run for run in runs if run["task"] == task):
        own = [r for r in runs if r["task"] == task and r["method"] == name]
        own = [r for r in own if r["steps"] == max(o["steps"] for o in own)]
        best = min((r for r in own if r["seed"] == 0), key=score)
        out[name] = [r for r in own if r["rate"] == best["rate"]]
    return out


def names_of(runs: Iterable[Any]) -> list[str]:
    """The methods of runs, in their order."""
    return list(dict.fromkeys(run["method"] for run in runs))


def tasks_of(results: Results) -> list[str]:
    """The tasks of runs, in their order."""
    return list(dict.fromkeys(run["task"] for run in results["runs"]))


def mean_loss(found: Mapping[str, Runs], name: str) -> float:
    """The mean over the seeds of a row; infinity for a row that was not run."""
    return float(np.mean([run["loss"] for run in found[name]])) if name in found else float("inf")


def percent(loss: Any, dense: Any) -> str:
    """By how much a loss is above a dense one."""
    return f"{100 * (loss / dense - 1):+.1f} %"


# Every method


def every_method(results: Results) -> str:
    """One row a method: how many times fewer bytes it sends, and the loss."""
    by_task = {task: chosen(results["runs"], task) for task in tasks_of(results)}
    columns = ["method"]
    for task in by_task:
        columns += [f"{task}: on 8 links", "on 64", "error", "loss", "to dense"]
        columns += ["accuracy"] * (task == "digits")
    rows: list[list[str]] = []
    for name in dict.fromkeys(name for found in by_task.values() for name in found):
        cells = [name]
        for task, found in by_task.items():
            error = results.get("errors", {}).get(task, {}).get(name)
            cells += _cells(found.get(name, []), found.get("dense", []), error, task == "digits")
        rows.append(cells)
    return markdown(columns, rows)


def _cells(own: Runs, dense: Runs, error: float | None, classes: bool) -> list[str]:
    if not own:
        return [""] * (5 + classes)
    losses = [r["loss"] for r in own]
    near, far = (ROWS[own[0]["method"]].on_link(own[0], workers) for workers in (8, 64))
    cells = [times(near), times(far), f"{error:.2f}" if error else ""]
    cells += [f"{np.mean(losses):.3f} ± {np.ptp(losses) / 2:.3f}"]
    cells += [percent(np.mean(losses), np.mean([r["loss"] for r in dense]))]
    return cells + [f"{100 * np.mean([r['accuracy'] for r in own]):.1f} %" for _ in range(classes)]


# The loss at the end


def ends(results: Results, methods: Sequence[Method] = ENDS) -> str:
    """Of each row and task the loss, its distance from the best dense, and the rate."""
    tasks, rows = tasks_of(results), list[list[str]]()
    found = {task: chosen(results["runs"], task) for task in tasks}
    for row in methods:
        own = [run for run in results["runs"] if run["method"] == row.name]
        if own:
            fewer = (fewer_bytes(row, own, w, results["workers"]) for w in (8, 64))
            rows.append([row.name, *fewer, *(_end(found[task], row.name) for task in tasks)])
    return markdown(["method", "on 8 links", "on 64", *tasks], rows)


def fewer_bytes(row: Method, runs: Runs, workers: int, ran: int) -> str:
    """How many times fewer bytes cross a link, from the least to the most."""
    ratios = sorted(row.on_link(run, workers, ran) for run in runs)
    return " to ".join(dict.fromkeys(times(ratio) for ratio in (ratios[0], ratios[-1])))


def best_dense(found: Mapping[str, Runs]) -> float:
    """The lower loss of dense Adam and dense Muon."""
    return min(mean_loss(found, name) for name in DENSE)


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
    names, tasks = (*DENSE, *FILLED), tasks_of(results)
    shared = [run for run in runs if run["method"] in names and run["task"] in tasks]
    order = [row for row in ENDS if row.name in names] + FOUNDING
    return ends(results | {"runs": shared + results["runs"]}, order)


# Seconds to a loss


class Timed(NamedTuple):
    """Something that was timed over links, and how it learns."""

    label: str
    row: str
    method: str  # of `slow_network.py`
    shown: str = ""  # its name in the figures, if it is in them


TIMED = (
    Timed("dense Adam, float32", "dense, Adam", "dense"),
    Timed("dense Adam, bfloat16", "dense, Adam", "bf16", "dense Adam, bfloat16"),
    Timed("dense Muon, float32", "dense, Muon", "dense-muon"),
    Timed("dense Muon, bfloat16", "dense, Muon", "bf16-muon", "dense Muon, bfloat16"),
    Timed(
        "feedback_adam, PowerSGD",
        "PowerSGD rank 4, Adam, lead 0.3",
        "adam-powersgd",
        "fftgrad: PowerSGD, Adam",
    ),
    Timed("feedback_muon, PowerSGD", "PowerSGD rank 4, Muon, lead 0.3", "muon-powersgd"),
    Timed("feedback_muon, 100x", "100x, Muon, lead 0.5", "muon-100x", "fftgrad: budget 100x, Muon"),
    Timed(
        "feedback_muon, two stages 25x",
        "two stages 25x, Muon, lead 0.3",
        "muon-two-25x",
        "fftgrad: two stages 25x, Muon",
    ),
    Timed("feedback_muon, eigenbasis 25x", "eigenbasis 25x, Muon, lead 0.3", "muon-turned-25x"),
    Timed("feedback_muon, EDEN", "EDEN 1 bit, Muon, lead 0.3", "muon-eden"),
    Timed(
        "PyTorch's PowerSGD, Adam", "PowerSGD rank 4", "torch-powersgd", "PyTorch: PowerSGD, Adam"
    ),
)
"""What was timed over a link; each is shown where its losses are there too."""
OVER = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}


def reached(curve: list[Any], loss: float) -> float | None:
    """The step at which a curve is as low, between two assessments along a straight line."""
    if curve[0][1] <= loss:
        return curve[0][0]
    for (before, high), (after, low) in itertools.pairwise(curve):
        if low <= loss:
            return after - (after - before) * (loss - low) / (high - low)
    return None


def taken(link: str) -> dict[str, Any]:
    """What each method takes over a link."""
    return links.methods(RESULTS / "slow_network", f"large-{link}")


def large(results: Results) -> dict[str, Any]:
    """The run of each row on the large task."""
    return {row: runs[0] for row, runs in chosen(results["runs"], "large").items()}


def seconds(results: Results) -> str:
    """Of each row the loss; and the seconds to the losses of both dense rows."""
    found, rows = large(results), list[list[str]]()
    best = min(found[name]["loss"] for name in DENSE if name in found)
    known = {row.name: row for row in SECONDS}
    for method, run in found.items():
        ran = results["workers"]
        cells = [method, *(times(known[method].on_link(run, w, ran)) for w in (ran, 64))]
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
    by_link = {link: taken(link) for link in OVER}
    for timed in (timed for timed in TIMED if timed.row in found):
        curve = found[timed.row]["assessed"]
        steps = [reached(curve, round(found[goal]["loss"], 4)) for goal in goals]
        cells = [timed.label, ", ".join(f"{count:.0f}" if count else "never" for count in steps)]
        for link in OVER:
            each = by_link[link].get(timed.method, {}).get("step_s")
            cells.append(f"{each:.2f}" if each else "")
            cells += [f"{count * each:.0f} s" if count and each else "" for count in steps]
        rows.append(cells)
    return markdown(titles, rows)


# Figures: seconds


def seconds_to_end(results: Results) -> Figure:
    """Held-out loss against seconds of training, a panel for each link."""
    out, found = style.figure(6.4), large(results)
    looks = styles(timed.shown for timed in TIMED if timed.shown)
    for axes, (link, title) in zip(out.subplots(2, 1, sharey=True), OVER.items(), strict=True):
        steps_of = taken(link)
        for timed in (t for t in TIMED if t.shown and t.row in found and t.method in steps_of):
            steps, losses = zip(*found[timed.row]["assessed"], strict=True)
            at = [count * steps_of[timed.method]["step_s"] for count in steps]
            axes.plot(at, losses, label=timed.shown, **looks[timed.shown])
        axes.set(xlabel="seconds of 1,000 steps", xscale="log", ylabel="held-out loss")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_title(f"Links of {title}")
        axes.set_xlim(2, 3_000)
        axes.legend(loc="lower left", labelcolor="linecolor")
    return out


def hero(results: Results) -> Figure:
    """The seconds until each has the loss at which dense Adam ends, over the slow link."""
    found, steps_of, rows = large(results), taken("100mbit"), list[tuple[float, str, str]]()
    goal = round(found[DENSE[0]]["loss"], 4)
    for timed in (t for t in TIMED if t.shown and t.row in found and t.method in steps_of):
        curve, each = found[timed.row]["assessed"], steps_of[timed.method]["step_s"]
        steps = reached(curve, goal)
        if steps is None:
            told = f"not reached in {curve[-1][0]:,} steps ({curve[-1][0] * each:,.0f} s)"
            rows.append((0.0, timed.shown, told))
        else:
            rows.append((steps * each, timed.shown, f"{steps * each:,.0f} s"))
    rows.sort(key=lambda row: row[0] or np.inf)
    out = style.figure(0.75 + 0.42 * len(rows))
    axes = out.subplots()
    for place, (length, name, said) in enumerate(rows):
        axes.barh(place, length, height=0.62, color=style.color(name))
        told: Any = {"color": style.color(name), "weight": "bold", "va": "center"}
        axes.annotate(said, (length, place), (5, 0), textcoords="offset points", **told)
    axes.set_yticks(range(len(rows)), [name for _, name, _ in rows])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(length=0)
    axes.set_xticks([])
    out.suptitle(
        "Seconds to dense Adam's final loss, over links of 100 Mbit/s",
        fontsize=style.POINTS,
        weight="bold",
    )
    return out
