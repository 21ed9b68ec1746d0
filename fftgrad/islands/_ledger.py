"""What an island has learned, handed in and not sent yet: the law that nothing of it is lost."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from fftgrad.islands import _residual
from fftgrad.islands._keys import Who
from fftgrad.islands._manifest import Manifest
from fftgrad.islands._model import Model, Tree
from fftgrad.islands._programs import Programs, on_host
from fftgrad.islands._residual import Residual
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
    sent: Tree | None  # what it stands for; None: nothing, it only says that the island is there
    memory: Any  # that of the island, if it counts
    states: Any  # those of the codecs, if it counts


REFUSALS = 2
"""Contributions in a row whose refusal is told."""


class Book(NamedTuple):
    """What a ledger has at one moment: a thread writes, and a program may read at any."""

    kept: Any  # the state of the memory, without what is pending
    states: Any = None  # of the codecs
    pending: Pending | None = None
    taken: Change | None = None  # the last change that is in it
    last: int = -1  # the round of the last contribution


class Ledger:
    """The memory of an island, and what became of its contributions.

    With decay 1, what the manifests counted + `residual` = the changes that were handed in, but for
    those that were refused.
    """

    def __init__(self, memory: ErrorFeedback, model: Model) -> None:
        self.outcomes: list[Outcome] = []
        self.memory = memory
        with on_host():
            self._book = Book(jax.device_get(memory.init(model.likes)))

    @property
    def pending(self) -> Pending | None:
        """The contribution whose round is not closed yet."""
        return self._book.pending

    @property
    def residual(self) -> Tree:
        """What the memory keeps, and what is handed in and may not count yet."""
        book = self._book
        pending = book.pending
        if pending is None or pending.sent is None:
            return book.kept.residual
        return self._put_back(pending.sent, pending.memory).residual

    def saved(self, who: Who, sent: Change | None, run: bytes) -> Residual:
        """What a checkpoint has to have, with the last change that was sent to be handed in."""
        book = self._book
        before = after = book.kept
        nothing = {path: np.zeros(leaf.shape, np.float32) for path, leaf in before.residual.items()}
        open_ = book.pending
        if open_ is not None and open_.sent is not None:
            after, nothing = open_.memory, open_.sent
        if sent is not None and sent is not book.taken and sent.is_finite:
            before, after = (self._put_back(sent.tree, state) for state in (before, after))
        wide = [
            {path: np.asarray(leaf, np.float32) for path, leaf in tree.items()}
            for tree in (after.residual, before.residual)
        ]
        return Residual(
            wide[0],
            wide[1],
            nothing,
            round=np.int64(book.last),
            name=_residual.checksum(who.island.encode()),
            incarnation=np.int64(who.incarnation),
            run=_residual.checksum(run),
        )

    def begin(self, number: int, tree: Tree | None) -> None:
        """What the memory has before the first contribution, to a round or later."""
        kept = self._book.kept
        if tree is not None:
            dtype = jax.tree.leaves(kept.residual)[0].dtype
            kept = kept._replace(residual=jax.tree.map(lambda leaf: leaf.astype(dtype), tree))
        self._book = self._book._replace(kept=kept, last=number - 1)

    def hand_in(self, pending: Pending, change: Change) -> None:
        """Takes a change, which is pending from then on."""
        book = self._book
        self._book = book._replace(pending=pending, taken=change, last=pending.round)

    @property
    def trouble(self) -> str:
        """What is said where the last contributions were refused; empty else."""
        last = self.outcomes[-REFUSALS:]
        if len(last) < REFUSALS or any(outcome.counted or outcome.kept for outcome in last):
            return ""
        return f"the last {REFUSALS} contributions were refused: {last[-1].reason}"

    def compress(
        self, programs: Programs, change: Change, number: int, own: int
    ) -> tuple[list[bytes], Pending]:
        """What to send of a change, and what will have to be kept; the bytes are the caller's."""
        states = self._book.states or programs.init()
        payloads, sent, kept, states = programs.compress(
            self.memory, change.tree, self._book.kept, states, number, own
        )
        return programs.to_bytes(payloads), Pending(number, sent, kept, states)

    def nothing(self, number: int) -> Pending:
        """That nothing is handed in to a round."""
        return Pending(number, None, self._book.kept, self._book.states)

    def resolve(self, manifest: Manifest, who: Who) -> None:
        """What a manifest means for what is pending."""
        pending, kept, states = self.pending, self._book.kept, self._book.states
        if pending is None or pending.round != manifest.round:
            return
        refused = {refusal.who: refusal.reason for refusal in manifest.refused}
        if any(entry.who == who for entry in manifest.counted):
            kept, states = pending.memory, pending.states
            outcome = Outcome(manifest.round, True)
        elif pending.sent is None or who in refused:  # as it was: what is off must not come back
            reason = refused.get(who, "late, with nothing handed in")
            outcome = Outcome(manifest.round, False, reason=reason)
        else:
            kept = self._put_back(pending.sent, pending.memory)
            outcome = Outcome(manifest.round, False, kept=True, reason="late")
        self._close(outcome, kept, states)

    def forget(self, damage: str) -> None:
        """Ends what is pending where nobody can say whether it counted: it is not sent twice."""
        if (pending := self.pending) is not None:
            outcome = Outcome(pending.round, False, reason=damage)
            self._close(outcome, pending.memory, pending.states)

    def _close(self, outcome: Outcome, kept: Any, states: Any) -> None:
        self.outcomes.append(outcome)
        self._book = self._book._replace(kept=kept, states=states, pending=None)

    def _put_back(self, lost: Tree, kept: Any) -> Any:
        with on_host():
            return jax.device_get(self.memory.put_back(lost, kept))


def norm(tree: Any) -> float:
    """The length of several arrays together."""
    squares = (np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(tree))
    return math.sqrt(sum(map(float, squares)))
