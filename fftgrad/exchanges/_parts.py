"""Parts of a bucket, and `Parts`: one codec for the tuple of their vectors."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
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
from fftgrad._values import check, check_count, check_kind, value
from fftgrad.codecs import _chain, _sum
from fftgrad.codecs._transforms import Identity
from fftgrad.exchanges._bucketing import Part
from fftgrad.ops import _count, _platform, _random, _shapes
from fftgrad.ops._shapes import spec

Codecs: TypeAlias = Codec | Callable[[str, Like], Codec]
"""One codec for all parts, or a rule: a function from the name and shape of a part to its codec.

With a rule, each leaf is a part, unless the rule has another `scope`.
"""

_DENSE, _OTHERS = "dense leaves", "other leaves"


@value
class _PartOf:
    """Scope of `SmallDense`; equal rules have equal scopes."""

    max_ndim: int
    max_size: int | None

    def __call__(self, path: str, leaf: Like) -> str:
        few = self.max_size is None or math.prod(leaf.shape) <= self.max_size
        return _DENSE if few and len(leaf.shape) <= self.max_ndim else _OTHERS


@value
class SmallDense:
    """Function: rule that sends small leaves dense, and compresses all others with one codec.

    The small leaves form one part. The other leaves form a second part, and a selector chooses
    among all values of this part. Both parts travel in the same collective.

        rule = fg.SmallDense(fg.chain(fg.TopK(0.01), fg.LogQuantizer(8)))
        fg.compressed_pmean(fg.AllGather(rule), axis_name="data")

    Args:
      codec: codec of the leaves that are not small.
      max_ndim: largest number of axes of a small leaf; with 1, biases and scales are dense.
      max_size: largest number of values of a small leaf; None for no limit.

    Example:
      >>> rule = fg.SmallDense(fg.TopK(fraction=0.01))
      >>> params = {"bias": jnp.ones(10), "kernel": jnp.ones((100, 10))}
      >>> fg.wire_bytes(fg.AllGather(rule), params)
      96
    """

    codec: Codec
    max_ndim: int = 1
    max_size: int | None = None

    def __post_init__(self) -> None:
        check_kind("SmallDense(codec)", self.codec, Codec, "pass one, as TopK(fraction=0.01).")
        check_count("SmallDense(max_ndim)", self.max_ndim, "leave it out.", least=0)

    @property
    def scope(self) -> Scope:
        """Rule that assigns leaves to the two parts."""
        return _PartOf(self.max_ndim, self.max_size)

    def __call__(self, name: str, like: Like) -> Codec:
        rule = f"be {_DENSE!r} or {_OTHERS!r}"
        remedy = "leave the bucketing's scope out."
        check(name in (_DENSE, _OTHERS), "SmallDense(name)", rule, repr(name), remedy)
        return Identity() if name == _DENSE else self.codec


@value
class DenseByName:
    """Function: rule that sends a leaf dense if its path contains one of these words."""

    words: tuple[str, ...]
    codec: Codec

    def __call__(self, name: str, like: Like) -> Codec:
        return Identity() if any(word in name for word in self.words) else self.codec


Vectors = tuple[jax.Array, ...]
Payloads = tuple[Payload, ...]


class CompressedParts(NamedTuple):
    payloads: Payloads
    overflow: jax.Array | int
    state: tuple[PyTree, ...]
    sparse: tuple[Sparse | None, ...]  # the decoded payloads that codecs know; None for others


@dataclasses.dataclass(frozen=True)
class Parts:
    """Codec of a tuple of vectors, each of which has its own codec.

    The methods are those of a codec, on tuples of vectors, payloads and states. The first part uses
    the random keys of the step; each other part has keys of its own.
    """

    pairs: tuple[tuple[Codec, Like], ...]  # the codec of each part, and the shape of its vector

    @property
    def codecs(self) -> tuple[Codec, ...]:
        return tuple(codec for codec, _ in self.pairs)

    def init(self) -> tuple[PyTree, ...]:
        return tuple(codec.init(like) for codec, like in self.pairs)

    def compress(self, vectors: Vectors, state: tuple[PyTree, ...], step: Step) -> CompressedParts:
        outs = self._each(_chain.compress, step, (vectors, state))
        payloads, overflows, states, few = zip(*outs, strict=True) if outs else ((), (), (), ())
        return CompressedParts(payloads, functools.reduce(_count.add, overflows, 0), states, few)

    def decompress(self, payloads: Payloads, step: Step) -> Vectors:
        return tuple(self._each(_chain.decompress, step, (payloads,), decodes=True))

    def sent(self, out: CompressedParts, step: Step) -> Vectors:
        """Decode a worker's own payloads."""
        few = [own for own in out.sparse if own is not None]
        if len(few) < len(self.pairs):
            return self.decompress(out.payloads, step)
        likes = (like for _, like in self.pairs)
        return tuple(
            own.put_into(jnp.zeros(like.shape, like.dtype))
            for own, like in zip(few, likes, strict=True)
        )

    def error(self, vectors: Vectors, out: CompressedParts, step: Step) -> Vectors:
        """Subtract a worker's own decoded payloads from `vectors`."""
        few = [own for own in out.sparse if own is not None]
        if len(few) == len(self.pairs):
            return tuple(own.add_to(x, -1.0) for x, own in zip(vectors, few, strict=True))
        # XLA may fuse a dense decode with a subtraction, which rounds differently. So decode first.
        if any(_sum.slots(*pair) is None for pair in dict.fromkeys(self.pairs)):
            sent = self.decompress(out.payloads, step)
            return tuple(x - own for x, own in zip(vectors, sent, strict=True))

        def one(codec: Codec, vector: jax.Array, payload: Payload, own: Step) -> jax.Array:
            return _sum.add(codec, vector, payload, -1.0, own)

        return tuple(self._each(one, step, (vectors, out.payloads)))

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
        starts = tuple(jnp.broadcast_to(start.astype(c.dtype), c.shape) for _, c in rest.pairs)
        # The summable first stages have no `side`, so the leaves are the same.
        inner = jax.tree.unflatten(jax.tree.structure(rest.payload_spec), leaves)

        def one(codec: Codec, total: jax.Array, stacked: Payload, own: Step) -> jax.Array:
            return _sum.add_each(codec, total, stacked, scale, own, shards=shards)

        return linear.undo_linear(tuple(rest._each(one, step, (starts, inner))), step)

    def undo_linear(self, totals: Vectors, step: Step) -> Vectors:
        """Decode sums of `main` of linear codecs."""
        return tuple(self._each(_chain.undo_linear, step, (totals,), decodes=True))

    def split(self, how: Callable[[Codec, Like], tuple[Codec, Codec]]) -> tuple["Parts", "Parts"]:
        """Split each codec in two; the second codec compresses `main` of the first."""
        firsts: list[tuple[Codec, Like]] = []
        rests: list[tuple[Codec, Like]] = []
        for codec, like in self.pairs:
            first, rest = how(codec, like)
            firsts.append((first, like))
            rests.append((rest, _chain.payload_spec(first, like).main))
        return Parts(tuple(firsts)), Parts(tuple(rests))

    def side_by_side(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return `jax.vmap(run)` of a function that calls this codec."""
        mapped = jax.vmap(run)
        return _platform.first(mapped) if any(map(_chain.selects, self.codecs)) else mapped

    def shard(self, parts: int) -> "Parts":
        return Parts(tuple((codec.shard(parts), like) for codec, like in self.pairs))

    @property
    def payload_spec(self) -> Payloads:
        return tuple(itertools.starmap(_chain.payload_spec, self.pairs))

    @property
    def counts_overflow(self) -> bool:
        return any(itertools.starmap(_chain.counts_overflow, self.pairs))

    def _each(
        self,
        verb: Callable[..., Any],
        step: Step,
        arrays: tuple[Sequence[PyTree], ...],
        decodes: bool = False,
    ) -> list[Any]:
        """Call `verb(codec, *array, step)` for each part, with the step of the part.

        If the verb `decodes`, it gets the shape of the vector before the step.
        """

        def one(codec: Codec, *own: Any) -> Any:
            *static, (number, *row) = own
            return verb(codec, *row, *static, own_step(step, number))

        numbers = np.arange(len(self.pairs), dtype=np.int32)
        rows = list(zip(numbers, *arrays, strict=True))
        # Parts that are compressed one by one may be decompressed in one call. Both must draw the
        # same random numbers.
        together = _random.is_same_under_vmap(step.shared)
        statics = [pair if decodes else pair[:1] for pair in self.pairs]
        return each(one, rows, statics, together=together)


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
    return Parts(tuple(pairs))


def parts_of(x: PyTree) -> list[Part]:
    """Return the parts of `x`; an array outside a `Part` becomes a part with an empty name."""
    nodes = jax.tree.leaves(x, is_leaf=lambda node: isinstance(node, Part))
    return [node if isinstance(node, Part) else Part("", node) for node in nodes]


def scope_of(codec: Codecs) -> Scope:
    if isinstance(codec, Codec):
        return "model"
    return getattr(codec, "scope", "leaf")


def check_codec(owner: str, codec: object) -> None:
    if isinstance(codec, Codec | type) or not callable(codec):
        remedy = "pass one such as TopK(fraction=0.01), or a rule from a part to its codec."
        if isinstance(codec, Exchange):
            remedy = "it is an exchange already; pass its codec."
        check_kind(f"{owner}(codec)", codec, Codec, remedy)


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


def each(
    verb: Callable[..., Any],
    rows: Sequence[PyTree],
    statics: Sequence[tuple[Any, ...]] | None = None,
    *,
    together: bool = True,
) -> list[Any]:
    """Call the pure function `verb(*static, row)` for each part.

    With `together`, parts with equal statics and shapes share one call.
    """
    out, statics = [None] * len(rows), statics or [()] * len(rows)
    groups = _groups(statics, rows) if together else [[i] for i in range(len(rows))]
    for numbers in groups:
        run = functools.partial(verb, *statics[numbers[0]])
        if len(numbers) == 1:
            out[numbers[0]] = run(rows[numbers[0]])
            continue
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(rows[i] for i in numbers))
        codecs = (static for static in statics[numbers[0]] if isinstance(static, Codec))
        results = _run_stacked(run, stacked, selects=any(map(_chain.selects, codecs)))
        pieces = jax.tree.map(_shapes.unstack, results)
        for place, i in enumerate(numbers):
            out[i] = jax.tree.map(lambda _, own, place=place: own[place], results, pieces)
    return out


def _groups(statics: Sequence[Hashable], rows: Sequence[PyTree]) -> list[list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for i, (static, row) in enumerate(zip(statics, rows, strict=True)):
        leaves, structure = jax.tree.flatten(row)
        groups.setdefault((static, structure, *map(jax.typeof, leaves)), []).append(i)
    return list(groups.values())


def _run_stacked(run: Callable[[PyTree], PyTree], stacked: PyTree, selects: bool) -> PyTree:
    side_by_side = jax.vmap(run)
    if max((leaf[0].size for leaf in jax.tree.leaves(stacked)), default=0) <= SMALL:
        return (_platform.first(side_by_side) if selects else side_by_side)(stacked)
    # Under `vmap` both branches of a condition run, which is slower on a CPU.
    return _platform.dependent(stacked, cpu=functools.partial(lax.map, run), default=side_by_side)
