"""Griffe extension: what it does not know of our classes and docstrings.

A class under `@value` is shown as the dataclass that it is. Sections that Google's style does not
know become paragraphs that begin with their name in bold, and `Example` becomes `Examples`, which
is shown as code.
"""

import re
from typing import Any

import griffe

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
