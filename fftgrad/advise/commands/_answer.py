"""What people read of a plan."""

import math
from collections.abc import Sequence

import jax
from rich.console import Console

from fftgrad.advise import Plan, PlanRow
from fftgrad.advise._answer import ACCEPTED, MARGIN
from fftgrad.advise.commands._show import (
    bits_per_second,
    paragraph,
    quantity,
    table,
    three_digits,
)

LEGEND = """\
Order: by seconds to the same loss, first what ends as dense or close and is a tenth faster than
dense, then dense, then all else of those, then the others. times: the steps that it makes in one
step of the best dense. codec: compressing and decompressing, and the optimizer of a row that has
its own. link: bytes that leave a worker in a step. pays below: over a faster link the best dense
wins. loss: as dense and close are of small models that no setting was chosen on, with 8 workers;
check and worse of others, which need not travel."""
ALSO = """\
keeps: bytes of its state on a worker. compiles: after how long it could begin, where it was
timed."""
WIDE = 100
"""The columns of a terminal that has room for that."""

TRIFLE = 1e-3
"""The share of a step below which the bytes of a gradient do not matter."""


def _too_small(found: Plan) -> str:
    """Why there is nothing to gain, if the bytes of dense take next to nothing of a step."""
    dense = found.dense
    takes = dense.link_bytes / found.link.bandwidth
    if found.compress or takes > TRIFLE * dense.seconds:
        return ""
    return (
        f"Do not compress: the gradient is too small to matter. Its bytes take "
        f"{quantity(takes, 's')} of a step of {quantity(dense.seconds, 's')} ({dense.name})."
    )


def answer(found: Plan) -> str:
    """The plan in a sentence or two."""
    best = found.best
    if not found.compress:
        takes = f"{best.name} takes {quantity(best.seconds, 's')} a step"
        other = min((row for row in found.rows if not row.is_dense), key=lambda row: row.seconds)
        rule = ""
        if other.seconds < best.seconds:
            rule = (
                " To be recommended it would have to be a tenth faster to the same loss, and "
                "to have ended at a loss like dense's in runs on other tasks."
            )
        by_codecs = _by_codecs(found)
        here = f", if this {jax.default_backend().upper()} is what trains" if by_codecs else ""
        return (
            f"Do not compress{here}: {takes}; the fastest that compresses, {other.name}, takes "
            f"{quantity(other.seconds, 's')} (loss: {other.loss}).{rule}{by_codecs}"
        )
    return beside(best, found.dense)


def _by_codecs(found: Plan) -> str:
    """Which row would be recommended but for what its codec takes, and that may be quicker."""

    def codec(row: PlanRow) -> float:
        return row.parts.compress + row.parts.decompress

    def by_link(row: PlanRow) -> float:
        return row.to_loss * (1 - codec(row) / row.seconds)

    close = [row for row in found.rows if not row.is_dense and row.loss in ACCEPTED]
    least = min((by_link(row) for row in found.rows if row.is_dense), default=0.0)
    if not close or by_link(quick := min(close, key=by_link)) * (1 + MARGIN) >= least:
        return ""
    return (
        f" Codec times decide that: of the {quantity(quick.seconds, 's')} of {quick.name} its "
        f"codec and optimizer take {quantity(codec(quick), 's')} here. If another kind of device "
        "will train, run this there."
    )


def beside(row: PlanRow, dense: PlanRow) -> str:
    """A row beside the best dense one."""
    place = f" It goes {row.place}." if row.place else ""
    steps = ""
    if row.steps != 1:
        steps = (
            f" In runs it took {three_digits(row.steps)} times the steps to dense's loss, which "
            f"leaves {three_digits(row.speed_up / row.steps)} times."
        )
    return (
        f"{three_digits(row.speed_up)} times the steps of the best dense: {row.name} takes "
        f"{quantity(row.seconds, 's')} a step in place of {quantity(dense.seconds, 's')} "
        f"({dense.name}). Loss: {row.loss}.{steps}{place}"
    )


def show(found: Plan, rows: Sequence[PlanRow], console: Console) -> None:
    """The table of some rows, the answer, and the code of the best row."""
    why = _too_small(found)
    if not why:
        _table(rows, console)
        paragraph(found.source, console)
        console.print()
    how = " --program prints how." if found.best.every > 1 else ""
    paragraph(why or f"{answer(found)}{how}", console)
    console.print(f"\n{found.best.code}", markup=False, highlight=False, soft_wrap=True)


def _table(rows: Sequence[PlanRow], console: Console) -> None:
    wide = console.width >= WIDE
    also = ("keeps", "compiles") if wide else ()
    errors = ("error",) if any(row.error is not None for row in rows) else ()
    numbers = "a step", "times", "codec", "link", *also, *errors, "pays below", "loss"
    out = table("exchange", *numbers)
    for row in rows:
        compiles = quantity(row.compile, "s") if row.compile else ""
        error = "" if row.error is None else three_digits(row.error)
        out.add_row(
            row.name,
            quantity(row.seconds, "s"),
            three_digits(row.speed_up),
            quantity(row.parts.compress + row.parts.decompress, "s"),
            quantity(row.link_bytes, "B"),
            *((quantity(row.memory, "B"), compiles) if wide else ()),
            *(error for _ in errors),
            below(row.break_even),
            row.loss,
        )
    console.print(out)
    paragraph(f"{LEGEND} {ALSO}" if wide else LEGEND, console)


def below(break_even: float | None) -> str:
    """A break-even for people; None is that of dense."""
    if break_even is None:
        return ""
    if not break_even:
        return "never"
    return "any link" if math.isinf(break_even) else bits_per_second(break_even)
