"""What an island has not sent, as a checkpoint has it, and what of it a later start may send."""

import warnings
import zlib
from typing import Any, NamedTuple

import numpy as np

from fftgrad.islands import _keys, _log
from fftgrad.islands._frame import DamagedError
from fftgrad.islands._keys import Who
from fftgrad.islands._model import Model, Tree
from fftgrad.islands._requests import Read, Steps


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
