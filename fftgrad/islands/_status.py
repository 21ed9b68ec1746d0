"""How a run is going, from the manifests of its store."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fftgrad._values import check_count
from fftgrad.islands import _frame, _keys, _log, _run
from fftgrad.islands._frame import DamagedError
from fftgrad.islands._keys import Who
from fftgrad.islands._log import Decision
from fftgrad.islands._manifest import Entry, Manifest, Refusal
from fftgrad.islands._perform import Performer
from fftgrad.islands._requests import List, Read, Steps
from fftgrad.islands._store import Store, open_store


class IslandStatus(NamedTuple):
    """An island in the rounds that were looked at.

    Attributes:
      island: its name.
      last: the last round in which it counted; -1 for none of these.
      lag: for how many rounds it has not counted.
      counted: in how many it counted.
      missed: in how many it was expected and did not come.
      refused: how many of its contributions were refused.
      reasons: the reason of each of them.
      loss: as it said in the last.
      norm: of what it handed in then.
      held: norm of what its memory kept then. It is what is lost if it died since.
      size: bytes of its last contribution.
      requests: that it made since it started.
      traffic: bytes both ways since it started.
    """

    island: str
    last: int
    lag: int
    counted: int
    missed: int
    refused: int
    reasons: list[str]
    loss: float | None
    norm: float
    held: float
    size: int
    requests: int
    traffic: int


class RoundStatus(NamedTuple):
    """A round.

    Attributes:
      round: its number.
      by: who wrote its manifest.
      counted: who counted, in the order of the mean.
      missed: who was expected and did not come.
      refused: who was refused, by name, and why.
      loss: the mean of the losses of those who counted, by their weights.
      size: bytes of what counted.
      waited: seconds from the hand-in of the writer of the manifest until it closed the round.
    """

    round: int
    by: str
    counted: list[str]
    missed: list[str]
    refused: dict[str, str]
    loss: float | None
    size: int
    waited: float


class Status(NamedTuple):
    """What a store says of its run.

    Attributes:
      open: the round that is open.
      came: who has contributed to it.
      anchor: the round of the newest anchor.
      islands: those that were seen in the last rounds, by name.
      rounds: the last rounds.
      trouble: what is wrong with run.json; of a damaged manifest its round says so.
    """

    open: int
    came: list[str]
    anchor: int
    islands: list[IslandStatus]
    rounds: list[RoundStatus]
    trouble: str

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return self._asdict() | {
            "islands": [one._asdict() for one in self.islands],
            "rounds": [one._asdict() for one in self.rounds],
        }


def status(store: str | Store, rounds: int = 20) -> Status:
    """Function: how a run is going: who came to its last rounds, who did not, and what it cost.

    It reads the store only, in two listings and a request for each round.

    Args:
      store: a URL, as for `open_store`, or what that returns.
      rounds: how many of the last to look at.

    Returns:
      A `Status`; its `as_dict()` is JSON.

    Raises:
      ValueError: if there is no run, or it is of another format.

    Example:
      >>> store = fg.islands.open_store("memory://")
      >>> with fg.islands.Island(store, "a", jnp.zeros(2)) as island:
      ...     fg.islands.status(store)
      Status(open=0, came=[], anchor=0, islands=[], rounds=[], trouble='')
    """
    check_count("status(rounds)", rounds, "use 20.")
    found = open_store(store, make=False) if isinstance(store, str) else store
    return Performer(found, retries=1).run(_look(rounds))


def _look(rounds: int) -> Steps[Status]:
    trouble = yield from _trouble()
    numbers = [_keys.number_of(key) for key in (yield List(_keys.ANCHORS))]
    anchor = max((number for number in numbers if number is not None), default=0)
    keys = yield List(_keys.ROUNDS, _keys.round_folder(max(0, anchor - rounds)))
    last = max((_number(key) for key in keys if _keys.is_manifest(key)), default=-1)
    manifests: list[Manifest] = []
    for number in range(max(0, last + 1 - rounds), last + 1):
        found = yield from _log.decision(number)
        manifests += _shown(number, found)
        if number == last and found.manifest is None:
            last -= 1
    came = _keys.contributors(key for key in keys if _number(key) == last + 1)
    names = sorted(
        {e.island for m in manifests for e in (*m.counted, *m.refused)}
        | {name for m in manifests for name in m.missed}
    )
    return Status(
        open=last + 1,
        came=sorted({who.island for who in came}),
        anchor=anchor,
        islands=[_of_island(name, manifests, last) for name in names],
        rounds=[_of_round(manifest) for manifest in manifests],
        trouble=trouble,
    )


def _trouble() -> Steps[str]:
    """What is wrong with the run's first object; an error where there is none."""
    try:
        data = yield Read(_keys.RUN, _frame.MOST_TEXT)
        if data is None:
            raise ValueError(
                "status(store): must have a run, got a store without run.json; see its URL."
            )
        _run.read(data, "status(store)")
    except DamagedError as error:
        return f"{_keys.RUN} is damaged ({error})"
    return ""


def _shown(number: int, found: Decision) -> list[Manifest]:
    """A manifest; what is wrong with one that is damaged as if it were a refusal."""
    manifest = found.manifest
    if found.damage:
        said = [Refusal("?", 0, found.damage)]
        manifest = manifest or Manifest(number, Who("?", 0), "", [], [], [], [], 0.0)
        manifest = manifest._replace(refused=said + manifest.refused)
    return [manifest] if manifest else []


def _number(key: str) -> int:
    found = _keys.number_of(key)
    return -1 if found is None else found


def _of_island(name: str, manifests: Sequence[Manifest], last: int) -> IslandStatus:
    own = [(m.round, e) for m in manifests for e in m.counted if e.island == name]
    refused = [r.reason for m in manifests for r in m.refused if r.island == name]
    seen, entry = own[-1] if own else (-1, None)
    requests = sum(n for key, n in entry.traffic.items() if key not in BYTES) if entry else 0
    return IslandStatus(
        island=name,
        last=seen,
        lag=last - seen,
        counted=len(own),
        missed=sum(name in manifest.missed for manifest in manifests),
        refused=len(refused),
        reasons=refused,
        loss=entry.loss if entry else None,
        norm=entry.norm if entry else 0.0,
        held=entry.held if entry else 0.0,
        size=entry.size if entry else 0,
        requests=requests,
        traffic=sum(entry.traffic.get(key, 0) for key in BYTES) if entry else 0,
    )


BYTES = ("written", "read")


def _of_round(manifest: Manifest) -> RoundStatus:
    return RoundStatus(
        round=manifest.round,
        by=manifest.by.island,
        counted=[entry.island for entry in manifest.counted],
        missed=manifest.missed,
        refused={refusal.island: refusal.reason for refusal in manifest.refused},
        loss=_mean_loss(manifest.counted),
        size=sum(entry.size for entry in manifest.counted),
        waited=manifest.waited,
    )


def _mean_loss(counted: Sequence[Entry]) -> float | None:
    told = [(entry.weight, entry.loss) for entry in counted if entry.loss is not None]
    total = math.fsum(weight for weight, _ in told)
    return math.fsum(weight * loss for weight, loss in told) / total if told else None
