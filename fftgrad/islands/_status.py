"""Status of a run, from the manifests in its store."""

import math
from typing import NamedTuple

from fftgrad._values import check
from fftgrad.islands import _objects, _round
from fftgrad.islands._objects import DamagedError, Manifest
from fftgrad.islands._store import List, Performer, Read, Steps, Store, open_store


class RoundStatus(NamedTuple):
    """Status of a closed round.

    Attributes:
      round: the number of the round.
      counted: names of the islands whose contributions counted, in the order of the sum.
      missed: names of the expected islands that did not contribute.
      refused: reason for each refusal, by island. Under "?", the damage of the manifest.
      loss: weighted mean of the losses that counted islands reported; None without losses.
      waited: seconds from the contribution of the island that closed the round to the manifest.
    """

    round: int
    counted: list[str]
    missed: list[str]
    refused: dict[str, str]
    loss: float | None
    waited: float


class Status(NamedTuple):
    """Status of a run.

    Attributes:
      open: number of the open round.
      came: names of the islands that have contributed to the open round.
      anchor: round of the newest anchor.
      rounds: the last closed rounds.
    """

    open: int
    came: list[str]
    anchor: int
    rounds: list[RoundStatus]


def status(store: str | Store, rounds: int = 20) -> Status:
    """Function: report which islands counted in the last rounds of a run, without writing.

    This takes two list requests, and a read request for each round.

    Args:
      store: a URL, as for `open_store`, or the store that `open_store` returns.
      rounds: number of rounds to report.

    Raises:
      ValueError: if the store has no run.

    Example:
      >>> store = fg.islands.open_store("memory://")
      >>> with fg.islands.Island(store, "a", jnp.zeros(2)) as island:
      ...     fg.islands.status(store)
      Status(open=0, came=[], anchor=0, rounds=[])
    """
    found = open_store(store, make=False) if isinstance(store, str) else store
    return Performer(found, retries=1).run(_look(rounds))


def _look(rounds: int) -> Steps[Status]:
    fine = (yield Read(_objects.RUN)) is not None
    check(fine, "status(store)", "have a run", f"no {_objects.RUN}", "check the URL.")
    anchor = max((yield from _round.anchor_numbers()), default=0)
    keys = yield List(_objects.ROUNDS, _objects.round_folder(max(0, anchor - rounds)))
    closed = [_objects.number_of(key) for key in keys if key.endswith("/manifest.json")]
    last = max((number for number in closed if number is not None), default=-1)
    found: list[RoundStatus] = []
    for number in range(max(0, last + 1 - rounds), last + 1):
        try:
            manifest = yield from _round.decision(number)
        except DamagedError as error:
            found.append(RoundStatus(number, [], [], {"?": str(error)}, None, 0.0))
        else:
            found += [_of_round(manifest)] if manifest else []
    came = _objects.contributors(key for key in keys if _objects.number_of(key) == last + 1)
    return Status(last + 1, sorted({who.island for who in came}), anchor, found)


def _of_round(manifest: Manifest) -> RoundStatus:
    told = [(entry.weight, entry.loss) for entry in manifest.counted if entry.loss is not None]
    total = math.fsum(weight for weight, _ in told)
    return RoundStatus(
        round=manifest.round,
        counted=[entry.island for entry in manifest.counted],
        missed=manifest.missed,
        refused={refusal.island: refusal.reason for refusal in manifest.refused},
        loss=math.fsum(weight * loss for weight, loss in told) / total if told else None,
        waited=manifest.waited,
    )
