"""`fftgrad islands status`: how a run of islands is going."""

import argparse

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fftgrad.islands import RoundStatus, Status, status
from fftgrad.planning.commands._text import (
    add_json,
    count,
    is_read_by_people,
    quantity,
    store,
    table,
    write_json,
)

HELP = "how a run of islands is going, from its store"

EPILOG = """\
which islands counted in the last rounds:
  fftgrad islands status s3://bucket/run
every ten seconds, and the last 500 rounds as JSON:
  watch -n 10 fftgrad islands status s3://bucket/run
  fftgrad islands status s3://bucket/run --rounds 500 --json all.json
"""

ROUNDS = 8
"""The table has so many of the last rounds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    add = parser.add_argument
    add("what", choices=["status"], help="what to tell: status")
    add("url", type=store, help="of the store: a folder, or s3://, gs://, az://")
    text = "how many of the last rounds to look at (default: %(default)s)"
    add("--rounds", type=count, default=20, metavar="N", help=text)
    add_json(parser)


def run(args: argparse.Namespace, console: Console) -> None:
    """Print the state of a run."""
    found = status(args.url, args.rounds)
    told = found._asdict() | {"rounds": [one._asdict() for one in found.rounds]}
    write_json(told, args.json, console)
    if is_read_by_people(args):
        console.print(show(found))


def show(found: Status) -> Table:
    """The last rounds, and the open one."""
    out = Table.grid()
    out.add_row(_rounds(found))
    came = _plain(", ".join(found.came)) or "nobody yet"
    out.add_row(f"open: round {found.open}, came: {came}; newest anchor: round {found.anchor}")
    return out


def _rounds(found: Status) -> Table:
    out = table("round", "counted", "loss", "waited", padding=0)
    out.add_column("not counted")
    for one in found.rounds[-ROUNDS:]:
        loss = "" if one.loss is None else f"{one.loss:.4f}"
        counted, waited = f"{len(one.counted)}", quantity(one.waited, "s")
        out.add_row(str(one.round), counted, loss, waited, _plain(_others(one)))
    return out


def _others(one: RoundStatus) -> str:
    missed = [f"{name} did not come" for name in one.missed]
    return "; ".join(missed + [f"{name}: {reason}" for name, reason in one.refused.items()])


def _plain(text: str) -> str:
    """What a member wrote, without what would move the cursor or be read as markup."""
    return escape("".join(mark if mark.isprintable() else "?" for mark in text))
