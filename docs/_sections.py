"""Griffe extension: what it does not know of our classes and docstrings.

A public function or class ends with where its source is, a link if the repository has an address.
A class under `@value` is shown as the dataclass that it is. Sections that Google's style does not
know become paragraphs that begin with their name in bold, and `Example` becomes `Examples`, which
is shown as code.
"""

import pathlib
import re
import tomllib
from typing import Any

import griffe

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
REPOSITORY = PROJECT["tool"]["fftgrad"]["repository"].rstrip("/")
OWN = re.compile(r"^(Shapes|Wire|Claims|Differs from the paper|References):\s*(.*)$")


class Dataclass(griffe.ExprName):
    """The decorator `value`, as Griffe has to see it to find the arguments of the constructor."""

    @property
    def canonical_path(self) -> str:
        """That of the decorator that it stands for."""
        return "dataclasses.dataclass"


class Sections(griffe.Extension):
    """Rewrites each decorator and docstring before it is read."""

    def on_class_instance(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Called for each class."""
        for decorator in cls.decorators:
            if str(decorator.value) == "value":
                decorator.value = Dataclass("value")

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called once for each object."""
        if obj.docstring:
            obj.docstring.value = rewritten(obj.docstring.value)
            if (obj.is_class or obj.is_function) and obj.parent and obj.parent.is_module:
                obj.docstring.value += f"\n\n**Source.** {source(obj)}"


def source(obj: griffe.Object) -> str:
    """The file and the line where it is defined."""
    place = f"{pathlib.Path(obj.filepath).relative_to(ROOT)}"
    if not REPOSITORY:
        return f"`{place}`, line {obj.lineno}"
    return f"[`{place}`]({REPOSITORY}/blob/main/{place}#L{obj.lineno})"


def rewritten(docstring: str) -> str:
    """The docstring with sections that the parser knows."""
    lines: list[str] = []
    inside = False
    for line in docstring.splitlines():
        if found := OWN.match(line):
            inside = True
            lines += ["", f"**{found[1]}.** {found[2]}"]
        elif inside and (line.startswith("  ") or not line):
            lines.append(line[2:])
        else:
            inside = False
            lines.append("Examples:" if line == "Example:" else line)
    return "\n".join(lines)
