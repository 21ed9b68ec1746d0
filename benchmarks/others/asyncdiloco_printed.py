"""The losses that the notebook of DiLoCo's authors prints, by fftgrad alone: no run of theirs."""

import pathlib
import re
from collections.abc import Iterator

from others._compare import Row
from others.asyncdiloco import (
    LICENSE,
    NOTEBOOK,
    PLAIN,
    REPOSITORY,
    defined,
    farthest,
    losses,
    notebook,
)

__all__ = ["LICENSE", "REPOSITORY", "compare"]


def printed(checkout: pathlib.Path) -> list[float]:
    """The losses of the first synchronous experiment whose output is kept there."""
    for cell in notebook(checkout):
        text = "".join("".join(out.get("text", [])) for out in cell.get("outputs", []))
        runs = text.split("Starting experiment ")
        for run in runs:
            if run.startswith("sync-sgd"):
                return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", run)]
    raise ValueError(f"{NOTEBOOK} has no output of a synchronous experiment")


def compare(checkout: pathlib.Path, smoke: bool) -> Iterator[Row]:
    """One row: all losses of a run."""
    theirs = printed(checkout)[: 2 if smoke else None]
    experiments = defined(checkout)["SyncExperiment"]
    experiment = experiments(total_phases=5, eval_every=1, **PLAIN.theirs)
    own = losses(experiment, PLAIN, phases=len(theirs) - 1)
    yield Row(
        ", ".join(f"{loss:.6f}" for loss in theirs),
        ", ".join(f"{loss:.6f}" for loss in own),
        "65,000 hidden values, 4 workers, phases of 20 steps, outer SGD 0.5",
        farthest(own, theirs),
        differs="printed on a GPU; a new AdamW in each phase: ours was given one that forgets",
    )
