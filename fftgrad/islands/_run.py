"""What islands of a run agree on: run.json with the model and the settings, and their names."""

import dataclasses
from typing import Any

from fftgrad._values import check_count, check_kind, check_within, value
from fftgrad.exchanges import AllGather
from fftgrad.islands import _keys, _objects
from fftgrad.islands._keys import Who
from fftgrad.islands._model import Model
from fftgrad.islands._objects import DamagedError
from fftgrad.islands._store import Create, List, Read, Steps, StoreError, settle
from fftgrad.optimizers._diloco import SPARSE


@value
class Settings:
    """Value: what all islands of a run agree on. The first of them writes it into the store.

    A run keeps its settings. With others, begin a run in another folder, from `island.params`.

    Args:
      exchange: the codec, or a rule, and whether vectors are cut to the median length, as in
        `fg.AllGather(codec, clip_to_median=True)`. The store has its `repr`.
      sync_every: H, the inner steps between two contributions of an island.
      rate: of the outer optimizer.
      islands: number of islands for which the first round waits.
      deadline: seconds for which an island that has handed in waits for the others, from when it
        sees that an expected island has come. Inner steps may take longer.
      stale: greatest age, in rounds, of the parameters from which a contribution starts.
      limit: greatest norm, and greatest weight, of a contribution, in medians of those that came.
      anchors: rounds between two anchors.

    Example:
      >>> fg.islands.Settings(sync_every=30, islands=3)
      Settings(sync_every=30, islands=3)
    """

    exchange: AllGather = SPARSE
    sync_every: int = 50
    rate: float = 0.7
    islands: int = 1
    deadline: float = 60.0
    stale: int = 2
    limit: float = 10.0
    anchors: int = 10

    def __post_init__(self) -> None:
        check_kind(
            "Settings(exchange)",
            self.exchange,
            AllGather,
            "use fg.AllGather(codec), which gathers.",
        )
        for name in ("sync_every", "islands", "anchors"):
            check_count(f"Settings({name})", getattr(self, name), "use 10.")
        check_count("Settings(stale)", self.stale, "use 1.", least=0)
        check_within("Settings(rate)", self.rate, "(0, inf)", "use 0.7.")
        check_within("Settings(deadline)", self.deadline, "(0, 604800]", "use 60.0.")
        check_within("Settings(limit)", self.limit, "[1, inf)", "use 10.0.")

    def as_dict(self) -> dict[str, Any]:
        """The settings for JSON, with the exchange as text."""
        names = (field.name for field in dataclasses.fields(self))
        return {name: getattr(self, name) for name in names} | {"exchange": repr(self.exchange)}


def enter_run(model: Model, settings: Settings, own: str) -> Steps[bytes]:
    """Begin or join the run of a store; return the bytes of run.json.

    A run that begins here has the id `own`, by which it differs from an earlier run of the store.
    """
    mine = settings.as_dict()
    about = {"id": own, "model": model.described, "settings": mine}
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
    if run["model"] != model.described:
        differs = [row for row in model.described if row not in run["model"]]
        raise ValueError(
            "Island(store): must be the run of this model, got that of another, which has no "
            f"{differs[0] if differs else 'so few leaves'}; take another folder."
        )
    theirs = run["settings"]
    if mine != theirs:
        raise ValueError(
            f"Island(settings): must be those of the run, {theirs}, got {mine}; pass the same, or "
            "begin a run in another folder."
        )
    return data


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


class NameTakenError(ValueError):
    """A later start has the name of an island."""

    def __init__(self, who: Who, newest: int) -> None:
        super().__init__(
            f"Island(name): must be of one island at a time, got {who.island!r}, which start "
            f"{newest} of it took over from start {who.incarnation}; take another name."
        )


def claim_name(name: str) -> Steps[Who]:
    """Begin another start of an island. The newest start has the name."""
    number = max((yield from _starts(name)), default=0) + 1
    while not (yield Create(_keys.claim(Who(name, number)), b"")):
        number += 1
    return Who(name, number)


def check_name(who: Who) -> Steps[None]:
    """Refuse to go on under a name that a later start has claimed."""
    newest = max((yield from _starts(who.island)), default=0)
    if newest > who.incarnation:
        raise NameTakenError(who, newest)


def _starts(name: str) -> Steps[list[int]]:
    """The numbers of the starts that have claimed a name."""
    keys = yield List(_keys.claims(name))
    return [int(key.removeprefix(_keys.claims(name))) for key in keys]
