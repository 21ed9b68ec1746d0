"""What arguments of several commands mean; what is wrong is said before a long run."""

import argparse
import importlib
import pathlib
import re

COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKMGB]|[KMG]i)?")
FACTORS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9} | {
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30
}  # fmt: skip


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
    value = number(text)
    if isinstance(value, str) or not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be seconds, above 0, got {text!r}")
    return value


def number(text: str) -> float | str:
    """A number, or a text with a unit, which the library reads."""
    try:
        return float(text)
    except ValueError:
        return text


def names(text: str) -> str | tuple[str, ...]:
    """The name of an axis, or several, with commas between them."""
    return tuple(text.split(",")) if "," in text else text


def in_file(text: str) -> pathlib.Path:
    """A file to read."""
    path = pathlib.Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"must be a file that exists, got {text!r}")
    return path


def out_file(text: str) -> pathlib.Path:
    """A file to write."""
    path = pathlib.Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that exists, got {text!r}")
    return path


def png_file(text: str) -> pathlib.Path:
    """A figure to write, by a package that may be missing."""
    importlib.import_module("matplotlib")
    return out_file(text)


def png_folder(text: str) -> pathlib.Path:
    """A folder for figures, which may have to be made."""
    importlib.import_module("matplotlib")
    path = pathlib.Path(text)
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    if not there.is_dir():
        raise argparse.ArgumentTypeError(f"must be a folder, got {text!r}, where {there} is a file")
    return path


def add_json(parser: argparse.ArgumentParser) -> None:
    """The argument `--json`."""
    text = "write all numbers as JSON; - for standard output, and nothing else there"
    parser.add_argument("--json", type=out_file, metavar="FILE", help=text)


def is_read_by_people(args: argparse.Namespace) -> bool:
    """Whether standard output is for people."""
    return str(args.json) != "-"
