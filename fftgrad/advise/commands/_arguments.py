"""What arguments of several commands mean; what is wrong is said before a long run."""

import argparse
import importlib
import pathlib
import re
from collections.abc import Callable
from typing import TypeVar

from fftgrad._values import local_path
from fftgrad.advise import _link

T = TypeVar("T")

COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKMGB]|[KMG]i)?")
FACTORS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9} | {
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30
}  # fmt: skip


def count(text: str) -> int:
    """How many values: "250000", "25M", "1.5G", "16Mi"."""
    found = COUNT.fullmatch(text)
    value = float(found[1]) * FACTORS[found[2] or ""] if found else 0
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(
            f"must be a number of values, as 250000, 25M or 16Mi, got {text!r}"
        )
    return int(value)


def at_least(least: int) -> Callable[[str], int]:
    """How many of what is not counted in millions, such as workers."""

    def whole(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"must be a whole number, {least} or more, got {text!r}"
            )
        return int(text)

    return whole


def counts(text: str) -> tuple[int, ...]:
    """Several, with commas between them."""
    return tuple(count(part) for part in text.split(","))


def seconds(text: str) -> float:
    """A positive number of seconds to spend."""
    if not _is_number(text) or not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be seconds, above 0, got {text!r}")
    return float(text)


def time(text: str) -> float:
    """Seconds, of a text with a unit: who types 300 may mean milliseconds."""
    return _with_unit(_link.seconds, text, "300ms or 0.3s")


def rate(text: str) -> float:
    """Bytes per second, of a text with a unit."""
    return _with_unit(_link.bytes_per_second, text, "1Gbit/s or 125MB/s")


def _with_unit(read: Callable[[str, str], float], text: str, example: str) -> float:
    if _is_number(text):
        raise argparse.ArgumentTypeError(f"must have a unit, as {example}, got {text!r}")
    return _checked(lambda: read("", text))


def _checked(read: Callable[[], T]) -> T:
    """What a check of the library returns; its error is one of the command line."""
    try:
        return read()
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix(": ")) from error


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def names(text: str) -> str | tuple[str, ...]:
    """The name of an axis, or several, with commas between them."""
    return tuple(text.split(",")) if "," in text else text


def _path(text: str) -> pathlib.Path:
    return _checked(lambda: local_path("", text))


def in_file(text: str) -> pathlib.Path:
    """A file to read."""
    path = _path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"must be a file that exists, got {text!r}")
    return path


def out_file(text: str) -> pathlib.Path:
    """A file to write."""
    path = _path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that exists, got {text!r}")
    return path


def png_file(text: str) -> pathlib.Path:
    """A figure to write, by a package that may be missing."""
    importlib.import_module("matplotlib")
    path = out_file(text)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"must be a file that ends in .png, got {text!r}")
    return path


def png_folder(text: str) -> pathlib.Path:
    """A folder for figures, which may have to be made."""
    importlib.import_module("matplotlib")
    path = _path(text)
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
