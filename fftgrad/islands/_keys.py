"""The layout of the store.

    run.json                                what is trained, and the settings of the first round
    islands/NAME/000001                     a claim of a name; the number is the incarnation
    islands/NAME/000001.left                that it ended in an orderly way
    islands/NAME/000002.taken               who has the name since then: the new one, or the old
    rounds/000000007/NAME.000001            a contribution to round 7
    rounds/000000007/manifest.json          which of them count: the truth, never removed
    anchors/000000007                       what all hold before round 7

No object is ever changed. Each is made by create-if-absent.
"""

import re
from typing import NamedTuple

RUN = "run.json"
ANCHORS = "anchors/"
ROUNDS = "rounds/"
MANIFEST = "manifest.json"
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Who(NamedTuple):
    """An island, and which time it was started under its name."""

    island: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.island}.{self.incarnation:06}"


def check_name(name: object) -> str:
    """The name of an island, once it is known to be a part of a key."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(
            "Island(name): must be 1 to 64 letters, digits, _ and -, because keys of the store "
            f"have it, got {name!r}; use 'site-1'."
        )
    return name


def round_folder(number: int) -> str:
    """The folder of a round."""
    return f"{ROUNDS}{number:09}/"


def manifest(number: int) -> str:
    """The key of a round's manifest."""
    return f"{round_folder(number)}{MANIFEST}"


def contribution(number: int, who: Who) -> str:
    """The key of what an island contributes to a round."""
    return f"{round_folder(number)}{who}"


def contributor(key: str) -> Who | None:
    """Whose contribution a key is; None if it is no such key."""
    found = re.fullmatch(rf"rounds/\d{{9}}/({NAME.pattern})\.(\d{{6}})", key)
    return Who(found[1], int(found[2])) if found else None


def anchor(number: int) -> str:
    """The key of what all hold before a round."""
    return f"{ANCHORS}{number:09}"


def number_of(key: str) -> int | None:
    """The round whose anchor, or in whose folder, a key is."""
    found = re.match(r"(?:rounds|anchors)/(\d{9})(?:/|$)", key)
    return int(found[1]) if found else None


def claims(name: str) -> str:
    """The folder of the claims of a name."""
    return f"islands/{name}/"


def claim(who: Who, what: str = "") -> str:
    """The key of a claim, or of what became of it: "left" or "taken"."""
    return f"{claims(who.island)}{who.incarnation:06}{f'.{what}' if what else ''}"
