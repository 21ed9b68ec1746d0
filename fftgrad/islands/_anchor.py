"""What all islands hold after a round, and its bytes in the store."""

import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fftgrad._contracts import Like, PyTree
from fftgrad.exchanges._parts import Payloads
from fftgrad.islands import _frame
from fftgrad.islands._frame import DamagedError
from fftgrad.islands._manifest import Manifest
from fftgrad.islands._model import Array, Model, Tree
from fftgrad.islands._programs import Outer, Programs, on_host
from fftgrad.islands._settings import Settings

MAGIC = b"FFTA"


class Anchor(NamedTuple):
    """What all hold before a round: a pure function of the first one, manifests, contributions."""

    round: int  # the one that is open
    params: Tree
    outer: PyTree  # the state of the outer optimizer
    expected: tuple[str, ...] | None  # whom the round waits for; None: so many as settings say
    digest: str  # of all these


def make(number: int, params: Tree, outer: PyTree, expected: Sequence[str] | None) -> Anchor:
    """The anchor of a round."""
    names = None if expected is None else tuple(expected)
    total = zlib.crc32(repr((number, names)).encode())
    for leaf in jax.tree.leaves((params, outer)):
        total = zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data, total)
    return Anchor(number, params, outer, names, f"{total:08x}")


def first(params: Tree, outer: Outer, settings: Settings) -> Anchor:
    """That of a run which begins with these parameters."""
    with on_host():
        state = jax.device_get(outer(settings.rate).init(params))
    return make(0, params, jax.tree.map(np.asarray, state), None)


def after(
    before: Anchor,
    manifest: Manifest,
    sent: Sequence[list[Payloads]],
    programs: Programs,
    outer: Outer,
    settings: Settings,
) -> Anchor:
    """What all hold after a round: the outer step on what its manifest counts, in its order."""
    state = before.params, before.outer
    if sent:
        state = programs.advance(outer, settings.rate, state, sent, manifest.shares, manifest.round)
    return make(before.round + 1, *state, manifest.expected)


def write(anchor: Anchor) -> bytes:
    """The bytes of an anchor."""
    leaves: list[Array] = jax.tree.leaves((anchor.params, anchor.outer))
    header = {
        "round": anchor.round,
        "expected": anchor.expected,
        "digest": anchor.digest,
        "leaves": [[str(leaf.dtype), list(leaf.shape)] for leaf in leaves],
    }
    return _frame.pack(MAGIC, header, [np.ascontiguousarray(leaf).tobytes() for leaf in leaves])


def most_bytes(model: Model, outer: Outer) -> int:
    """What an anchor may have for this model and outer optimizer."""
    likes, _ = _likes(model, outer)
    return _frame.most_bytes([math.prod(like.shape) * like.dtype.itemsize for like in likes])


def _likes(model: Model, outer: Outer) -> tuple[list[Like], Any]:
    """The leaves of an anchor, and how they are put together; the same at every rate."""
    return jax.tree.flatten((model.likes, jax.eval_shape(outer(1.0).init, model.likes)))


def read(data: bytes, model: Model, outer: Outer) -> Anchor:
    """The anchor again, for this model and outer optimizer; what is of others is refused."""
    likes, structure = _likes(model, outer)
    header, blobs = _frame.unpack(MAGIC, data, len(likes))
    try:
        number, expected = int(header["round"]), header["expected"]
        told, digest = header["leaves"], header["digest"]
    except (KeyError, TypeError) as error:
        raise DamagedError(f"anchor without {error}") from None
    if told != [[str(like.dtype), list(like.shape)] for like in likes]:
        raise DamagedError("anchor of other parameters, or of another outer optimizer")
    try:
        pairs = zip(blobs, likes, strict=True)
        leaves = [np.frombuffer(blob, like.dtype).reshape(like.shape) for blob, like in pairs]
    except ValueError:
        raise DamagedError("anchor of other sizes than it says") from None
    params, state = jax.tree.unflatten(structure, leaves)
    found = make(number, params, state, expected)
    if found.digest != digest:
        raise DamagedError("anchor with another digest than it says")
    return found
