"""The layout of the store.

    run.json                                what is trained, and the settings
    islands/NAME/000001                     a claim of a name; the number is the incarnation
    islands/NAME/000001.left                that it ended in an orderly way
    islands/NAME/000002.taken               who has the name since then: the new one, or the old
    rounds/000000007/NAME.000001            a contribution to round 7
    rounds/000000007/NAME.000001.left       that it left the run, and does not come to round 7
    rounds/000000007/manifest.json          which of them count: the truth, never removed
    rounds/000000007/manifest.1.json        the truth, if the one before is damaged
    anchors/000000007                       what all hold before round 7

No object is ever changed. Each is made by create-if-absent.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

RUN = "run.json"
ANCHORS = "anchors/"
ROUNDS = "rounds/"
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


def manifest(number: int, copy: int = 0) -> str:
    """The key of a round's manifest, or of the one that takes the place of a damaged one."""
    return f"{round_folder(number)}manifest.{f'{copy}.' if copy else ''}json"


def is_manifest(key: str) -> bool:
    """Whether a key is that of a manifest."""
    return re.fullmatch(r"rounds/\d{9}/manifest\.(?:\d+\.)?json", key) is not None


def contribution(number: int, who: Who) -> str:
    """The key of what an island contributes to a round."""
    return f"{round_folder(number)}{who}"


def contributors(keys: Iterable[str]) -> set[Who]:
    """Whose contributions are among the keys of a round."""
    return {who for key in keys if (who := _who(key, ""))}


def left(number: int, who: Who) -> str:
    """The key by which an island says that it does not come to a round, because it leaves."""
    return f"{contribution(number, who)}.left"


def leaver(key: str) -> Who | None:
    """Who says so by a key; None if it is no such key."""
    return _who(key, r"\.left")


def _who(key: str, end: str) -> Who | None:
    found = re.fullmatch(rf"rounds/\d{{9}}/({NAME.pattern})\.(\d{{6}}){end}", key)
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
