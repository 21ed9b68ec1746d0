"""What arguments of several commands mean."""

import argparse
import importlib
import pathlib
import re

COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKMGB]|[KMG]i)?")
FACTORS = {
    "": 1,
    "k": 10**3,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "B": 10**9,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
}


def count(text: str) -> int:
    """How many: "250000", "25M", "1.5G", "16Mi"."""
    found = COUNT.fullmatch(text)
    value = float(found[1]) * FACTORS[found[2] or ""] if found else 0
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(
            f"must be a number of values, as 250000, 25M or 16Mi, got {text!r}"
        )
    return int(value)


def counts(text: str) -> tuple[int, ...]:
    """Several, with commas between them."""
    return tuple(count(part) for part in text.split(","))


def seconds(text: str) -> float:
    """A positive number of seconds to spend."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be seconds, above 0, got {text!r}")
    return value


def number(text: str) -> float | str:
    """A number, or a text with a unit, which the library reads."""
    try:
        return float(text)
    except ValueError:
        return text


def in_file(text: str) -> pathlib.Path:
    """A file to read."""
    path = pathlib.Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"must be a file that exists, got {text!r}")
    return path


def out_file(text: str) -> pathlib.Path:
    """A file to write, in a folder that is there: said before a long run and not after it."""
    path = pathlib.Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that exists, got {text!r}")
    return path


def out_folder(text: str) -> pathlib.Path:
    """A folder to write to, which may have to be made."""
    path = pathlib.Path(text)
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    if not there.is_dir():
        raise argparse.ArgumentTypeError(f"must be a folder, got {text!r}, where {there} is a file")
    return path


def names(text: str) -> str | tuple[str, ...]:
    """The name of an axis, or several, with commas between them."""
    several = tuple(text.split(","))
    return text if len(several) == 1 else several


def png_file(text: str) -> pathlib.Path:
    """A figure to write, by a package that may be missing: also said before a long run."""
    importlib.import_module("matplotlib")
    return out_file(text)


def add_outputs(parser: argparse.ArgumentParser, figure: str) -> None:
    """The arguments `--json` and `--png`."""
    parser.add_argument(
        "--json",
        type=out_file,
        metavar="FILE",
        help="write all numbers as JSON; - for standard output, and nothing else there",
    )
    parser.add_argument("--png", type=png_file, metavar="FILE", help=f"draw {figure}")


def tells(args: argparse.Namespace) -> bool:
    """Whether standard output is for people."""
    return str(args.json) != "-"
