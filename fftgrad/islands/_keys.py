"""Layout of the store.

    run.json                                the model and the settings
    islands/NAME/000001                     the first start (incarnation) under a name
    rounds/000000007/NAME.000001            a contribution to round 7
    rounds/000000007/manifest.json          the contributions that count; never removed
    anchors/000000007                       the common state before round 7

Islands never overwrite an object. They create it only if its key is unused.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from fftgrad._values import check

RUN = "run.json"
ANCHORS = "anchors/"
ROUNDS = "rounds/"
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Who(NamedTuple):
    """Name of an island, and number of the start under this name."""

    island: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.island}.{self.incarnation:06}"


def check_name(name: object) -> str:
    """Refuse a name that cannot be part of a key."""
    fine = isinstance(name, str) and NAME.fullmatch(name) is not None
    check(fine, "Island(name)", "be 1 to 64 letters, digits, _ and -", repr(name), "use 'site-1'.")
    return str(name)


def round_folder(number: int) -> str:
    return f"{ROUNDS}{number:09}/"


def manifest(number: int) -> str:
    return f"{round_folder(number)}manifest.json"


def contribution(number: int, who: Who) -> str:
    return f"{round_folder(number)}{who}"


def contributors(keys: Iterable[str]) -> set[Who]:
    """Return the islands that have a contribution among the keys of a round."""
    found = (re.fullmatch(rf"rounds/\d{{9}}/({NAME.pattern})\.(\d{{6}})", key) for key in keys)
    return {Who(one[1], int(one[2])) for one in found if one}


def anchor(number: int) -> str:
    return f"{ANCHORS}{number:09}"


def number_of(key: str) -> int | None:
    """Return the round in the key of an anchor or of a round's object; None for other keys."""
    found = re.match(r"(?:rounds|anchors)/(\d{9})(?:/|$)", key)
    return int(found[1]) if found else None


def claims(name: str) -> str:
    return f"islands/{name}/"


def claim(who: Who) -> str:
    return f"{claims(who.island)}{who.incarnation:06}"
