"""The founding papers' claims about training again, with the optimizers that keep the loss.

The FFT paper says that it trains best of four, RedSync that 0.1 % of a gradient is enough, ScaleCom
that 65 to 400 times fewer values are, with 64 learners. Their codecs are trained before Adam, as
published but for dense warm-ups, and before Muon: with feedback and a lead
(`fg.optimizers.feedback_muon`, whose settings were chosen elsewhere) where a codec drops, without
either where it adds noise that is right on average. The dense rows, and what a filled message does,
are those of `ends.py`, with 8 workers.
"""

import dataclasses
import json
import pathlib
from typing import Any

from _record import RESULTS
from ends import DENSE, METHODS, STUDY, filled, muon, tables
from methods import FEEDBACK, FFT, LINKS, TRIMMED, Method, m, renamed

import fftgrad as fg

FILLED = ("30x, Muon, lead 0.3", "100x, Muon, lead 0.5", "300x, Muon, lead 0.5")
"""Rows of `ends.py` that stand beside these."""
TASKS = ("photographs", "names")


def led(name: str, exchange: fg.Exchange, lead: float = 0.5) -> Method:
    """Behind feedback, before Muon with a lead."""
    return Method(name, fg.Recipe(exchange, FEEDBACK), optimizer=muon(lead))


SHARED: list[Method] = [
    Method("ScaleCom 65x, Muon, lead 0.5", m.scalecom(65), optimizer=muon(0.5)),
    led("ScaleCom 400x, one vector, Muon, lead 0.5", fg.SharedSupport(fg.ChunkTopK(400))),
]
"""One worker chooses for all, and nothing is forgotten."""
ROWS: list[Method] = [
    renamed("FFT (paper), Adam", "FFT (paper)"),
    renamed("top-k 15 % (paper), Adam", "top-k 15 % (paper)"),
    renamed("QSGD 3 bits (paper), Adam", "QSGD 3 bits (paper)"),
    Method("TernGrad no clip, Adam", m.terngrad(clip=None)),
    led("FFT 64, 30x, Muon, lead 0.3", fg.AllGather(fg.chain(FFT, fg.Budget(ratio=30))), 0.3),
    Method("QSGD 3 bits, Muon", m.qsgd(bits=3), muon=True),
    Method("TernGrad no clip, Muon", m.terngrad(clip=None), muon=True),
    dataclasses.replace(
        LINKS["fft-16"], name="FFT 16, 0.1 %, 4 bits, Muon, lead 0.5", optimizer=muon(0.5)
    ),
    Method("RedSync 0.1 %, Adam", m.redsync(0.001, **TRIMMED), momentum=False, corrects=True),
    led("RedSync's search 0.1 %, Muon, lead 0.5", fg.AllGather(fg.Threshold(0.001))),
    *SHARED,
]
"""With 8 workers."""

LEARNERS: list[Method] = [
    *(row for row in METHODS if row.name in DENSE),
    Method("ScaleCom 65x, Adam", m.scalecom(65, uptake=0.1)),
    Method("ScaleCom 400x, Adam", m.scalecom(400, uptake=0.1)),
    *SHARED,
    filled("100x, Muon, lead 0.5", 100, optimizer=muon(0.5)),
    filled("400x, Muon, lead 0.5", 400, optimizer=muon(0.5)),
]
"""With 64."""


def beside(results: dict[str, Any]) -> str:
    """The table of the rows with 8 workers, under those of `ends.py`."""
    ends = json.loads((RESULTS / "convergence/ends.json").read_text())["runs"]
    names = (*DENSE, *FILLED)
    shared = [run for run in ends if run["method"] in names and run["task"] in TASKS]
    order = [row for row in METHODS if row.name in names] + ROWS
    return tables(results | {"runs": shared + results["runs"]}, order)


def show(results: dict[str, Any], folder: pathlib.Path, name: str) -> None:
    """The table."""
    del folder, name
    print(beside(results))


def show_learners(results: dict[str, Any], folder: pathlib.Path, name: str) -> None:
    """The table."""
    del folder, name
    print(tables(results, LEARNERS))


SEEDS = dataclasses.replace(
    STUDY, file="seeds", rows=ROWS, show=show, tasks=TASKS, rates=(2.0, 4.0), smoke=(ROWS[4].name,)
)
SEEDS_64 = dataclasses.replace(
    SEEDS,
    file="seeds-64",
    rows=LEARNERS,
    show=show_learners,
    steps=150,
    workers=64,
    smoke=(*DENSE, SHARED[0].name),
)
