"""Fills the tables of README and docs from the committed results.

A page has a line `<!-- table: NAME -->` before each of them, and `<!-- end -->` behind it; what is
between is written anew.
"""

import functools
import json
import re
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import authors
import compile_time
import exchange
import jax
import links
import methods
import optax
import tables
from _record import RESULTS, ROOT, markdown

import fftgrad as fg

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(<!-- table: (\S+) -->\n\n)(?:(?!<!-- ).)*?(\n\n<!-- end -->)", re.DOTALL)
FAR = {
    "100 Mbit/s": "far-100mbit",
    "1 Gbit/s": "far-1gbit",
    "1 Gbit/s, 2 ms": "far-1gbit-2ms",
    "100 Mbit/s, 50 ms": "far-100mbit-50ms",
}
"""The files of the larger model, by their links."""


@functools.cache
def load(path: str) -> Any:
    """A result file."""
    return json.loads((RESULTS / f"{path}.json").read_text())


# Which method to choose: what a plan recommends, which is what ends as dense or close to it


class Choice(NamedTuple):
    """A row of a plan that is recommended."""

    link: str  # for which it is recommended, by docs/results/slow-links.md
    run: str = ""  # what the runs of held-out tasks call it; of a dense mean nothing
    ratio: int = 1  # of a dense mean, float32 over what it sends


CHOICES = {
    "dense float32": Choice("10 Gbit/s and more"),
    "dense bfloat16": Choice("1 to 10 Gbit/s", ratio=2),
    "two stages 25x, Muon": Choice("0.1 to 1 Gbit/s", "two stages 25x, Muon, lead 0.3"),
    "eigenbasis 50x, Muon": Choice("below 0.1 Gbit/s", "eigenbasis 50x, Muon, lead 0.3"),
    "PowerSGD 4, Muon": Choice(
        "below 1 Gbit/s, if `fftgrad plan` recommends it", "PowerSGD rank 4, Muon, lead 0.3"
    ),
    "4 local steps of Muon, 25x": Choice("delay of 50 ms or more", "4 local steps of Muon, 25x"),
}
"""By the names that a plan has for them, which are those of `fg.planning.candidates`."""
LIKE = jax.ShapeDtypeStruct((1024, 1024), "float32")
"""One matrix, so that no leaf is small."""
WORKERS = 8


def candidates() -> dict[str, fg.planning.Candidate]:
    """The rows of a plan by their names."""
    return {row.name: row for row in fg.planning.candidates(LIKE, WORKERS)}


def choices() -> str:
    """The recommended row for each link, with its bytes, its final loss and a worker's state."""
    rows = [
        [choice.link, name, *seen(choice), f"{kept(candidates()[name]):.1f}"]
        for name, choice in CHOICES.items()
    ]
    columns = ["your link", "method", "times fewer bytes, 8 workers", "64 workers"]
    return markdown([*columns, "final loss above dense: mean (worst task)", "state"], rows)


def seen(choice: Choice) -> list[str]:
    """How many times fewer bytes cross a link, and the losses, as runs of held-out tasks have them.

    Beside a ring all-reduce of float32, for 8 workers and for 64.
    """
    if not choice.run:
        return [f"{choice.ratio}", f"{choice.ratio}", "baseline"]
    every = load("convergence/ends")["runs"]
    row = methods.BY_NAME[choice.run]
    runs = [run for run in every if run["method"] == choice.run]
    above: list[float] = []
    for task in dict.fromkeys(run["task"] for run in every):
        found = tables.chosen(every, task)
        best = tables.best_dense(found)
        above.append(100 * (tables.mean_loss(found, choice.run) / best - 1))
    loss = f"{statistics.mean(above):+.1f} % ({max(above):+.1f} %)"
    return [*(tables.fewer_bytes(row, runs, w, WORKERS) for w in (8, 64)), loss]


def kept(row: fg.planning.Candidate) -> float:
    """The state of a worker in gradients; with Adam's, where it is no whole optimizer."""
    tx = row.transformation("data")
    whole = tx if row.optimizer else optax.chain(tx, optax.adam(1.0))
    leaves = jax.tree.leaves(jax.eval_shape(whole.init, LIKE))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / (4 * LIKE.size)


# What was measured


def without(table: str, *columns: str) -> str:
    """A table without some of its columns."""
    lines = [line.strip("|").split("|") for line in table.splitlines()]
    left = [i for i, cell in enumerate(lines[0]) if cell.strip() not in columns]
    return "\n".join(f"|{'|'.join(line[i] for i in left)}|" for line in lines)


TABLES: dict[str, Callable[[], str]] = {
    "choose": choices,
    "choose-short": lambda: without(choices(), "state"),
    "four-links": lambda: links.links_table(FAR),
    "seconds": lambda: tables.seconds(load("convergence/seconds")),
    "ends": lambda: tables.ends(load("convergence/ends")),
    "exchange": lambda: exchange.markdown(load("exchange/cpu")["rows"]),
    "compile": lambda: compile_time.show(load("compile/cpu")),
    "authors": authors.summary,
    "seeds": lambda: tables.founding(load("convergence/seeds")),
}
"""What is between the two lines of each name."""


def filled(text: str) -> str:
    """A page with the tables that the results make."""
    return BLOCK.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[3]}", text)


def main() -> None:
    """Writes the pages that are not what the results make, and names them."""
    for page in PAGES:
        text = page.read_text()
        if filled(text) != text:
            page.write_text(filled(text))
            print(page)


if __name__ == "__main__":
    main()
