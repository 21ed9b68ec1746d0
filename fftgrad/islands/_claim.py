"""Who has a name. Two islands under one name would take each other for themselves."""

from collections.abc import Callable

from fftgrad.islands import _keys
from fftgrad.islands._frame import DamagedError
from fftgrad.islands._keys import Who
from fftgrad.islands._requests import Clock, Create, List, Steps, Wait, settle

NEW, OLD = b"new", b"old"
"""Whose a name is. They differ in every letter: what is neither is damaged."""

MOST = 64
"""Bytes of any object here."""


class NameTakenError(ValueError):
    """Another island has the name."""

    def __init__(self, name: str, what: str = "which a living island has") -> None:
        super().__init__(
            f"Island(name): must be of one island at a time, got {name!r}, {what}; take another "
            "name."
        )


def claim(name: str, grace: float, nonce: bytes) -> Steps[Who]:
    """The name for a new start of an island, unless one that lives has it.

    Where an earlier start of it did not end in an orderly way it is asked, and has so many seconds
    to answer. Both then try to write the same object, and who comes first has the name. By `nonce`
    a start knows its own claim again.
    """
    before = yield from _claims(name)
    number = max(before, default=1)
    while (yield from _settle(Who(name, number), "", nonce)) != nonce:
        before.setdefault(number, set())
        number += 1
    before.pop(number, None)
    who = Who(name, number)
    alive = [number for number, said in before.items() if "left" not in said]
    end = (yield Clock()) + grace
    while alive and (now := (yield Clock())) < end:
        if "taken" in (yield from _claims(name)).get(who.incarnation, ()):
            break
        yield Wait(min(grace / 10, end - now))
    said = yield from _settle(who, "taken", NEW)
    if said != NEW:
        yield from leave(who)
        raise (
            NameTakenError(name) if said == OLD else NameTakenError(name, "whose claim is damaged")
        )
    for number in alive:  # so that nobody asks them again
        yield from leave(Who(name, number))
    return who


def answer(who: Who, answered: set[int], check: Callable[[], Steps[object]]) -> Steps[None]:
    """Tells those who claim the name that it is taken; raises if one has it already.

    Where what became of a claim is damaged, who had the name before keeps it.
    `answered` are those who have been told, to which it adds. `check` raises where the store is not
    that of the run any more, in which others may have the name.
    """
    for number in sorted((yield from _claims(who.island))):
        if number > who.incarnation and number not in answered:
            yield from check()
            if (yield from _settle(Who(who.island, number), "taken", OLD)) == NEW:
                raise NameTakenError(who.island, f"which start {number} of it took over")
            answered.add(number)


def leave(who: Who) -> Steps[None]:
    """Says that a start of an island is over."""
    yield Create(_keys.claim(who, "left"), b"")


def _settle(who: Who, what: str, said: bytes) -> Steps[bytes]:
    """What an object says of a claim to all: this, or what was said first."""
    try:
        return (yield from settle(_keys.claim(who, what), said, MOST))
    except DamagedError:
        return b""


def _claims(name: str) -> Steps[dict[int, set[str]]]:
    """What is said of each start of an island."""
    found: dict[int, set[str]] = {}
    for key in (yield List(_keys.claims(name))):
        number, _, said = key.removeprefix(_keys.claims(name)).partition(".")
        if number.isdigit():
            found.setdefault(int(number), set()).add(said)
    return found
