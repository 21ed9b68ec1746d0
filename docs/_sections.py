"""Griffe extension: the sections of our docstrings that Google's style does not know.

They become paragraphs that begin with their name in bold, and `Example` becomes `Examples`, which
is shown as code.
"""

import re
from typing import Any

import griffe

OWN = re.compile(r"^(Shapes|Wire|Claims|Differs from the paper|References):\s*(.*)$")


class Sections(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

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
