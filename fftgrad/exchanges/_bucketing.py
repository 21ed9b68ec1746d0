"""Layout: converts between a gradient pytree and buckets of parts."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad._contracts import Exchange, PyTree, Scope
from fftgrad._values import check, check_count, check_type, value
from fftgrad.ops import _shapes
from fftgrad.ops._shapes import by_path

BUCKET_LIMIT = 2**30
"""Largest number of values in a bucket: positions are int32, and cuFFT takes at most 4 GiB."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["name"])
@dataclasses.dataclass(frozen=True)
class Part:
    """Vector that is compressed on its own: a leaf, a group of leaves, or a piece of these."""

    name: str  # "model", a leaf's path, or a name that the scope returned
    value: Any  # float32 array; a single leaf keeps its shape, several leaves become one vector


Bucket: TypeAlias = tuple[Part, ...]
"""Parts whose payloads travel in one buffer, ordered by name."""

Join: TypeAlias = Callable[[list[Bucket]], PyTree]
"""Function from transformed buckets back to a tree of float32 leaves."""


@value
class Bucketing:
    """Function: layout of a gradient: which leaves form a part, and which parts form a bucket.

    Pass the same value to `compressed_pmean` and `wire_bytes`.

    Args:
      scope: rule for parts: "model", all leaves as one vector; "leaf", each leaf, in its shape; or
        a function from a leaf's path ("layers/0/w") and shape to the name of its part. With None,
        the exchange decides: "leaf" for `PowerSgd`, `AcpSgd`, and a function in place of a codec,
        else "model".
      bucket_bytes: largest size of a bucket, in bytes of the float32 gradient. Buckets are filled
        from the last leaf to the first, because a backward pass computes gradients in this order. A
        bucket waits only for the bucket before it. So a compiler with asynchronous collectives can
        overlap exchange and backward pass. A part that does not fit is cut into vectors that are
        compressed separately. There is one exception: with a scope other than "model", a single
        leaf that does not fit gets a bucket of its own and keeps its shape, up to 2^30 values.
        25_000_000 is a good start. None: a bucket for every 2^30 parameters.

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
        """Return this bucketing, with the scope of the exchange if it has no scope."""
        # With an explicit scope, do not read `exchange.scope`: it raises if inner scopes differ.
        return self if self.scope else dataclasses.replace(self, scope=exchange.scope or "model")

    @property
    def limit(self) -> int:
        """Largest number of values in a bucket."""
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
    for path, leaf in jax.tree.leaves_with_path(tree):
        check_leaf(owner, f"{name}{jax.tree_util.keystr(path)}", leaf)


def like(tree: PyTree) -> PyTree:
    """Return the shapes of the tree in float32, the dtype of an exchange."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), tree)


def bucket_likes(tree: PyTree, bucketing: Bucketing) -> list[Bucket]:
    return jax.eval_shape(lambda tree: to_buckets(tree, bucketing)[0], like(tree))


def to_buckets(tree: PyTree, bucketing: Bucketing) -> tuple[list[Bucket], Join]:
    """Cut a tree into float32 parts in buckets of limited size; also return the inverse."""
    buckets: list[list[Part]] = []
    room = 0
    leaves, structure = jax.tree.flatten(tree)
    groups = _groups(tree, bucketing)
    for name, numbers in groups.items():
        for part in _pieces(name, [leaves[i] for i in numbers], bucketing):
            if part.value.size > room:
                buckets.append([])
                room = bucketing.limit
            buckets[-1].append(part)
            room -= part.value.size

    def join(buckets: list[Bucket]) -> PyTree:
        pieces: dict[str, list[jax.Array]] = {}  # of each part, in the order of the buckets
        for part in itertools.chain(*buckets):
            pieces.setdefault(part.name, []).append(part.value.ravel())
        out: list[Any] = [None] * len(leaves)
        for name, numbers in groups.items():
            sizes = [leaves[i].size for i in numbers]
            for i, flat in zip(numbers, _recut(pieces.get(name, []), sizes), strict=True):
                out[i] = flat.reshape(leaves[i].shape)
        return jax.tree.unflatten(structure, out)

    # No two parts in a bucket have the same name: pieces of a part are in different buckets.
    return [tuple(sorted(bucket, key=lambda part: part.name)) for bucket in buckets], join


def _groups(tree: PyTree, bucketing: Bucketing) -> dict[str, list[int]]:
    """Group the numbers of the leaves by part name, in order of first appearance."""
    groups: dict[str, list[int]] = {}
    members = list(enumerate(by_path(tree).items()))
    # A backward pass computes the gradients of the last leaves first.
    for i, (path, leaf) in members if bucketing.bucket_bytes is None else reversed(members):
        name: Any = bucketing.scope or "model"
        if callable(name):
            name = name(path, leaf)
            rule, remedy = f"return a str for leaf {path!r}", "return str(...), or use 'leaf'."
            check_type(isinstance(name, str), "Bucketing(scope)", rule, name, remedy)
        elif name == "leaf":
            name = path
        groups.setdefault(name, []).append(i)
    return groups


def _pieces(name: str, leaves: list[jax.Array], bucketing: Bucketing) -> list[Part]:
    total = sum(leaf.size for leaf in leaves)
    if total == 0:
        return []
    one_vector = bucketing.scope in ("model", None)
    # A part that is a single leaf keeps its shape, because rules and low-rank factors use it.
    limit = BUCKET_LIMIT if len(leaves) == 1 and not one_vector else bucketing.limit
    if len(leaves) == 1 and total <= limit:
        return [Part(name, leaves[0].astype(jnp.float32))]
    size = -(-total // -(-total // limit))  # All pieces but the last have equal length.
    sizes = [min(size, total - start) for start in range(0, total, size)]
    flat = [jnp.ravel(leaf).astype(jnp.float32) for leaf in leaves]
    return [Part(name, vector) for vector in _recut(flat, sizes, lax.split)]


def _recut(
    vectors: list[jax.Array], sizes: list[int], cut: Callable[..., Any] = _shapes.cut
) -> list[jax.Array]:
    """Cut consecutive vectors into pieces of these sizes, which may span several vectors."""
    own = [vector.size for vector in vectors]
    ends = sorted({0, *itertools.accumulate(own), *itertools.accumulate(sizes)})
    lengths = [stop - start for start, stop in itertools.pairwise(ends)]
    rows = zip(vectors, _runs(lengths, own), strict=True)
    pieces = itertools.chain(*(cut(vector, run) for vector, run in rows if run))
    groups = [list(itertools.islice(pieces, len(run))) for run in _runs(lengths, sizes)]
    return [jnp.concatenate(group) if group else jnp.zeros((0,), jnp.float32) for group in groups]


def _runs(lengths: list[int], sums: list[int]) -> list[list[int]]:
    """Group lengths into consecutive runs with these sums."""
    rest, runs = iter(lengths), []
    for missing in sums:
        runs.append([])
        while missing:
            runs[-1].append(next(rest))
            missing -= runs[-1][-1]
    return runs
