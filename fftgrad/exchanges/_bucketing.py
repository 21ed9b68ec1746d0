"""Layout: converts between a gradient pytree and buckets of parts.

A part is compressed on its own. The parts of a bucket travel together.
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
from fftgrad._values import check, check_count, check_type, value
from fftgrad.ops import _shapes
from fftgrad.ops._shapes import by_path

BUCKET_LIMIT = 2**30
"""Most values in a bucket: positions are int32, and cuFFT's limit is 4 GiB per transform."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["name"])
@dataclasses.dataclass(frozen=True)
class Part:
    """Vector that is compressed on its own: a group of leaves, or a piece of a long one.

    Attributes:
      name: name of the group: "model", a leaf's path, or a name returned by the scope.
      value: float32 array. A single leaf keeps its shape; several leaves become one vector.
    """

    name: str
    value: Any


Bucket: TypeAlias = tuple[Part, ...]
"""Parts that travel together, ordered by name."""

Join: TypeAlias = Callable[[list[Bucket]], PyTree]
"""Function from transformed buckets back to a tree of float32 leaves."""


class Member(NamedTuple):
    """A leaf of a group: its position among all leaves, its path, and its array."""

    number: int
    path: str
    leaf: Any


@value
class Bucketing:
    """Function: layout of a gradient, which leaves form a part and which parts a bucket.

    Pass the same value to `compressed_pmean` and `wire_bytes`.

    Args:
      scope: rule for parts: "model", all leaves as one vector; "leaf", each leaf, in its shape; or
        a function from a leaf's path ("layers/0/w") and shape to the name of its group. None: the
        scope of the exchange: that of its rule, "leaf" for `PowerSgd` and `AcpSgd`, else "model".
      bucket_bytes: most float32 bytes of gradient in a bucket. Buckets are filled from the last
        leaf to the first, the order in which a backward pass computes gradients. Each bucket waits
        only for the one before it. So a compiler with asynchronous collectives can overlap them
        with the backward pass. Selectors choose, and quantizers scale, within a bucket. A leaf that
        is a part on its own keeps its shape, and travels alone if it has more bytes. Other parts,
        and leaves of more than 2^30 values, are cut into vectors. None: a bucket per 2^30
        parameters.

    Raises:
      ValueError: if an argument is out of range.
      TypeError: if `bucket_bytes` is no int; while tracing, if the function returns no name.

    Example:
      >>> params = {"w": jnp.ones((100, 100)), "b": jnp.ones(100)}
      >>> fg.wire_bytes(fg.AllGather(fg.Sign()), params, fg.Bucketing("leaf"))
      1280
    """

    scope: Scope | None = None
    bucket_bytes: int | None = None

    def __post_init__(self) -> None:
        known = self.scope in ("model", "leaf", None) or callable(self.scope)
        rule = "be 'model', 'leaf' or a function from a leaf's path and shape to a name"
        check(known, "Bucketing(scope)", rule, repr(self.scope), "use 'model' for one vector.")
        if self.bucket_bytes is not None:
            check_count("Bucketing(bucket_bytes)", self.bucket_bytes, "use 25_000_000.", least=4)

    def for_exchange(self, exchange: Exchange) -> "Bucketing":
        """Return the bucketing with the scope of the exchange, if it has none."""
        # An explicit scope wins, because the exchanges within an exchange may disagree.
        return self if self.scope else dataclasses.replace(self, scope=exchange.scope or "model")

    @property
    def limit(self) -> int:
        """Most values in a bucket."""
        return min((self.bucket_bytes or 4 * BUCKET_LIMIT) // 4, BUCKET_LIMIT)


def check_leaf(owner: str, name: str, leaf: Any) -> None:
    """Require a float array, because a mean of integers or of complex values is not supported."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        got = type(leaf).__name__ if dtype is None else dtype
        raise TypeError(
            f"{owner}({name}): must be a float32, bfloat16 or float16 array, got {got}; cast it, "
            "or keep it out of what is differentiated."
        )


def check_tree(owner: str, name: str, tree: PyTree) -> None:
    """Apply `check_leaf` to all leaves of a tree."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        check_leaf(owner, f"{name}{jax.tree_util.keystr(path)}", leaf)


def like(tree: PyTree) -> PyTree:
    """Return the shapes of the tree in float32, as an exchange sees them."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), tree)


def bucket_likes(tree: PyTree, bucketing: Bucketing) -> list[Bucket]:
    """Return the shapes of the buckets of a tree."""
    return jax.eval_shape(lambda tree: to_buckets(tree, bucketing)[0], like(tree))


def wire_bytes(exchange: Exchange, tree: PyTree, bucketing: Bucketing) -> int:
    """Return the bytes that one worker hands to the collectives for a tree of this shape."""
    buckets = bucket_likes(tree, bucketing.for_exchange(exchange))
    return sum(map(exchange.wire_bytes, buckets))


def link_bytes(exchange: Exchange, tree: PyTree, workers: int, bucketing: Bucketing) -> float:
    """Return the bytes that each of `workers` workers in a ring sends over its link."""
    buckets = bucket_likes(tree, bucketing.for_exchange(exchange))
    return sum(exchange.link_bytes(bucket, workers) for bucket in buckets)


def to_buckets(tree: PyTree, bucketing: Bucketing) -> tuple[list[Bucket], Join]:
    """Cut a tree into float32 parts in buckets of limited size, and return the inverse too.

    The inverse makes a tree of float32 leaves.
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
    # A bucket holds at most one piece of a part, because two exceed its limit.
    travel = [tuple(sorted(bucket, key=lambda part: part.name)) for bucket in buckets]
    return travel, functools.partial(_join, by_name, jax.tree.structure(tree))


def _join(by_name: dict[str, list[Member]], structure: Any, buckets: list[Bucket]) -> PyTree:
    pieces: dict[str, list[jax.Array]] = {}  # of each part, in the order of the buckets
    for part in itertools.chain(*buckets):
        pieces.setdefault(part.name, []).append(part.value.ravel())
    out: list[Any] = [None] * structure.num_leaves
    for name, members in by_name.items():
        leaves = _uncut(pieces.get(name, []), [member.leaf for member in members])
        for member, leaf in zip(members, leaves, strict=True):
            out[member.number] = leaf
    return jax.tree.unflatten(structure, out)


def groups(tree: PyTree, bucketing: Bucketing) -> dict[str, list[Member]]:
    """Group the leaves by part name, in order of first appearance."""
    out: dict[str, list[Member]] = {}
    members = [Member(i, path, leaf) for i, (path, leaf) in enumerate(by_path(tree).items())]
    # A backward pass computes the gradients of the last leaves first.
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
    rule, remedy = f"return a str for leaf {member.path!r}", "return str(...), or use 'leaf'."
    check_type(isinstance(name, str), "Bucketing(scope)", rule, name, remedy)
    return name


def _pieces(name: str, leaves: list[jax.Array], bucketing: Bucketing) -> list[Part]:
    total = sum(leaf.size for leaf in leaves)
    if total == 0:
        return []
    one_vector = bucketing.scope in ("model", None)
    # A leaf with a part of its own keeps its shape, which its codec or its factors need.
    limit = BUCKET_LIMIT if len(leaves) == 1 and not one_vector else bucketing.limit
    if len(leaves) == 1 and total <= limit:
        return [Part(name, leaves[0].astype(jnp.float32))]
    # All pieces but the last have equal length.
    return [Part(name, vector) for vector in _cut(leaves, -(-total // -(-total // limit)))]


def _cut(leaves: list[jax.Array], size: int) -> list[jax.Array]:
    """Concatenate the leaves and cut them into vectors of `size`; the last may be shorter."""
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
    """Invert `_cut`."""
    number, room = 0, vectors[0].size if vectors else 0
    sizes: list[list[int]] = [[] for _ in vectors]
    counts: list[int] = []  # pieces of each leaf
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
