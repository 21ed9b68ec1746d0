"""Residual of an island: its unsent changes, and the outcomes of its contributions."""

import dataclasses
import warnings
import zlib
from typing import Any, NamedTuple

import jax
import numpy as np

from fftgrad._values import check, check_kind
from fftgrad.islands import _objects, _round
from fftgrad.islands._model import Model, Programs, Tree, on_host
from fftgrad.islands._objects import DamagedError, Manifest, Who
from fftgrad.islands._store import Read, Steps
from fftgrad.memories import ErrorFeedback


class Residual(NamedTuple):
    """Unsent changes of an island, as arrays for any checkpoint.

    Attributes:
      after: the residual if the last contribution counts; float32 arrays by path.
      before: the residual if the last contribution is refused; float32 arrays by path.
      sent: the last contribution, decoded, which returns to the residual if it comes late. Zeros
        after the end of the round.
      round: round of the last contribution; without one, the round before the island's start.
      name: CRC-32 of the island's name, uint32.
      incarnation: number of the start under this name.
      run: CRC-32 of the bytes of run.json, uint32.

    Example:
      >>> with fg.islands.Island("memory://", "a", {"w": jnp.zeros(2)}) as island:
      ...     island.residual.after
      {'w': array([0., 0.], dtype=float32)}
    """

    after: Tree
    before: Tree
    sent: Tree
    round: Any
    name: Any
    incarnation: Any
    run: Any


def checksum(data: bytes) -> np.uint32:
    return np.uint32(zlib.crc32(data))


def refuse_other(residual: object, name: str, model: Model) -> None:
    """Refuse the residual of another island or model."""
    if residual is None:
        return
    argument, remedy = "Island(residual)", "pass the island.residual of an earlier start."
    check_kind(argument, residual, Residual, remedy)
    assert isinstance(residual, Residual)
    same = int(residual.name) == checksum(name.encode())
    check(same, argument, f"be of {name!r}", "another's", remedy)
    likes = {path: like.shape for path, like in model.likes.items()}
    found = {path: np.shape(leaf) for path, leaf in residual.after.items()}
    check(found == likes, argument, f"have {likes}", found, remedy)


def check_run(residual: Residual | None, run: bytes) -> None:
    """Refuse the residual of another run, such as an earlier run in the same store."""
    same = residual is None or int(residual.run) == checksum(run)
    check(same, "Island(residual)", "be of this run", "another's", "leave it out.")


def is_open(residual: Residual, own: Who, opened: int) -> Steps[bool]:
    """Return True if the start of the residual or a later one contributed to the round `opened`.

    If so, the residual has the change of this contribution, even if the contribution is newer.
    """
    for incarnation in range(int(residual.incarnation), own.incarnation):
        key = _objects.contribution_key(opened, Who(own.island, incarnation))
        if (yield Read(key)) is not None:
            return True
    return False


def left(residual: Residual, name: str, opened: int) -> Steps[Tree | None]:
    """Return the residual after the rounds before `opened`; None if manifests do not determine it.

    The manifests tell if the last contribution counted. If a later contribution of the island
    counted, it contains an unknown part of the residual.
    """
    own = Who(name, int(residual.incarnation))
    fate = {path: residual.after[path] + residual.sent[path] for path in residual.after}
    for number in range(max(0, int(residual.round)), opened):
        try:
            manifest = yield from _round.decision(number)
        except DamagedError as error:
            _leave_out(name, residual, str(error))
            return None
        if manifest is None:
            continue
        counted = [entry.who for entry in manifest.counted if entry.island == name]
        if number == residual.round and own in counted:
            fate = residual.after
        elif any(who.incarnation >= own.incarnation for who in counted):
            _leave_out(name, residual, f"round {number} counts it again")
            return None
        elif number == residual.round and own in [refusal.who for refusal in manifest.refused]:
            fate = residual.before
    return {path: np.asarray(leaf, np.float32) for path, leaf in fate.items()}


def _leave_out(name: str, residual: Residual, why: str) -> None:
    warnings.warn(
        f"Island(residual): must be as new as the last contribution of {name!r}, got one of round "
        f"{int(residual.round)}, but {why}. The residual is left out, because it would be sent "
        "twice; save island.residual after each round.",
        UserWarning,
        stacklevel=2,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Change:
    """Change of an island's parameters by its inner steps."""

    tree: Tree  # the parameters before the steps minus those after them
    base: int  # the round of the anchor from which the steps started
    weight: float
    loss: float | None

    @property
    def is_finite(self) -> bool:
        return all(np.isfinite(leaf).all() for leaf in self.tree.values())


class Outcome(NamedTuple):
    """Outcome of a contribution.

    Attributes:
      round: the round of the contribution.
      counted: True if the contribution is in the mean of the round.
      kept: True if the contribution came late and returned to the residual.
      reason: reason why the contribution does not count; "" if it counts.
    """

    round: int
    counted: bool
    kept: bool = False
    reason: str = ""


class Pending(NamedTuple):
    """A contribution to an open round."""

    round: int
    sent: Tree  # the decoded contribution
    memory: Any  # next state of the memory if the contribution counts
    states: Any  # next states of the codecs if the contribution counts


REFUSALS = 2
"""Number of consecutive refused contributions after which the island warns."""


class Book(NamedTuple):
    """State of a ledger, replaced as a whole, because a thread writes and the program reads."""

    kept: Any  # state of the memory before the pending contribution
    states: Any = None  # states of the codecs before the pending contribution
    pending: Pending | None = None
    taken: Change | None = None  # last change that the ledger recorded
    last: int = -1  # round of the last contribution


class Ledger:
    """Memory of an island, and the outcomes of its contributions.

    With decay 1, counted changes + `residual` = all contributed changes except refused ones.
    """

    def __init__(self, memory: ErrorFeedback, model: Model) -> None:
        self.outcomes: list[Outcome] = []
        self.memory = memory
        with on_host():
            self._book = Book(jax.device_get(memory.init(model.likes)))

    @property
    def pending(self) -> Pending | None:
        """Contribution to the open round, if any."""
        return self._book.pending

    @property
    def residual(self) -> Tree:
        """Residual, including the pending contribution, if any."""
        pending = self.pending
        if pending is None:
            return self._book.kept.residual
        return self._put_back(pending.sent, pending.memory).residual

    def saved(self, who: Who, sent: Change | None, run: bytes) -> Residual:
        """Return the residual for a checkpoint, including the change that the program sent last."""
        book = self._book
        before = after = book.kept
        nothing = {path: np.zeros(leaf.shape, np.float32) for path, leaf in before.residual.items()}
        if book.pending is not None:
            after, nothing = book.pending.memory, book.pending.sent
        if sent is not None and sent is not book.taken and sent.is_finite:
            before, after = (self._put_back(sent.tree, state) for state in (before, after))
        after, before = (
            {path: np.asarray(leaf, np.float32) for path, leaf in state.residual.items()}
            for state in (after, before)
        )
        return Residual(
            after,
            before,
            nothing,
            round=np.int64(book.last),
            name=checksum(who.island.encode()),
            incarnation=np.int64(who.incarnation),
            run=checksum(run),
        )

    def begin(self, number: int, tree: Tree | None) -> None:
        """Start when round `number` is open, with a residual, or with zeros for None."""
        kept = self._book.kept
        if tree is not None:
            dtype = jax.tree.leaves(kept.residual)[0].dtype
            kept = kept._replace(residual=jax.tree.map(lambda leaf: leaf.astype(dtype), tree))
        self._book = self._book._replace(kept=kept, last=number - 1)

    def hand_in(self, pending: Pending, change: Change) -> None:
        book = self._book
        self._book = book._replace(pending=pending, taken=change, last=pending.round)

    @property
    def trouble(self) -> str:
        """Reason of the last refusal if the last `REFUSALS` contributions were refused, else ""."""
        last = self.outcomes[-REFUSALS:]
        if len(last) < REFUSALS or any(outcome.counted or outcome.kept for outcome in last):
            return ""
        return f"the last {REFUSALS} contributions were refused: {last[-1].reason}"

    def compress(
        self, programs: Programs, change: Change, number: int, own: int
    ) -> tuple[list[bytes], Pending]:
        """Compress a change; return the bytes to send, and the pending contribution."""
        states = self._book.states or programs.init()
        payloads, sent, kept, states = programs.compress(
            self.memory, change.tree, self._book.kept, states, number, own
        )
        return programs.to_bytes(payloads), Pending(number, sent, kept, states)

    def refuse(self, change: Change, number: int, reason: str) -> None:
        """Record a change that all islands would refuse, and drop it."""
        self._book = self._book._replace(taken=change)
        self._close(Outcome(number, False, reason=reason), self._book.kept, self._book.states)

    def resolve(self, manifest: Manifest, who: Who) -> None:
        """Record the manifest's decision on the pending contribution: counted, refused or late."""
        pending, kept, states = self.pending, self._book.kept, self._book.states
        if pending is None or pending.round != manifest.round:
            return
        refused = {refusal.who: refusal.reason for refusal in manifest.refused}
        if any(entry.who == who for entry in manifest.counted):
            kept, states = pending.memory, pending.states
            outcome = Outcome(manifest.round, True)
        elif who in refused:  # a refused change does not return to the residual
            outcome = Outcome(manifest.round, False, reason=refused[who])
        else:
            kept = self._put_back(pending.sent, pending.memory)
            outcome = Outcome(manifest.round, False, kept=True, reason="late")
        self._close(outcome, kept, states)

    def forget(self, damage: str) -> None:
        """Drop the pending contribution, because it may have counted."""
        if (pending := self.pending) is not None:
            outcome = Outcome(pending.round, False, reason=damage)
            self._close(outcome, pending.memory, pending.states)

    def _close(self, outcome: Outcome, kept: Any, states: Any) -> None:
        self.outcomes.append(outcome)
        self._book = self._book._replace(kept=kept, states=states, pending=None)

    def _put_back(self, lost: Tree, kept: Any) -> Any:
        with on_host():
            return jax.device_get(self.memory.restore(lost, kept))
