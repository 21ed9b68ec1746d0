"""Configuration as values: how they print, and how what is none is refused."""

import copy
import dataclasses
import operator
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def value(cls: type[T]) -> type[T]:
    """A frozen dataclass of Python numbers whose `repr` is the call that makes it."""
    if "__repr__" not in vars(cls):
        cls.__repr__ = _constructor_call
    made: Any = cls
    check = getattr(made, "__post_init__", lambda _: None)

    def post_init(self: Any) -> None:
        # The types of fields count after the checks: TopK(fraction=1) is a mistake, 1.0 is none.
        _set(self, _changes(self, lambda found, _: plain(found)))
        check(self)
        _set(self, _changes(self, plain))

    made.__post_init__ = post_init
    return dataclasses.dataclass(frozen=True, repr=False)(cls)


def plain(found: Any, kinds: str = "") -> Any:
    """Convert the scalars of NumPy and JAX in a configuration into Python numbers.

    Equal configurations print alike then. Checksums and the stores of islands depend on how they
    print.

    Args:
      found: a scalar, a tuple or a frozen dataclass. Anything else, such as a tracer, is returned
        as it is.
      kinds: annotation of the field. An int in a field for floats becomes a float, 0 or 1 in a
        field for bools a bool, and a whole float in a field for ints and floats an int.
    """
    if isinstance(found, np.generic | np.ndarray | jax.Array) and not isinstance(found, Tracer):
        found = _python_scalar(found)
    if type(found) is tuple:
        parts = tuple(plain(one, kinds) for one in found)
        return parts if any(map(operator.is_not, parts, found)) else found
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        frozen = cast("Any", found).__dataclass_params__.frozen
        changes = _changes(found, plain) if frozen else {}
        return _set(copy.copy(found), changes) if changes else found
    if isinstance(found, int | float) and not isinstance(found, bool):
        return _number(found, set(re.findall(r"\w+", kinds)))
    return found


def _number(found: float, kinds: set[str]) -> float:
    if {"int", "float"} <= kinds:
        return int(found) if isinstance(found, float) and found.is_integer() else found
    if "float" in kinds and (not isinstance(found, float) or str(found) == "-0.0"):
        return float(found) + 0.0  # -0.0 + 0.0 is 0.0
    if "bool" in kinds and "int" not in kinds and found in (0, 1):
        return bool(found)
    return found


def _python_scalar(found: Any) -> Any:
    for kind, make in ((jnp.bool_, bool), (jnp.integer, int), (jnp.floating, float)):
        if found.ndim == 0 and jnp.issubdtype(found.dtype, kind):
            return make(found)
    return found.item() if isinstance(found, np.generic) else found


def _changes(part: Any, convert: Callable[[Any, str], Any]) -> dict[str, Any]:
    """Fields of a dataclass that `convert` changes, by name."""
    kinds = {field.name: str(field.type) for field in dataclasses.fields(part)}
    old = {name: getattr(part, name) for name in kinds if hasattr(part, name)}
    new = {name: convert(found, kinds[name]) for name, found in old.items()}
    return {name: found for name, found in new.items() if found is not old[name]}


def _set(part: Any, fields: dict[str, Any]) -> Any:
    for name, found in fields.items():
        object.__setattr__(part, name, found)
    return part


LONGEST = 300
"""The most characters of a value that an error shows: a model's parameters fill screens."""


def brief(value: object) -> str:
    """A value as an error shows it: on one line, and only the beginning of a long one."""
    text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def missing_extra(owner: str, package: str, extra: str) -> ImportError:
    """Return the error for a package that is not installed."""
    return ImportError(
        f"{owner}: needs {package}, got none; run pip install -e '.[{extra}]' in the folder of the "
        "repository."
    )


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
    if not methods or hasattr(value, "add"):
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


def _constructor_call(self: Any) -> str:
    """The `repr` of a configuration: the call that makes it, without what it leaves at default."""
    given = (
        f"{field.name}={getattr(self, field.name)!r}"
        for field in dataclasses.fields(self)
        if getattr(self, field.name) != field.default
    )
    return f"{type(self).__name__}({', '.join(given)})"
