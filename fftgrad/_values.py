"""Frozen configuration classes with a readable `repr`, and checks of their arguments."""

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
    """Make a class a frozen dataclass of Python numbers; its `repr` is a constructor call."""
    if "__repr__" not in vars(cls):
        cls.__repr__ = _constructor_call
    made: Any = cls
    check = getattr(made, "__post_init__", lambda _: None)

    def post_init(self: Any) -> None:
        # Convert to the field types only after the check: TopK(fraction=1) must fail the check.
        _set(self, _changes(self, lambda found, _: plain(found)))
        check(self)
        _set(self, _changes(self, plain))

    made.__post_init__ = post_init
    return dataclasses.dataclass(frozen=True, repr=False)(cls)


def plain(found: Any, kinds: str = "") -> Any:
    """Convert scalars of NumPy and JAX, also in tuples and frozen dataclasses, to Python numbers.

    Then equal configurations have the same `repr`, which island stores and checksums require.
    `kinds` is the annotation of the field; a number is converted to this type.
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
    """Map the names of the dataclass fields that `convert` changes to their new values."""
    kinds = {field.name: str(field.type) for field in dataclasses.fields(part)}
    old = {name: getattr(part, name) for name in kinds if hasattr(part, name)}
    new = {name: convert(found, kinds[name]) for name, found in old.items()}
    return {name: found for name, found in new.items() if found is not old[name]}


def _set(part: Any, fields: dict[str, Any]) -> Any:
    for name, found in fields.items():
        object.__setattr__(part, name, found)
    return part


LONGEST = 300
"""Maximum number of characters of a value in an error message."""


def brief(value: object) -> str:
    """Return the `repr` of a value in one line of at most `LONGEST` characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def check(holds: bool, argument: str, rule: str, found: object, remedy: str) -> None:
    """Raise a ValueError with argument, rule, value and remedy if the rule does not hold."""
    if not holds:
        raise ValueError(f"{argument}: must {rule}, got {found}; {remedy}")


def check_type(holds: bool, argument: str, rule: str, found: object, remedy: str) -> None:
    """Raise a TypeError with argument, rule, value and remedy if the type is wrong."""
    if not holds:
        raise TypeError(f"{argument}: must {rule}, got {brief(found)}; {remedy}")


def missing_extra(owner: str, package: str, extra: str) -> ImportError:
    return ImportError(
        f"{owner}: needs {package}, got none; run pip install -e '.[{extra}]' in the folder of the "
        "repository."
    )


def check_kind(argument: str, value: object, kind: type, remedy: str) -> None:
    if isinstance(value, type):
        remedy = f"pass a value, which a call makes, as {value.__name__}(...)."
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    rule = f"be {article} {kind.__name__.lower()}"
    check_type(isinstance(value, kind), argument, rule, value, remedy)


def check_transformation(argument: str, value: object) -> None:
    """Require `init` and `update` but not `add`, because memories have all three."""
    methods = hasattr(value, "init") and hasattr(value, "update") and not hasattr(value, "add")
    remedy = "pass one such as optax.sgd(0.1), or fg.compressed_pmean(exchange, axis_name='data')."
    check_type(methods, argument, "be an optax transformation", value, remedy)


def check_choice(argument: str, value: object, choices: tuple[str, ...]) -> None:
    """Require one of the choices; the error suggests the first one, the default."""
    remedy = f"use {choices[0]!r}."
    check(value in choices, argument, f"be one of {choices}", repr(value), remedy)


def check_count(
    argument: str, value: object, remedy: str, least: int = 1, most: int | None = None
) -> int:
    """Require a whole number in a range, and return it as an int."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{argument}: must be a whole number, got {brief(value)}; {remedy}")
    count, bounds = int(value), f"at least {least}" if most is None else f"in [{least}, {most}]"
    fine = least <= count and (most is None or count <= most)
    check(fine, argument, f"be {bounds}", count, remedy)
    return count


def check_within(argument: str, value: float, interval: str, remedy: str) -> None:
    """Require a number in an interval such as "[0, 1)"."""
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    check_type(is_number, argument, "be a number", value, remedy)
    low, high = map(float, interval[1:-1].split(", "))
    above = low <= value if interval[0] == "[" else low < value
    below = value <= high if interval[-1] == "]" else value < high
    check(bool(above and below), argument, f"be in {interval}", value, remedy)


def scheme_of(path: str) -> str:
    """Return the scheme of a URL, such as "s3"; "" for a path.

    "s3:/" is a URL too, because `pathlib` drops the second slash. "C:/" is a Windows drive.
    """
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/", path)
    return found[1].lower() if found else ""


def local_path(argument: str, path: str | os.PathLike[str]) -> pathlib.Path:
    """Expand `~` in a path, and refuse a URL, which `pathlib` would take for a folder."""
    text = os.fspath(path)
    remedy = "mount the bucket and pass its path, or pass a folder and copy the files."
    check(not scheme_of(text), argument, "be a path, no URL", repr(text), remedy)
    # For an unknown user x, pathlib raises an error; os.path keeps "~x" as it is, like a shell.
    return pathlib.Path(os.path.expanduser(text))  # noqa: PTH111


def _constructor_call(self: Any) -> str:
    """Return the constructor call of a configuration, without arguments equal to the default."""
    given = (
        f"{field.name}={getattr(self, field.name)!r}"
        for field in dataclasses.fields(self)
        if getattr(self, field.name) != field.default
    )
    return f"{type(self).__name__}({', '.join(given)})"
