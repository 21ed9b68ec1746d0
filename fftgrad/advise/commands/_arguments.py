"""What arguments of several commands mean; what is wrong is said before a long run."""

import argparse
import importlib
import os
import pathlib
import re
from collections.abc import Callable
from decimal import Decimal

from fftgrad._values import brief, local_path, scheme_of
from fftgrad.advise import _link

COUNT = re.compile(r"([0-9]++(?:\.[0-9]++)?)([kKMGTB]|[KMG]i)?")
FACTORS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12} | {
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30
}  # fmt: skip
MOST_VALUES, MOST, MOST_SECONDS, DAY = 10**15, 10**6, 10**6, 86_400
"""Bounds of what is asked, so that an answer is finite, and comes."""
RATES = 0.125, 1e15
"""The least and the most bytes per second of a link."""


def refusal(rule: str, text: str, remedy: str) -> argparse.ArgumentTypeError:
    """The error about a text; argparse puts the argument before it."""
    return argparse.ArgumentTypeError(f"{rule}, got {brief(text)}; {remedy}")


def count(text: str) -> int:
    """How many values: "250000", "25M", "1.5G", "16Mi"."""
    found = COUNT.fullmatch(text)
    value = Decimal(found[1]) * FACTORS[found[2] or ""] if found else Decimal(0)
    if not 1 <= value <= MOST_VALUES or value != int(value):
        raise refusal("must be a number of values, 1 to 1000T", text, "use 250000, 25M or 16Mi.")
    return int(value)


def whole(least: int, most: int = MOST) -> Callable[[str], int]:
    """How many of what is not counted in millions, such as workers."""

    def read(text: str) -> int:
        digits = text.isascii() and text.isdecimal() and len(text) <= len(str(most))
        if not digits or not least <= int(text) <= most:
            raise refusal(f"must be a whole number, {least} to {most}", text, f"use {least}.")
        return int(text)

    return read


def counts(text: str) -> tuple[int, ...]:
    """Several, with commas between them."""
    return tuple(count(part) for part in text.split(","))


def seconds(text: str) -> float:
    """A positive number of seconds to spend."""
    if not _is_number(text) or not 0 < float(text) <= DAY:
        raise refusal(f"must be seconds, above 0 and at most {DAY}", text, "use 5.")
    return float(text)


def time(text: str) -> float:
    """Seconds, of a text with a unit: who types 300 may mean milliseconds."""
    remedy = "use 300ms or 0.3s."
    found = _with_unit(_link.seconds, text, remedy)
    if found > MOST_SECONDS:
        raise refusal(f"must be at most {MOST_SECONDS} s", text, remedy)
    return found


def rate(text: str) -> float:
    """Bytes per second, of a text with a unit."""
    remedy = "use 1Gbit/s or 125MB/s."
    found = _with_unit(_link.bytes_per_second, text, remedy)
    if not RATES[0] <= found <= RATES[1]:
        raise refusal("must be 1 bit/s to 1000 TB/s", text, remedy)
    return found


def _with_unit(read: Callable[[str, str], float], text: str, remedy: str) -> float:
    if _is_number(text):
        raise refusal("must have a unit", text, remedy)
    try:
        return read("", text)
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
    several = tuple(text.split(","))
    if "" in several or len({*several}) < len(several):
        raise refusal("must be a name, or names that differ", text, "use data, or slow,fast.")
    return several if len(several) > 1 else text


def in_file(text: str) -> pathlib.Path:
    """A file to read."""
    return _path(text, pathlib.Path.is_file, "must be a file that exists", "look for its name.")


def out_file(text: str) -> pathlib.Path:
    """A file to write."""
    rule, remedy = "must be a file in a folder that exists", "make the folder first."
    return _path(text, lambda path: not path.is_dir() and path.parent.is_dir(), rule, remedy)


def png_file(text: str) -> pathlib.Path:
    """A figure to write, by a package that may be missing."""
    importlib.import_module("matplotlib")
    path = out_file(text)
    if path.suffix.lower() != ".png":
        raise refusal("must be a file that ends in .png", text, "use plan.png.")
    return path


def store(text: str) -> str:
    """The URL of a store; of a folder with ~ expanded."""
    if scheme_of(text):
        return text
    return str(
        _path(text, lambda _: text != "", "must be a folder or a URL", "use s3://bucket/run.")
    )


def _path(text: str, fits: Callable[[pathlib.Path], bool], rule: str, remedy: str) -> pathlib.Path:
    """A path that fits, with ~ expanded, which a shell leaves as it is in --json=~/plan.json."""
    if scheme_of(text):
        raise refusal("must be a path of a mounted file system", text, "mount it, or copy files.")
    try:
        path = local_path("", text)
        fit = b"\0" not in os.fsencode(path) and fits(path)
    except (OSError, RuntimeError, ValueError):  # too long, ~ of nobody, no text of the system
        fit, path = False, None
    if not fit or path is None:
        raise refusal(rule, text, remedy)
    return path


def add_json(parser: argparse.ArgumentParser) -> None:
    """The argument `--json`."""
    text = "write all numbers as JSON; - for standard output, and nothing else there"
    parser.add_argument("--json", type=out_file, metavar="FILE", help=text)


def is_read_by_people(args: argparse.Namespace) -> bool:
    """Whether standard output is for people."""
    return str(args.json) != "-"
