"""The parts that travel together, and their codecs as one.

An exchange sees a tuple of vectors and one codec of all of them: `Parts`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fftgrad._contracts import Codec, Compressed, Exchange, Like, Payload, PyTree, Scope, Step
from fftgrad._values import check_kind
from fftgrad.codecs import _chain, _sum
from fftgrad.exchanges import _alike
from fftgrad.exchanges._layout import Part
from fftgrad.exchanges._rules import Codecs
from fftgrad.ops import _count, _random
from fftgrad.ops._shapes import spec

Vectors = tuple[jax.Array, ...]
Likes = tuple[Like, ...]
Payloads = tuple[Payload, ...]


class CompressedParts(NamedTuple):
    """What `Parts.compress` returns: as `Compressed`, for all parts."""

    payloads: Payloads
    overflow: jax.Array | int
    state: tuple[PyTree, ...]


@dataclasses.dataclass(frozen=True)
class Parts:
    """The codec of vectors that travel together: each goes through its own.

    It has the verbs of a codec. Vectors, payloads and states are tuples; the first part has the
    randomness of the step, every other its own.
    """

    codecs: tuple[Codec, ...]

    def init(self, likes: Likes) -> tuple[PyTree, ...]:
        return tuple(codec.init(like) for codec, like in self._with(likes))

    def compress(self, vectors: Vectors, state: tuple[PyTree, ...], step: Step) -> CompressedParts:
        def one(codec: Codec, row: Any) -> Compressed:
            number, vector, before = row
            return _chain.compress(codec, vector, before, _own(step, number))

        outs = self._each(one, step, (), vectors, state)
        payloads, overflows, states = zip(*outs, strict=True) if outs else ((), (), ())
        return CompressedParts(payloads, functools.reduce(_count.add, overflows, 0), states)

    def decompress(self, payloads: Payloads, likes: Likes, step: Step) -> Vectors:
        def one(codec: Codec, like: Like, row: Any) -> jax.Array:
            number, payload = row
            return _chain.decompress(codec, payload, like, _own(step, number))

        return tuple(self._each(one, step, (likes,), payloads))

    def error(self, vectors: Vectors, payloads: Payloads, likes: Likes, step: Step) -> Vectors:
        """What `vectors` have beside what one worker's payloads stand for."""
        # To subtract what is not sparse may be one operation with how it was found, and round
        # otherwise.
        pairs = dict.fromkeys(self._with(tuple(map(spec, vectors))))
        if not all(_sum.is_sparse(codec, like, step) for codec, like in pairs):
            sent = self.decompress(payloads, likes, step)
            return tuple(x - own for x, own in zip(vectors, sent, strict=True))

        def one(codec: Codec, row: Any) -> jax.Array:
            number, vector, payload = row
            return _sum.add(codec, vector, payload, -1.0, _own(step, number))

        return tuple(self._each(one, step, (), vectors, payloads))

    def mean(
        self,
        payloads: Payloads,
        likes: Likes,
        start: jax.Array,
        step: Step,
        shares: jax.Array | None = None,
        shards: bool = False,
    ) -> Vectors:
        """`start` + the means of what many workers' payloads, stacked, stand for.

        Each has its share of the mean, float32[w]; the same for all if left out. Summed after the
        codecs' summable prefix, so that w payloads cost one inverse transform. Payloads of
        `shards` are small.
        """
        leaves = jax.tree.leaves(payloads)
        workers = leaves[0].shape[0] if leaves else 1
        linear, rest = self.split_for_sum(likes)
        coefficients = tuple(payload.main for payload in linear.payload_spec(likes))
        starts = tuple(jnp.broadcast_to(start.astype(c.dtype), c.shape) for c in coefficients)
        # The summable prefix sends nothing beside its main part, so the leaves are the same.
        inner = jax.tree.unflatten(jax.tree.structure(rest.payload_spec(coefficients)), leaves)
        scale = 1.0 / workers if shares is None else shares
        totals = rest.add_each(starts, inner, scale, step, shards)
        return linear.undo_linear(totals, likes, step)

    def add_each(
        self,
        totals: Vectors,
        payloads: Payloads,
        scale: jax.Array | float,
        step: Step,
        shards: bool = False,
    ) -> Vectors:
        """`totals` + scale · what each of many workers' payloads, stacked, stands for, in order."""

        def one(codec: Codec, row: Any) -> jax.Array:
            number, total, stacked = row
            return _sum.add_each(codec, total, stacked, scale, _own(step, number), shards=shards)

        return tuple(self._each(one, step, (), totals, payloads))

    def undo_linear(self, totals: Vectors, likes: Likes, step: Step) -> Vectors:
        """What the sums of the main parts of linear codecs stand for."""

        def one(codec: Codec, like: Like, row: Any) -> jax.Array:
            number, total = row
            return _chain.undo_linear(codec, total, like, _own(step, number))

        return tuple(self._each(one, step, (likes,), totals))

    def split_for_sum(self, likes: Likes) -> tuple["Parts", "Parts"]:
        """What is undone once for the sum of many payloads, and what for each of them."""
        return _unzip(_chain.split_for_sum(codec, like) for codec, like in self._with(likes))

    def split_linear(self, likes: Likes) -> tuple["Parts", "Parts"]:
        """The longest prefixes whose payloads can be summed, and the rest."""
        return _unzip(_chain.split_linear(codec, like) for codec, like in self._with(likes))

    def shard(self, parts: int) -> "Parts":
        return Parts(tuple(codec.shard(parts) for codec in self.codecs))

    def payload_spec(self, likes: Likes) -> Payloads:
        return tuple(_chain.payload_spec(codec, like) for codec, like in self._with(likes))

    def counts_overflow(self, likes: Likes) -> bool:
        return any(_chain.counts_overflow(codec, like) for codec, like in self._with(likes))

    def _each(
        self,
        verb: Callable[..., Any],
        step: Step,
        statics: tuple[Likes, ...],
        *arrays: Sequence[PyTree],
    ) -> list[Any]:
        """`verb(codec, *static, (number, *array))` of each part."""
        numbers = np.arange(len(self.codecs), dtype=np.int32)
        rows = list(zip(numbers, *arrays, strict=True))
        # What decodes together need not have been encoded together, and has to draw the same.
        together = _random.is_same_under_vmap(step.shared)
        return _alike.each(verb, self._with(*statics), rows, together=together)

    def _with(self, *others: Sequence[Any]) -> list[tuple[Any, ...]]:
        return list(zip(self.codecs, *others, strict=True))


def _own(step: Step, number: jax.Array | np.generic) -> Step:
    """The step of a part: the first one has the randomness of the step, every other its own."""
    if isinstance(number, np.generic):  # a part that is like no other
        return step.fold(int(number)) if number else step
    return jax.tree.map(functools.partial(jnp.where, number == 0), step, step.fold(number))


def _unzip(pairs: Any) -> tuple[Parts, Parts]:
    both = list(pairs)
    return Parts(tuple(a for a, _ in both)), Parts(tuple(b for _, b in both))


def codec_of(codec: Codecs, x: PyTree) -> Parts:
    """The codec of the parts of `x`."""
    if isinstance(codec, Codec):
        return Parts(tuple(codec for _ in parts_of(x)))
    own = [(part.name, codec(part.name, part.value)) for part in parts_of(x)]
    for name, found in own:
        check_kind(f"rule({name!r})", found, Codec, "return a codec for each part, as Identity().")
    return Parts(tuple(found for _, found in own))


def parts_of(x: PyTree) -> list[Part]:
    """The parts; an array on its own is one without a name."""
    nodes = jax.tree.leaves(x, is_leaf=lambda node: isinstance(node, Part))
    return [node if isinstance(node, Part) else Part("", node) for node in nodes]


def scope_of(codec: Codecs) -> Scope:
    """The parts that a codec or a rule is made for."""
    if isinstance(codec, Codec):
        return "model"
    return getattr(codec, "scope", "leaf")


def check_codec(owner: str, codec: object) -> None:
    """Refuses what is neither a codec nor a rule."""
    if isinstance(codec, Codec | type) or not callable(codec):
        remedy = "pass a value such as TopK(fraction=0.01), or a rule from a part to its codec."
        if isinstance(codec, Exchange):
            remedy = "it is an exchange already; pass its codec, or use it in place of this one."
        check_kind(f"{owner}(codec)", codec, Codec, remedy)


def vectors(x: PyTree) -> Vectors:
    """Each part, flat."""
    return tuple(jnp.ravel(part) for part in jax.tree.leaves(x))


def vector_likes(like: PyTree) -> Likes:
    """The shape and dtype of each part, flat."""
    return tuple(spec(jax.eval_shape(jnp.ravel, part)) for part in jax.tree.leaves(like))


def rebuild(flat: Sequence[jax.Array], like: PyTree) -> PyTree:
    """The parts in their shapes, from flat ones."""
    leaves, structure = jax.tree.flatten(like)
    shaped = [a.reshape(leaf.shape) for a, leaf in zip(flat, leaves, strict=True)]
    return jax.tree.unflatten(structure, shaped)
