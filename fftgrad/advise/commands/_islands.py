"""`fftgrad islands status`: how a run of islands is going."""

import argparse
import time

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from fftgrad.advise.commands._arguments import add_json, count, is_read_by_people, seconds, store
from fftgrad.advise.commands._show import quantity, table, three_digits, write_json
from fftgrad.islands import RoundStatus, Status, open_store, status

HELP = "how a run of islands is going, from its store"

EPILOG = """\
islands that share a store: who came to the last rounds, and what it cost:
  fftgrad islands status s3://bucket/run
every ten seconds, and the last 500 rounds as JSON:
  fftgrad islands status s3://bucket/run --watch --every 10
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
    add("--watch", action="store_true", help="go on until interrupted")
    text = "seconds between two looks of --watch (default: %(default)s)"
    add("--every", type=seconds, default=5.0, metavar="SECONDS", help=text)
    add_json(parser)


def run(args: argparse.Namespace, console: Console) -> None:
    """Looks, shows, and looks again."""
    place = open_store(args.url, make=False)
    found = status(place, args.rounds)
    write_json(found.as_dict(), args.json, console)
    if not args.watch:
        if is_read_by_people(args):
            console.print(show(found))
        return
    with Live(show(found), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(args.every)
            found = status(place, args.rounds)
            write_json(found.as_dict(), args.json, console)
            live.update(show(found), refresh=True)


def show(found: Status) -> Table:
    """Islands above, rounds below."""
    out = Table.grid()
    out.add_row(_islands(found))
    out.add_row(_rounds(found))
    if found.trouble:
        out.add_row(_plain(found.trouble))
    came = _plain(", ".join(found.came)) or "nobody yet"
    out.add_row(f"open: round {found.open}, came: {came}; newest anchor: round {found.anchor}")
    out.add_row(
        "lag: rounds since it last counted. held: norm of what its memory kept then,\n"
        "lost if it died since. traffic: bytes both ways since it started."
    )
    return out


def _islands(found: Status) -> Table:
    names = "last", "lag", "counted", "missed", "refused", "loss", "size", "held"
    out = table("island", *names, "requests", "traffic")
    for one in found.islands:
        name = _plain(one.island)
        loss = "" if one.loss is None else f"{one.loss:.4f}"
        counts = (one.last, one.lag, one.counted, one.missed, one.refused)
        size, held = quantity(one.size, "B"), three_digits(one.held)
        traffic = quantity(one.traffic, "B")
        out.add_row(name, *map(str, counts), loss, size, held, f"{one.requests:,}", traffic)
    return out


def _rounds(found: Status) -> Table:
    out = table("round", "counted", "loss", "size", "waited", "manifest by", padding=0)
    out.add_column("not counted")
    for one in found.rounds[-ROUNDS:]:
        loss = "" if one.loss is None else f"{one.loss:.4f}"
        size, waited = quantity(one.size, "B"), quantity(one.waited, "s")
        counted = f"{len(one.counted)}"
        by, others = _plain(one.by), _plain(_others(one))
        out.add_row(str(one.round), counted, loss, size, waited, by, others)
    return out


def _others(one: RoundStatus) -> str:
    missed = [f"{name} did not come" for name in one.missed]
    return "; ".join(missed + [f"{name}: {reason}" for name, reason in one.refused.items()])


def _plain(text: str) -> str:
    """What a member wrote, without what would move the cursor or be read as markup."""
    return escape("".join(mark if mark.isprintable() else "?" for mark in text))
