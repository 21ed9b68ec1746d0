"""The residual of an island: what it has learned and not sent. None of it is lost."""

import dataclasses
import math
import warnings
import zlib
from typing import Any, NamedTuple

import jax
import numpy as np

from fftgrad.islands import _keys, _log
from fftgrad.islands._keys import Who
from fftgrad.islands._model import Model, Programs, Tree, on_host
from fftgrad.islands._objects import DamagedError, Manifest
from fftgrad.islands._requests import Read, Steps
from fftgrad.memories._error_feedback import ErrorFeedback


class Residual(NamedTuple):
    """What an island has not sent, and whose fate is open: arrays only, for any checkpoint.

    Attributes:
      after: what its memory has if its last contribution counts, by path.
      before: what it has if that is refused.
      sent: what that stands for, which goes back into the memory if it comes too late; zeros if
        its round is closed.
      round: the last one to which the island contributed, or that before it started.
      name: checksum of the island's name, uint32.
      incarnation: which start of the island it is of.
      run: checksum of the run, uint32.

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
    """By which a residual knows whose it is, and of which run."""
    return np.uint32(zlib.crc32(data))


def check(residual: object, name: str, model: Model) -> None:
    """Refuses what is no residual of this island and model; None is none."""
    if residual is None:
        return
    remedy = "pass what island.residual was, or leave it out."
    if not isinstance(residual, Residual):
        raise TypeError(
            f"Island(residual): must be a Residual, got {type(residual).__name__}; {remedy}"
        )
    if int(residual.name) != checksum(name.encode()):
        raise ValueError(f"Island(residual): must be of {name!r}, got another's; {remedy}")
    likes = {path: like.shape for path, like in model.likes.items()}
    for part in (residual.after, residual.before, residual.sent):
        found = {path: np.shape(leaf) for path, leaf in part.items()}
        if found != likes:
            raise ValueError(f"Island(residual): must have {likes}, got {found}; {remedy}")
        if not all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in part.values()):
            raise ValueError(f"Island(residual): must be finite, got what is not; {remedy}")


def check_run(residual: Residual | None, run: bytes) -> None:
    """Refuses one of another run, such as that of a store which was emptied since."""
    if residual is not None and int(residual.run) != checksum(run):
        raise ValueError(
            "Island(residual): must be of this run, got one of another, which began anew since or "
            "is in another store; leave it out."
        )


def is_open(residual: Residual, own: Who, opened: int, most: int) -> Steps[bool]:
    """Whether the open round has a contribution of that start, or of one between it and `own`.

    It may have come after the residual was saved, which then has what that sends. Contributions
    have `most` bytes at most.
    """
    number = int(residual.round)
    if number > opened:
        raise ValueError(
            f"Island(residual): must be of this run, got one of round {number}, while round "
            f"{opened} is open; leave it out."
        )
    for incarnation in range(int(residual.incarnation), own.incarnation):
        key = _keys.contribution(opened, Who(own.island, incarnation))
        try:
            if (yield Read(key, most)) is not None:
                return True
        except DamagedError:  # there all the same, and the manifest will say so
            return True
    return False


def left(residual: Residual, name: str, opened: int) -> Steps[Tree | None]:
    """What the memory has after the rounds that are closed; None where nothing is known of it.

    The manifests say what became of the last contribution. Where they count a later one of the
    island, that has sent of what the residual has, nobody knows how much.
    """
    own = Who(name, int(residual.incarnation))
    fate = {path: residual.after[path] + residual.sent[path] for path in residual.after}
    for number in range(max(0, int(residual.round)), opened):
        found = yield from _log.decision(number)
        manifest = found.manifest
        if manifest is None:
            if found.damage and number == residual.round:  # it may have counted: it is not sent
                fate = residual.after
            elif found.damage:
                _leave_out(name, residual, f"nobody can say whom round {number} counts")
                return None
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
        f"{int(residual.round)}, and {why}; it is left out, or it would be sent twice. Save "
        "island.residual after each round.",
        UserWarning,
        stacklevel=2,
    )


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
            name=checksum(who.island.encode()),
            incarnation=np.int64(who.incarnation),
            run=checksum(run),
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
