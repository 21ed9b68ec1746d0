"""How an island joins: it reads run.json, and claims its name."""

from collections.abc import Callable
from typing import Any

from fftgrad.islands import _keys, _objects
from fftgrad.islands._keys import Who
from fftgrad.islands._model import Model
from fftgrad.islands._objects import DamagedError
from fftgrad.islands._requests import Clock, Create, List, Read, Steps, StoreError, Wait, settle
from fftgrad.islands._settings import Settings, read_settings


def enter_run(model: Model, mine: Settings | None, own: str) -> Steps[tuple[Settings, bytes]]:
    """Begin or join the run of a store; return its settings, and the bytes of run.json.

    A run that begins here has the id `own`, by which it differs from an earlier run of the store.
    """
    asked = mine or Settings()
    about = {"id": own, "model": model.described, "settings": asked.as_dict()}
    try:
        data = yield from settle(_keys.RUN, _objects.pack_json(about))
        if (yield Create(_keys.RUN, data)):  # its own bytes, so that the test changes nothing
            raise ValueError(
                "Island(store): must make an object only if there is none, got one that replaces "
                "run.json; take a server that honours If-None-Match, or another kind of store."
            )
        run = read_run(data, "Island(store)")
    except DamagedError as error:
        raise ValueError(
            f"Island(store): must have a {_keys.RUN} that is whole, got one that is {error}; put "
            "back what it was, or take another folder."
        ) from None
    theirs = run.get("model")
    if theirs != model.described:
        differs = [row for row in model.described if row not in (theirs or ())]
        raise ValueError(
            "Island(store): must be the run of this model, got that of another, which has no "
            f"{differs[0] if differs else 'so few leaves'}; take another folder."
        )
    settings = read_settings(run.get("settings"), asked.exchange)
    if mine and mine != settings:
        differ = [k for k, v in mine.as_dict().items() if settings.as_dict()[k] != v]
        raise ValueError(
            f"Island(settings): must be those of the run, {settings}, got another {differ[0]}; "
            "leave them out, or begin a run in another folder."
        )
    return settings, data


def read_run(data: bytes, owner: str) -> dict[str, Any]:
    """The contents of run.json; an error if it is of another format."""
    version = _objects.read_json(data).get("format")
    if version != _objects.FORMAT:
        raise ValueError(
            f"{owner}: must be of format {_objects.FORMAT}, got a run of format {version!r}; take "
            "the fftgrad that wrote it, or another folder."
        )
    return _objects.unpack_json(data)


def check_run(data: bytes) -> Steps[str]:
    """Return the damage of run.json, with which an island may go on; empty if there is none.

    If the store has no run.json, or that of another run, this is an error: nothing may be written
    there. Else an island would begin a new run in a folder whose disk is not mounted.
    """
    found = yield Read(_keys.RUN)
    if found == data:
        return ""
    try:
        if found is not None:
            _objects.unpack_json(found)  # before its format, which may be what is damaged
    except DamagedError as error:
        return f"{_keys.RUN} is damaged ({error}), and nobody can join; put back what it was"
    got = "none" if found is None else "that of another run"
    raise StoreError(
        f"store: must have the {_keys.RUN} of this run, got {got}; see whether its disk is "
        "mounted, and whether somebody removed it."
    )


NEW, OLD = b"new", b"old"
"""The start that has a name. The words differ in every letter, so damage is neither of them."""


class NameTakenError(ValueError):
    """Another island has the name."""

    def __init__(self, name: str, what: str = "which a living island has") -> None:
        super().__init__(
            f"Island(name): must be of one island at a time, got {name!r}, {what}; take another "
            "name."
        )


def claim_name(name: str, grace: float, nonce: bytes) -> Steps[Who]:
    """Claim a name for a new start of an island, unless a living island has it.

    An earlier start that has not left is asked, and has `grace` seconds to answer. Both then try to
    create the same object, and the first has the name. A start knows its own claim by its `nonce`.
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
        yield from release_name(who)
        raise (
            NameTakenError(name) if said == OLD else NameTakenError(name, "whose claim is damaged")
        )
    for number in alive:  # a later start need not ask them
        yield from release_name(Who(name, number))
    return who


def defend_name(who: Who, answered: set[int], check: Callable[[], Steps[object]]) -> Steps[None]:
    """Tell later starts that claim the name that it is taken; raise if one of them has it.

    If the answer to a claim is damaged, the earlier start keeps the name. `answered` collects the
    starts that have been told. `check` raises if the store is no longer that of the run.
    """
    for number in sorted((yield from _claims(who.island))):
        if number > who.incarnation and number not in answered:
            yield from check()
            if (yield from _settle(Who(who.island, number), "taken", OLD)) == NEW:
                raise NameTakenError(who.island, f"which start {number} of it took over")
            answered.add(number)


def release_name(who: Who) -> Steps[None]:
    """Tell all that a start of an island has ended."""
    yield Create(_keys.claim(who, "left"), b"")


def _settle(who: Who, what: str, said: bytes) -> Steps[bytes]:
    """Create an object of a claim; return its bytes, or those of an earlier writer."""
    return (yield from settle(_keys.claim(who, what), said))


def _claims(name: str) -> Steps[dict[int, set[str]]]:
    """The objects of each start of an island: its claim, "taken" and "left"."""
    found: dict[int, set[str]] = {}
    for key in (yield List(_keys.claims(name))):
        number, _, said = key.removeprefix(_keys.claims(name)).partition(".")
        if number.isdigit():
            found.setdefault(int(number), set()).add(said)
    return found
