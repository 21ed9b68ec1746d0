"""Chains of codecs: payload shapes, checked calls, and decompression.

Stages are inverted in reverse. If few coefficients are kept, only their blocks are inverted.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from fftgrad._contracts import (
    Codec,
    Compressed,
    Like,
    Payload,
    PyTree,
    Selector,
    Sparse,
    Step,
    Transform,
)
from fftgrad._values import check, check_kind, check_type, value
from fftgrad.codecs._transforms import Identity
from fftgrad.ops import _count, _platform, _wire
from fftgrad.ops._shapes import spec


def compress(codec: Codec, x: jax.Array, state: PyTree, step: Step) -> Compressed:
    """Call `codec.compress(x, state, step)`, check its result, and refuse gradients of codes."""
    out: object = codec.compress(x, state, step)
    is_right = isinstance(out, Compressed) and isinstance(cast("Any", out.payload), Payload)
    owner, rule = f"{type(codec).__name__}.compress()", "return a Compressed with a Payload"
    check_type(is_right, owner, rule, out, "return fg.codecs.Compressed(fg.codecs.Payload(main)).")
    payload = out.payload
    if any(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(payload.main)):
        return out
    codes = _wire.without_gradient(payload.main, x)
    return out._replace(payload=payload._replace(main=codes))


def decompress(codec: Codec, payload: Payload, like: Like, step: Step) -> jax.Array:
    """Call `codec.decompress(payload, like, step)` and check the shape and dtype."""
    out = codec.decompress(payload, like, step)
    if _say(out) != _say(like):
        raise TypeError(
            f"{type(codec).__name__}.decompress(): must return the shape and dtype of `like`, "
            f"{_say(like)}, got {_say(out)}; reshape it, and cast it by .astype(like.dtype)."
        )
    return out


def _say(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else type(x).__name__


def payload_spec(codec: Codec, like: Like) -> Payload:
    return _spec(codec, like.shape, like.dtype)[0]


def counts_overflow(codec: Codec, like: Like) -> bool:
    """Return True if the codec counts values that it cannot represent."""
    return _spec(codec, like.shape, like.dtype)[1]


# Each spec traces the codec, and a step asks for the same specs many times.
@functools.lru_cache(maxsize=4096)
def _spec(codec: Codec, shape: tuple[int, ...], dtype: Any) -> tuple[Payload, bool]:
    like = jax.ShapeDtypeStruct(shape, dtype)
    counts = False

    def payload(x: jax.Array, state: PyTree) -> Payload:
        nonlocal counts
        out = compress(codec, x, state, Step.of(0))
        counts = not isinstance(out.overflow, int)
        return out.payload

    with _platform.one():
        state = jax.eval_shape(lambda: codec.init(like))
        # Keep only shapes and dtypes in the cache: other attributes depend on the first caller.
        shapes = spec(jax.eval_shape(payload, like, state))
    return shapes, counts


SPARSE = 16
"""If the blocks with coefficients hold at most n / SPARSE values, only these are inverted."""


@value
class Chain(Codec):
    """Codec: a sequence of stages; each stage compresses the `main` part of the previous stage."""

    stages: tuple[Codec, ...]

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.stages))})"

    @property
    def summable(self) -> bool:
        return all(stage.summable for stage in self.stages)

    @property
    def unbiased(self) -> bool:
        # The expectation of decompress(y) is decompress(expectation of y) only if decompress is
        # linear. So only the last stage may be nonlinear.
        return all(s.unbiased for s in self.stages) and all(s.summable for s in self.stages[:-1])

    @property
    def last(self) -> bool:
        return self.stages[-1].last

    def init(self, like: Like) -> tuple[PyTree, ...]:
        states: list[PyTree] = []
        for stage in self.stages:
            states.append(stage.init(like))
            like = payload_spec(stage, like).main
        return tuple(states)

    def compress(self, x: jax.Array, state: tuple[PyTree, ...], step: Step) -> Compressed:
        sides: list[PyTree] = []
        after: list[PyTree] = []
        overflow: jax.Array | int = 0
        for stage, before in zip(self.stages, state, strict=True):
            out = compress(stage, x, before, step)
            x = out.payload.main
            sides.append(out.payload.side)
            after.append(out.state)
            overflow = _count.add(overflow, out.overflow)
        return Compressed(Payload(x, tuple(sides)), overflow, tuple(after))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        return _undo(self.stages, payload.main, payload.side, like, step)

    def shard(self, parts: int) -> "Codec":
        return Chain(tuple(stage.shard(parts) for stage in self.stages))


def chain(*codecs: Codec) -> Codec:
    """Composition: a codec that applies `codecs` in order, and inverts them in reverse order.

    Each stage compresses the `main` part of the previous stage. All `side` parts are sent.
    Nested chains are flattened, `Identity()` is dropped, and `chain(c)` is `c`.

    Args:
      *codecs: the stages in order: transforms and selectors, then at most one quantizer.

    Claims: summable if all stages are; unbiased if all are, and all but the last are summable.

    Raises:
      ValueError: if a stage follows a quantizer.

    Example:
      >>> fg.chain(fg.Fft(block=64), fg.chain(fg.TopK(fraction=0.1), fg.RangeFloat(bits=8)))
      chain(Fft(block=64), TopK(fraction=0.1), RangeFloat(bits=8))
    """
    for position, codec in enumerate(codecs):
        remedy = "pass a value such as TopK(fraction=0.01); unpack a list, as chain(*codecs)."
        check_kind(f"chain(codecs[{position}])", codec, Codec, remedy)
    every = (stage for codec in codecs for stage in stages(codec))
    flat = tuple(stage for stage in every if stage != Identity())
    for before, after in itertools.pairwise(flat):
        rule = f"end with {before!r}, because nothing can follow codes"
        remedy = "put transforms first, then selectors, and one quantizer at the end."
        check(not before.last, "chain(codecs)", rule, repr(after), remedy)
    match flat:
        case ():
            return Identity()
        case (codec,):
            return codec
        case _:
            return Chain(flat)


def stages(codec: Codec) -> tuple[Codec, ...]:
    return codec.stages if isinstance(codec, Chain) else (codec,)


def selects(codec: Codec) -> bool:
    """Return True if a stage is a selector, whose programs depend on the platform."""
    return any(isinstance(stage, Selector) for stage in stages(codec))


def split_linear(codec: Codec, like: Like) -> tuple[Codec, Codec]:
    """Split a codec into its longest summable prefix and the rest.

    The caller inverts the rest for each payload, sums the results, and inverts the prefix once. So
    one inverse FFT serves all payloads. A stage with a side part belongs to the rest.
    """
    parts = stages(codec)
    cut = 0
    while cut < len(parts) and parts[cut].summable:
        payload = payload_spec(parts[cut], like)
        if jax.tree.leaves(payload.side):
            break
        like, cut = payload.main, cut + 1
    return chain(*parts[:cut]), chain(*parts[cut:])


def split_for_sum(codec: Codec, like: Like) -> tuple[Codec, Codec]:
    """Split a codec into the stages to invert once, for the sum, and those for each payload."""
    if has_few_blocks(stages(codec), like):
        return Identity(), codec
    return split_linear(codec, like)


def undo_linear(codec: Codec, total: jax.Array, like: Like, step: Step) -> jax.Array:
    """Decode a sum of the main parts of a linear prefix."""
    parts = stages(codec)
    return _undo(parts, total, ((),) * len(parts), like, step)


def has_few_blocks(stages: Sequence[Codec], like: Like) -> bool:
    """Return True if the blocks with kept coefficients hold at most n / SPARSE values."""
    match stages:
        case (Transform() as transform, Selector() as selector, *_):
            if selector.last or selector.summable:
                return False
            (n,) = like.shape
            kept = payload_spec(selector, payload_spec(transform, like).main).main
            return SPARSE * kept.size * transform.reach(n) <= n
        case _:
            return False


def _undo(
    stages: Sequence[Codec], main: jax.Array, sides: Sequence[PyTree], like: Like, step: Step
) -> jax.Array:
    if not stages:
        return main
    if has_few_blocks(stages, like) and (few := _sparse(stages, main, sides, like, step)):
        return few.put_into(jnp.zeros(like.shape, like.dtype))
    likes = [like]
    for stage in stages[:-1]:
        likes.append(payload_spec(stage, likes[-1]).main)
    for stage, side, target in reversed(list(zip(stages, sides, likes, strict=True))):
        main = decompress(stage, Payload(main, side), target, step)
    return main


def sparse(codec: Codec, payload: Payload, like: Like, step: Step) -> Sparse | None:
    """Decode a payload into values at few positions; return None if it is not sparse."""
    sides = payload.side if isinstance(codec, Chain) else (payload.side,)
    return _sparse(stages(codec), payload.main, sides, like, step)


def _sparse(
    stages: Sequence[Codec], main: jax.Array, sides: Sequence[PyTree], like: Like, step: Step
) -> Sparse | None:
    match stages:
        case (Selector() as selector, *rest):
            values = _undo(rest, main, sides[1:], payload_spec(selector, like).main, step)
            return selector.sparse(Payload(values, sides[0]), like, step)
        case (Transform() as transform, *rest) if has_few_blocks(stages, like):
            few = _sparse(rest, main, sides[1:], payload_spec(transform, like).main, step)
            return None if few is None else transform.at_blocks(few, like, step)
        case _:
            return None
