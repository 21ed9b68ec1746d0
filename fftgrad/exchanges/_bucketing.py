"""A gradient pytree <-> buckets of parts.

A part is compressed on its own; the parts of a bucket travel together.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from fftgrad._contracts import Exchange, Like, PyTree, Scope
from fftgrad._values import value
from fftgrad.ops import _shapes
from fftgrad.ops._shapes import by_path

BUCKET_LIMIT = 2**30
"""Most values in a bucket: positions are int32, and a transform of it is 4 GiB, cuFFT's limit."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["name", "piece"]
)
@dataclasses.dataclass(frozen=True)
class Part:
    """What is compressed on its own: a group of leaves, or a piece of one that is too long.

    Attributes:
      name: of the group: "model", a leaf's path, or what the scope calls it.
      value: its float32 array. A single leaf keeps its shape; several are one vector.
      piece: the number of the piece, where the group is cut.
    """

    name: str
    value: Any
    piece: int = 0


Bucket: TypeAlias = tuple[Part, ...]
"""Parts that travel together, in the order of their names."""

Join: TypeAlias = Callable[[list[Bucket]], PyTree]
"""The tree, of float32 leaves, of what came of its buckets."""


class Member(NamedTuple):
    """A leaf of a group: its position among all leaves, its path, and itself."""

    number: int
    path: str
    leaf: Any


@value
class Bucketing:
    """Function: how a gradient is laid out for the exchange: what forms a part, and a bucket.

    `compressed_pmean` and `wire_bytes` take the same value, and then speak of the same parts.

    Args:
      scope: what is compressed on its own: "model", all leaves as one vector; "leaf", each leaf, in
        its shape; or a function from a leaf's path ("layers/0/w") and shape to the name of its
        group. None: what the exchange is made for: the scope of its rule, "leaf" for
        `PowerSgd` and `AcpSgd`, else "model".
      bucket_bytes: the most float32 bytes of gradient that travel at once. Buckets are then filled
        from the last leaf to the first, in the order in which a backward pass finds their
        gradients, and each waits for the one before it, but for no leaf that comes later: a
        compiler with asynchronous collectives may send one while the rest of the pass runs.
        Selectors choose, and quantizers scale, within a bucket. A leaf that is a part on its own
        keeps its shape, and travels alone if it has more bytes; other parts are cut into vectors,
        and so is a leaf of more than 2^30 values. None: one bucket for every 2^30 parameters.

    Raises:
      ValueError: if an argument is none of these.
      TypeError: if `bucket_bytes` is no int; while tracing, if the function returns no name.

    Example:
      >>> params = {"w": jnp.ones((100, 100)), "b": jnp.ones(100)}
      >>> fg.wire_bytes(fg.AllGather(fg.Sign()), params, fg.Bucketing("leaf"))
      1280
    """

    scope: Scope | None = None
    bucket_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.scope not in ("model", "leaf", None) and not callable(self.scope):
            raise ValueError(
                f"Bucketing(scope): must be 'model', 'leaf' or a function from a leaf's path and "
                f"shape to the name of its group, got {self.scope!r}; use 'model' to choose over "
                "all leaves."
            )
        if self.bucket_bytes is not None and not isinstance(self.bucket_bytes, int):
            raise TypeError(
                f"Bucketing(bucket_bytes): must be an int, got {self.bucket_bytes!r}; use "
                "25_000_000."
            )
        if self.bucket_bytes is not None and self.bucket_bytes < 4:
            raise ValueError(
                f"Bucketing(bucket_bytes): must be at least 4, the size of a value, got "
                f"{self.bucket_bytes}; use 25_000_000, or None for one bucket."
            )

    def for_exchange(self, exchange: Exchange) -> "Bucketing":
        """The bucketing with its scope filled in, if it leaves that to the exchange."""
        # Not asked where the bucketing says it: exchanges of an exchange may disagree.
        return self if self.scope else dataclasses.replace(self, scope=exchange.scope or "model")

    @property
    def limit(self) -> int:
        """Most values in a bucket."""
        return min((self.bucket_bytes or 4 * BUCKET_LIMIT) // 4, BUCKET_LIMIT)


def check_leaf(owner: str, name: str, leaf: Any) -> None:
    """Refuses what is no gradient: what float32 cannot hold, and what can hardly hold a mean."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(
            f"{owner}({name}): must be a float32, bfloat16 or float16 array, got "
            f"{type(leaf).__name__ if dtype is None else dtype}; cast it, or keep it out of what "
            "is differentiated."
        )


def check_tree(owner: str, name: str, tree: PyTree) -> None:
    """Refuses a tree of which a leaf is no gradient."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        check_leaf(owner, f"{name}{jax.tree_util.keystr(path)}", leaf)


def like(tree: PyTree) -> PyTree:
    """The tree as the exchange sees it: the same shapes, in float32."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), tree)


def bucket_likes(tree: PyTree, bucketing: Bucketing) -> list[Bucket]:
    """The shapes of the buckets of a tree of this shape."""
    return jax.eval_shape(lambda tree: to_buckets(tree, bucketing)[0], like(tree))


def wire_bytes(exchange: Exchange, tree: PyTree, bucketing: Bucketing) -> int:
    """Bytes that one worker hands to the collectives for a tree of this shape."""
    buckets = bucket_likes(tree, bucketing.for_exchange(exchange))
    return sum(map(exchange.wire_bytes, buckets))


def link_bytes(exchange: Exchange, tree: PyTree, workers: int, bucketing: Bucketing) -> float:
    """Bytes that each of so many workers, in a ring, sends over its link for such a tree."""
    buckets = bucket_likes(tree, bucketing.for_exchange(exchange))
    return sum(exchange.link_bytes(bucket, workers) for bucket in buckets)


def to_buckets(tree: PyTree, bucketing: Bucketing) -> tuple[list[Bucket], Join]:
    """The parts of a tree, in float32, in as many buckets as the limit of each one's size needs.

    The second result makes a tree of such buckets again, of float32 leaves.
    """
    buckets: list[list[Part]] = []
    room = 0
    by_name = groups(tree, bucketing)
    for name, members in by_name.items():
        for part in _pieces(name, [member.leaf for member in members], bucketing):
            if part.value.size > room:
                buckets.append([])
                room = bucketing.limit
            buckets[-1].append(part)
            room -= part.value.size
    # No two pieces of a part fit into one.
    travel = [tuple(sorted(bucket, key=lambda part: part.name)) for bucket in buckets]
    return travel, functools.partial(_join, by_name, jax.tree.structure(tree))


def _join(by_name: dict[str, list[Member]], structure: Any, buckets: list[Bucket]) -> PyTree:
    pieces: dict[str, list[Part]] = {}
    for part in (part for bucket in buckets for part in bucket):
        pieces.setdefault(part.name, []).append(part)
    out: list[Any] = [None] * structure.num_leaves
    for name, members in by_name.items():
        own = sorted(pieces.get(name, []), key=lambda part: part.piece)
        vectors = [part.value.ravel() for part in own]
        leaves = _uncut(vectors, [member.leaf for member in members])
        for member, leaf in zip(members, leaves, strict=True):
            out[member.number] = leaf
    return jax.tree.unflatten(structure, out)


def groups(tree: PyTree, bucketing: Bucketing) -> dict[str, list[Member]]:
    """The leaves of each part, by its name, in the order of first appearance."""
    out: dict[str, list[Member]] = {}
    members = [Member(i, path, leaf) for i, (path, leaf) in enumerate(by_path(tree).items())]
    # A backward pass finds the gradients of the last leaves first.
    for member in members if bucketing.bucket_bytes is None else reversed(members):
        name = bucketing.scope or "model"
        if not isinstance(name, str):
            name = _name_by(name, member)
        elif name == "leaf":
            name = member.path
        out.setdefault(name, []).append(member)
    return out


def _name_by(scope: Callable[[str, Like], str], member: Member) -> str:
    name: object = scope(member.path, member.leaf)
    if not isinstance(name, str):
        raise TypeError(
            f"Bucketing(scope): must return the name of a group, a str, got {name!r} for leaf "
            f"{member.path!r}; return str(...), or use 'leaf' for a group of each."
        )
    return name


def _pieces(name: str, leaves: list[jax.Array], bucketing: Bucketing) -> list[Part]:
    total = sum(leaf.size for leaf in leaves)
    if total == 0:
        return []
    one_vector = bucketing.scope in ("model", None)
    # A leaf that was asked for on its own has a codec, or factors, for its shape.
    limit = BUCKET_LIMIT if len(leaves) == 1 and not one_vector else bucketing.limit
    if len(leaves) == 1 and total <= limit:
        return [Part(name, leaves[0].astype(jnp.float32))]
    # Pieces of equal length, but for the last.
    vectors = _cut(leaves, -(-total // -(-total // limit)))
    return [Part(name, vector, piece) for piece, vector in enumerate(vectors)]


def _cut(leaves: list[jax.Array], size: int) -> list[jax.Array]:
    """The leaves one after the other, as vectors of `size`, but for the last."""
    pieces: list[list[jax.Array]] = [[]]
    room = size
    for leaf in leaves:
        flat = jnp.ravel(leaf).astype(jnp.float32)
        while flat.size:
            part, flat = flat[:room], flat[room:]
            pieces[-1].append(part)
            room -= part.size
            if not room:
                room = size
                pieces.append([])
    return [jnp.concatenate(parts) for parts in pieces if parts]


def _uncut(vectors: list[jax.Array], likes: list[Like]) -> list[jax.Array]:
    """The leaves that `_cut` made into `vectors`."""
    number, room = 0, vectors[0].size if vectors else 0
    sizes: list[list[int]] = [[] for _ in vectors]
    counts: list[int] = []  # of the pieces of each leaf
    for like in likes:
        missing = math.prod(like.shape)
        counts.append(0)
        while missing:
            if not room:
                number += 1
                room = vectors[number].size
            sizes[number].append(min(room, missing))
            counts[-1] += 1
            missing -= sizes[number][-1]
            room -= sizes[number][-1]
    pieces = (p for v, own in zip(vectors, sizes, strict=True) for p in _shapes.cut(v, own))
    leaves = [list(itertools.islice(pieces, count)) for count in counts]
    joined = [jnp.concatenate(own) if own else jnp.zeros((0,), jnp.float32) for own in leaves]
    return [leaf.reshape(like.shape) for leaf, like in zip(joined, likes, strict=True)]
