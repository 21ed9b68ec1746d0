"""Parts of a bucket, and `Parts`: one codec for the tuple of their vectors."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fftgrad._contracts import (
    Codec,
    Exchange,
    Like,
    Payload,
    PyTree,
    Scope,
    Selector,
    Sparse,
    Step,
)
from fftgrad._values import check_kind, value
from fftgrad.codecs import _chain, _sum
from fftgrad.codecs._transforms import Identity
from fftgrad.exchanges._bucketing import Part
from fftgrad.ops import _count, _platform, _random, _shapes
from fftgrad.ops._shapes import spec

Codecs: TypeAlias = Codec | Callable[[str, Like], Codec]
"""One codec for all parts, or a rule: a function from the name and shape of a part to its codec.

With a rule, each leaf is a part, unless a `Bucketing` has another scope.
"""


@value
class DenseByName:
    """Function: rule that sends a leaf dense if its path contains one of these words."""

    words: tuple[str, ...]
    codec: Codec

    def __call__(self, name: str, like: Like) -> Codec:
        return Identity() if any(word in name for word in self.words) else self.codec


Vectors = tuple[jax.Array, ...]
Payloads = tuple[Payload, ...]
"""One payload for each group of parts that have the same codec and size.

A group of several parts stacks the payloads of its parts, so that one program serves all of them.
"""


class CompressedParts(NamedTuple):
    payloads: Payloads
    overflow: jax.Array | int
    state: tuple[PyTree, ...]  # of each part
    sparse: tuple[Sparse | None, ...]  # the decoded payloads that codecs know; None for others


@dataclasses.dataclass(frozen=True)
class Parts:
    """Codec of a tuple of vectors, each of which has its own codec.

    The methods are those of a codec, on tuples of vectors, payloads and states. The first part uses
    the random keys of the step; each other part has keys of its own.
    """

    pairs: tuple[tuple[Codec, Like], ...]  # the codec of each part, and the shape of its vector
    groups: tuple[Sequence[int], ...]  # the numbers of the parts in each group

    @classmethod
    def of(cls, pairs: Sequence[tuple[Codec, Like]]) -> "Parts":
        return cls(tuple(pairs), tuple(alike(pairs)))

    @property
    def codecs(self) -> tuple[Codec, ...]:
        return tuple(codec for codec, _ in self.pairs)

    def init(self) -> tuple[PyTree, ...]:
        return tuple(codec.init(like) for codec, like in self.pairs)

    def compress(self, vectors: Vectors, state: tuple[PyTree, ...], step: Step) -> CompressedParts:
        def one(codec: Codec, _: Like, *row: Any) -> Any:
            return _chain.compress(codec, *row)

        outs = self._each(one, step, self.join(vectors), self.join(state))
        payloads, overflows, states, few = zip(*outs, strict=True) if outs else ((), (), (), ())
        counts = (_count.total(count) if jnp.ndim(count) else count for count in overflows)
        overflow = functools.reduce(_count.add, counts, 0)
        return CompressedParts(payloads, overflow, self.apart(states), few)

    def decompress(self, payloads: Payloads, step: Step) -> Vectors:
        return self.apart(self.decompress_groups(payloads, step))

    def decompress_groups(self, payloads: Payloads, step: Step) -> Vectors:
        """Return [size] for a group of one part, and [parts, size] for each other group."""

        def one(codec: Codec, like: Like, payload: Payload, own: Step) -> jax.Array:
            return _chain.decompress(codec, payload, like, own)

        return self._each(one, step, payloads)

    def error(self, vectors: Vectors, out: CompressedParts, step: Step) -> Vectors:
        """Subtract a worker's own decoded payloads from `vectors`."""

        def from_few(_: Codec, __: Like, x: jax.Array, few: Sparse, *___: Step) -> jax.Array:
            return few.add_to(x, -1.0)

        def from_payload(codec: Codec, _: Like, x: Any, payload: Any, own: Step) -> jax.Array:
            return _sum.add(codec, x, payload, -1.0, own)

        if all(few is not None for few in out.sparse):
            return self.apart(self._each(from_few, step, self.join(vectors), out.sparse))
        # XLA may fuse a dense decode with a subtraction, which rounds differently. So decode first.
        if any(_sum.slots(*pair) is None for pair in dict.fromkeys(self.pairs)):
            sent = self.decompress(out.payloads, step)
            return tuple(x - own for x, own in zip(vectors, sent, strict=True))
        return self.apart(self._each(from_payload, step, self.join(vectors), out.payloads))

    def mean(
        self,
        payloads: Payloads,
        start: jax.Array,
        step: Step,
        shares: jax.Array | None = None,
        shards: bool = False,
    ) -> Vectors:
        """Return `start` + the means of the decoded payloads, which are stacked by worker.

        `shares` are the workers' shares of the mean, float32[w]; without it they are equal. The
        first stages of a codec may be summable. They are inverted once, after the sum over the
        workers. Pass `shards=True` if the vectors are shards, which are small.
        """
        leaves = jax.tree.leaves(payloads)
        scale = 1.0 / (leaves[0].shape[0] if leaves else 1) if shares is None else shares
        linear, rest = self.split(_chain.split_for_sum)
        # The summable first stages have no `side`, so the leaves are the same.
        inner = jax.tree.unflatten(jax.tree.structure(rest.payload_spec), leaves)
        by_part = [
            jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), stacked) if others else stacked
            for (_, *others), stacked in zip(rest.groups, inner, strict=True)
        ]

        def one(codec: Codec, like: Like, stacked: Payload, own: Step) -> jax.Array:
            total = jnp.broadcast_to(start.astype(like.dtype), like.shape)
            return _sum.add_each(codec, total, stacked, scale, own, shards=shards)

        return linear.undo_linear(rest._each(one, step, by_part), step)

    def undo_linear(self, totals: Vectors, step: Step) -> Vectors:
        """Decode sums of `main` of linear codecs, which are stacked by group."""

        def one(codec: Codec, like: Like, total: jax.Array, own: Step) -> jax.Array:
            return _chain.undo_linear(codec, total, like, own)

        return self.apart(self._each(one, step, totals))

    def split(self, how: Callable[[Codec, Like], tuple[Codec, Codec]]) -> tuple["Parts", "Parts"]:
        """Split each codec in two; the second codec compresses `main` of the first."""
        firsts: list[tuple[Codec, Like]] = []
        rests: list[tuple[Codec, Like]] = []
        for codec, like in self.pairs:
            first, rest = how(codec, like)
            firsts.append((first, like))
            rests.append((rest, _chain.payload_spec(first, like).main))
        return Parts(tuple(firsts), self.groups), Parts(tuple(rests), self.groups)

    def side_by_side(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return `jax.vmap(run)`; for a codec that selects, a CPU calls `run` in a loop."""
        if not any(map(_chain.selects, self.codecs)):
            return jax.vmap(run)
        # Under `vmap`, both branches of a condition run, and each row waits for the slowest loop.
        in_loop = functools.partial(lax.map, lambda row: run(*row))
        at_once = jax.vmap(lambda row: run(*row))
        return lambda *rows: _platform.dependent(rows, cpu=in_loop, default=at_once)

    def shard(self, parts: int) -> "Parts":
        return Parts(tuple((codec.shard(parts), like) for codec, like in self.pairs), self.groups)

    @property
    def payload_spec(self) -> Payloads:
        """Shapes and dtypes of the payloads of the groups."""
        return tuple(
            _stacked_spec(_chain.payload_spec(*self.pairs[group[0]]), len(group))
            for group in self.groups
        )

    @property
    def counts_overflow(self) -> bool:
        return any(itertools.starmap(_chain.counts_overflow, self.pairs))

    def join(self, trees: Sequence[PyTree], axis: int = 0) -> tuple[PyTree, ...]:
        """Stack what belongs to the parts of each group."""
        return tuple(
            jax.tree.map(lambda *leaves: jnp.stack(leaves, axis), *(trees[i] for i in group))
            if len(group) > 1
            else trees[group[0]]
            for group in self.groups
        )

    def apart(self, trees: Sequence[PyTree]) -> tuple[PyTree, ...]:
        """Invert `join`."""
        out: list[PyTree] = [None] * len(self.pairs)
        for group, tree in zip(self.groups, trees, strict=True):
            rows = _unstacked(tree, len(group)) if len(group) > 1 else [tree]
            for i, row in zip(group, rows, strict=True):
                out[i] = row
        return tuple(out)

    def _each(
        self, verb: Callable[..., Any], step: Step, *arrays: Sequence[PyTree]
    ) -> tuple[Any, ...]:
        """Call `verb(codec, like, *array, step)` for each group, with the step of the part."""
        # Parts that are compressed one by one may be decompressed in one call. Both must draw the
        # same random numbers.
        together = _random.is_same_under_vmap(step.shared)
        out: list[Any] = []
        for group, *own in zip(self.groups, *arrays, strict=True):
            codec, like = self.pairs[group[0]]

            def one(row: Any, codec: Codec = codec, like: Like = like) -> Any:
                number, *rest = row
                return verb(codec, like, *rest, own_step(step, number))

            numbers = np.asarray(group, np.int32)
            if len(group) == 1:
                out.append(one((numbers[0], *own)))
            elif together:
                out.append(_run_stacked(one, (numbers, *own), _chain.selects(codec)))
            else:
                rows = _unstacked(own, len(group))
                each = [one((number, *row)) for number, row in zip(numbers, rows, strict=True)]
                out.append(jax.tree.map(lambda *leaves: jnp.stack(leaves), *each))
        return tuple(out)


def own_step(step: Step, number: jax.Array | np.generic) -> Step:
    """Return the step of a part: the first part has the keys of `step`, each other its own keys."""
    if isinstance(number, np.generic):  # the part has a call of its own
        return step.fold(int(number)) if number else step
    return jax.tree.map(functools.partial(jnp.where, number == 0), step, step.fold(number))


def codec_of(codec: Codecs, x: PyTree) -> Parts:
    pairs: list[tuple[Codec, Like]] = []
    for part in parts_of(x):
        own, argument = codec, f"rule({part.name!r})"
        if not isinstance(own, Codec):
            own = own(part.name, part.value)
            check_kind(argument, own, Codec, "return a codec for each part, as Identity().")
        pairs.append((own, spec(jax.eval_shape(jnp.ravel, part.value))))
    return Parts.of(pairs)


def parts_of(x: PyTree) -> list[Part]:
    """Return the parts of `x`; an array outside a `Part` becomes a part with an empty name."""
    nodes = jax.tree.leaves(x, is_leaf=lambda node: isinstance(node, Part))
    return [node if isinstance(node, Part) else Part("", node) for node in nodes]


def scope_of(codec: Codecs) -> Scope:
    return "model" if isinstance(codec, Codec) else "leaf"


def check_codec(owner: str, codec: object) -> None:
    if isinstance(codec, Codec | type) or not callable(codec):
        remedy = "pass one such as TopK(fraction=0.01), or a rule from a part to its codec."
        if isinstance(codec, Exchange):
            remedy = "it is an exchange already; pass its codec."
        check_kind(f"{owner}(codec)", codec, Codec, remedy)


@value
class OfCodec(Exchange):
    """Base of the exchanges whose first argument is a codec or a rule."""

    codec: Codecs

    def __post_init__(self) -> None:
        check_codec(type(self).__name__, self.codec)

    @property
    def scope(self) -> Scope | None:
        return scope_of(self.codec)


def values_at(selector: Selector, x: jax.Array, side: PyTree, step: Step) -> jax.Array:
    """Return the values of `x` at the positions in `side` of a payload; 0 for unused slots."""
    return jnp.take(x, selector.positions(side, x.size, step), mode="fill", fill_value=0)


def vectors(x: PyTree) -> Vectors:
    return tuple(jnp.ravel(part) for part in jax.tree.leaves(x))


def sizes(like: PyTree) -> list[int]:
    return [math.prod(part.shape) for part in jax.tree.leaves(like)]


def rebuild(flat: Sequence[jax.Array], like: PyTree) -> PyTree:
    leaves, structure = jax.tree.flatten(like)
    shaped = [a.reshape(leaf.shape) for a, leaf in zip(flat, leaves, strict=True)]
    return jax.tree.unflatten(structure, shaped)


SMALL = 1 << 15
"""Largest number of values of a part that a CPU too runs under `vmap`."""


def _unstacked(tree: PyTree, count: int) -> list[PyTree]:
    leaves, structure = jax.tree.flatten(tree)
    rows = [_shapes.unstack(leaf) for leaf in leaves]
    return [jax.tree.unflatten(structure, [row[i] for row in rows]) for i in range(count)]


def _stacked_spec(tree: PyTree, count: int) -> PyTree:
    rows = (count,) if count > 1 else ()
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(rows + a.shape, a.dtype), tree)


def alike(keys: Iterable[Hashable]) -> list[list[int]]:
    """Group the numbers of equal keys, in the order of their first numbers."""
    groups: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def _run_stacked(run: Callable[[PyTree], PyTree], stacked: PyTree, selects: bool) -> PyTree:
    side_by_side = jax.vmap(run)
    if max((leaf[0].size for leaf in jax.tree.leaves(stacked)), default=0) <= SMALL:
        return (_platform.first(side_by_side) if selects else side_by_side)(stacked)
    # Under `vmap` both branches of a condition run, which is slower on a CPU.
    return _platform.dependent(stacked, cpu=functools.partial(lax.map, run), default=side_by_side)
