"""How a run is going, from the manifests of its store."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fftgrad._values import check_count
from fftgrad.islands import _join, _keys, _log
from fftgrad.islands._keys import Who
from fftgrad.islands._objects import DamagedError, Entry, Manifest, Refusal
from fftgrad.islands._requests import List, Performer, Read, Steps
from fftgrad.islands._store import Store, open_store


class IslandStatus(NamedTuple):
    """An island in the last rounds.

    Attributes:
      island: its name.
      last: the last round that counted it; -1 if none of these did.
      counted: number of rounds that counted it.
      missed: number of rounds that expected it and did not get its contribution.
      refused: the reasons for which its contributions were refused.
      loss: mean loss of its inner steps, in its last contribution.
      held: norm of its residual after that contribution. If the island has died since, so much is
        lost.
    """

    island: str
    last: int
    counted: int
    missed: int
    refused: list[str]
    loss: float | None
    held: float


class RoundStatus(NamedTuple):
    """A round.

    Attributes:
      round: its number.
      counted: names of the islands that counted, in the order of the mean.
      missed: names of the islands that were expected and did not come.
      refused: the reason of each refusal, by name.
      loss: mean loss of the islands that counted, by their weights.
      waited: seconds from the hand-in of the island that closed the round to the manifest.
    """

    round: int
    counted: list[str]
    missed: list[str]
    refused: dict[str, str]
    loss: float | None
    waited: float


class Status(NamedTuple):
    """The state of a run, as its store has it.

    Attributes:
      open: the round that is open.
      came: names of the islands that have contributed to it.
      anchor: the round of the newest anchor.
      islands: the islands of the last rounds, by name.
      rounds: the last rounds.
      trouble: damage of run.json. Damage of a manifest is a refusal in its round.
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
    """Function: report which islands counted in the last rounds of a run, and which did not.

    It only reads: two listings, and a request for each round.

    Args:
      store: a URL, as for `open_store`, or the store that it returns.
      rounds: number of rounds to report.

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
    last = max(
        (_keys.number_of(key) or 0 for key in keys if key.endswith("/manifest.json")), default=-1
    )
    manifests: list[Manifest] = []
    for number in range(max(0, last + 1 - rounds), last + 1):
        try:
            manifest = yield from _log.decision(number)
        except DamagedError as error:
            said = [Refusal("?", 0, str(error))]
            manifest = Manifest(number, Who("?", 0), "", [], said, [], [], 0.0)
        manifests += [manifest] if manifest else []
    came = _keys.contributors(key for key in keys if _keys.number_of(key) == last + 1)
    names = {entry.island for m in manifests for entry in (*m.counted, *m.refused)}
    names |= {name for m in manifests for name in m.missed}
    return Status(
        open=last + 1,
        came=sorted({who.island for who in came}),
        anchor=anchor,
        islands=[_of_island(name, manifests) for name in sorted(names)],
        rounds=[_of_round(manifest) for manifest in manifests],
        trouble=trouble,
    )


def _trouble() -> Steps[str]:
    """Damage of the run's first object. It is an error if there is none."""
    try:
        data = yield Read(_keys.RUN)
        if data is None:
            raise ValueError(
                "status(store): must have a run, got a store without run.json; see its URL."
            )
        _join.read_run(data, "status(store)")
    except DamagedError as error:
        return f"{_keys.RUN} is damaged ({error})"
    return ""


def _of_island(name: str, manifests: Sequence[Manifest]) -> IslandStatus:
    own = [(m.round, e) for m in manifests for e in m.counted if e.island == name]
    last, entry = own[-1] if own else (-1, None)
    return IslandStatus(
        island=name,
        last=last,
        counted=len(own),
        missed=sum(name in manifest.missed for manifest in manifests),
        refused=[r.reason for m in manifests for r in m.refused if r.island == name],
        loss=entry.loss if entry else None,
        held=entry.held if entry else 0.0,
    )


def _of_round(manifest: Manifest) -> RoundStatus:
    return RoundStatus(
        round=manifest.round,
        counted=[entry.island for entry in manifest.counted],
        missed=manifest.missed,
        refused={refusal.island: refusal.reason for refusal in manifest.refused},
        loss=_mean_loss(manifest.counted),
        waited=manifest.waited,
    )


def _mean_loss(counted: Sequence[Entry]) -> float | None:
    told = [(entry.weight, entry.loss) for entry in counted if entry.loss is not None]
    total = math.fsum(weight for weight, _ in told)
    return math.fsum(weight * loss for weight, loss in told) / total if told else None
