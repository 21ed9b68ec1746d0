"""Configuration as values: how they print, and how what is none is refused."""

import dataclasses
import os
import pathlib
import re
from typing import Any, TypeVar, dataclass_transform

import numpy as np

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def value(cls: type[T]) -> type[T]:
    """A frozen dataclass whose `repr` is the call that makes it."""
    if "__repr__" not in vars(cls):
        cls.__repr__ = _constructor_call
    return dataclasses.dataclass(frozen=True, repr=False)(cls)


LONGEST = 300
"""The most characters of a value that an error shows: a model's parameters fill screens."""


def brief(value: object) -> str:
    """A value as an error shows it: on one line, and only the beginning of a long one."""
    text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def check_kind(argument: str, value: object, kind: type, remedy: str) -> None:
    """Refuses what is not a value of a kind of part, such as its class, or one without a hash."""
    if not isinstance(value, kind):
        if isinstance(value, type):
            remedy = f"pass a value, which a call makes, as {value.__name__}(...)."
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise TypeError(
            f"{argument}: must be {article} {kind.__name__.lower()}, got {brief(value)}; {remedy}"
        )
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"{argument}: must be a value that can be hashed, got {value!r}; declare its class "
            "with @dataclasses.dataclass(frozen=True), and keep tuples in it, no lists."
        ) from None


def check_transformation(argument: str, value: object) -> None:
    """Refuses what has no `init` and `update`, such as a rate, or is a memory."""
    methods = hasattr(value, "init") and hasattr(value, "update")
    if not methods or hasattr(value, "compensate"):
        raise TypeError(
            f"{argument}: must be an optax transformation, got {brief(value)}; pass one "
            "such as optax.sgd(0.1), or fg.compressed_pmean(exchange, axis_name='data')."
        )


def check_choice(argument: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuses what is none of the choices, of which the first is the default."""
    if value not in choices:
        raise ValueError(
            f"{argument}: must be one of {choices}, got {value!r}; use {choices[0]!r}."
        )


def check_count(
    argument: str, value: object, remedy: str, least: int = 1, most: int | None = None
) -> int:
    """Refuses what counts nothing: no whole number, or one that is too small or too large."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{argument}: must be a whole number, got {brief(value)}; {remedy}")
    if value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"in [{least}, {most}]"
        raise ValueError(f"{argument}: must be {bounds}, got {value}; {remedy}")
    return int(value)


def check_within(argument: str, value: float, interval: str, remedy: str) -> None:
    """Refuses what is no number, or one outside of an interval such as "[0, 1)"."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"{argument}: must be a number, got {brief(value)}; {remedy}")
    low, high = map(float, interval[1:-1].split(", "))
    above = low <= value if interval[0] == "[" else low < value
    below = value <= high if interval[-1] == "]" else value < high
    if not (above and below):
        raise ValueError(f"{argument}: must be in {interval}, got {value}; {remedy}")


def scheme_of(path: str) -> str:
    """The scheme of a URL, such as "s3"; "" for a path.

    One slash is enough, because `pathlib` drops the second. One letter is a drive of Windows.
    """
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/", path)
    return found[1].lower() if found else ""


def local_path(argument: str, path: str | os.PathLike[str]) -> pathlib.Path:
    """A path with `~` expanded. Refuses a URL, which `pathlib` would take for a folder `s3:`."""
    text = os.fspath(path)
    if scheme_of(text):
        raise ValueError(
            f"{argument}: must be a path of a mounted file system, got the URL {text!r}; mount "
            "the bucket and pass its path, or pass a folder and copy the files."
        )
    # pathlib raises for a name such as ~x that is no user's; os.path leaves it, as a shell does.
    return pathlib.Path(os.path.expanduser(text))  # noqa: PTH111


def knows(part: object, name: str, other: str) -> bool:
    """Whether what a part has by one name was written with what it has by another, or after it.

    A class that overrides one alone may inherit what no longer agrees with it.
    """

    def author(name: str) -> type:
        return next(kind for kind in type(part).__mro__ if name in vars(kind))

    return issubclass(author(name), author(other))


def _constructor_call(self: Any) -> str:
    """The `repr` of a configuration: the call that makes it, without what it leaves at default."""
    given = (
        f"{field.name}={getattr(self, field.name)!r}"
        for field in dataclasses.fields(self)
        if getattr(self, field.name) != field.default
    )
    return f"{type(self).__name__}({', '.join(given)})"
