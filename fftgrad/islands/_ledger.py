"""What an island has learned, handed in and not sent yet: the law that nothing of it is lost."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from fftgrad.islands._keys import Who
from fftgrad.islands._manifest import Manifest
from fftgrad.islands._model import Model, Tree
from fftgrad.islands._programs import Programs, on_host
from fftgrad.memories import ErrorFeedback


@dataclasses.dataclass(frozen=True, eq=False)
class Change:
    """What an island learned in its inner steps."""

    tree: Tree  # parameters that it started from, minus those it has
    base: int  # the round before which all held what it started from
    weight: float
    loss: float | None

    @property
    def is_finite(self) -> bool:
        """Whether it can be handed in."""
        return all(np.isfinite(leaf).all() for leaf in self.tree.values())


class Outcome(NamedTuple):
    """What became of a contribution.

    Attributes:
      round: the one that it was for.
      counted: whether it is in the mean of that round, or in none.
      kept: whether the memory has it, to be sent in a later round.
      reason: why it does not count.
    """

    round: int
    counted: bool
    kept: bool = False
    reason: str = ""


class Pending(NamedTuple):
    """A contribution whose round is not closed yet."""

    round: int
    data: bytes
    sent: Tree | None  # what it stands for; None: nothing, it only says that the island is there
    memory: Any  # that of the island, if it counts
    states: Any  # those of the codecs, if it counts


class Ledger:
    """The memory of an island, and what became of its contributions.

    With decay 1, what the manifests counted + `residual` = the changes that were handed in, but for
    those that were refused.
    """

    def __init__(self, memory: ErrorFeedback, model: Model) -> None:
        self.outcomes: list[Outcome] = []
        self.pending: Pending | None = None
        self.memory = memory
        with on_host():
            self._kept: Any = jax.device_get(memory.init(model.likes))
        self._states: Any = None

    @property
    def residual(self) -> Tree:
        """What the memory keeps, and what is handed in and may not count yet."""
        pending = self.pending  # which a thread may resolve meanwhile
        if pending is None or pending.sent is None:
            return self._kept.residual
        return self._put_back(pending.sent, pending.memory).residual

    def put_back(self, lost: Tree) -> None:
        """Takes into the memory what was not sent after all."""
        self._kept = self._put_back(lost, self._kept)

    def forget_codecs(self) -> None:
        """Starts the codecs anew, because there are others."""
        self._states = None

    def compress(
        self, programs: Programs, change: Change, number: int, own: int
    ) -> tuple[list[bytes], Pending]:
        """What to send of a change, and what will have to be kept; the bytes are the caller's."""
        states = self._states or programs.init()
        payloads, sent, kept, states = programs.compress(
            self.memory, change.tree, self._kept, states, number, own
        )
        return programs.to_bytes(payloads), Pending(number, b"", sent, kept, states)

    def nothing(self, number: int) -> Pending:
        """That nothing is handed in to a round."""
        return Pending(number, b"", None, self._kept, self._states)

    def resolve(self, manifest: Manifest, who: Who) -> None:
        """What a manifest means for what is pending."""
        pending = self.pending
        if pending is None or pending.round != manifest.round:
            return
        refused = {refusal.who: refusal.reason for refusal in manifest.refused}
        if any(entry.who == who for entry in manifest.counted):
            self._kept, self._states = pending.memory, pending.states
            outcome = Outcome(manifest.round, True)
        elif pending.sent is None or who in refused:  # as it was: what is off must not come back
            reason = refused.get(who, "late, with nothing handed in")
            outcome = Outcome(manifest.round, False, reason=reason)
        else:
            self._kept = self._put_back(pending.sent, pending.memory)
            outcome = Outcome(manifest.round, False, kept=True, reason="late")
        self.outcomes.append(outcome)
        self.pending = None

    def _put_back(self, lost: Tree, kept: Any) -> Any:
        with on_host():
            return jax.device_get(self.memory.put_back(lost, kept))


def norm(tree: Any) -> float:
    """The length of several arrays together."""
    squares = (np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(tree))
    return math.sqrt(sum(map(float, squares)))
