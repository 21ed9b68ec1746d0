"""Composition of codecs."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from fftgrad._base import (
    AdaptiveCodec,
    BlockCodec,
    BudgetCodec,
    Codec,
    Like,
    Payload,
    PyTree,
    Rng,
    SparseCodec,
    SupportCodec,
    payload_spec,
    spec,
)
from fftgrad.transforms._identity import Identity


@dataclasses.dataclass(frozen=True, repr=False)
class Chain:
    """Codec: several codecs, each working on the main part of the one before. See `chain`."""

    stages: tuple[Codec, ...]

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.stages))})"

    @property
    def summable(self) -> bool:
        return all(stage.summable for stage in self.stages)

    @property
    def unbiased(self) -> bool:
        # E over the inner stages passes through the outer decompress only where that is linear;
        # the last stage is where the noise of an unbiased chain may come from.
        return all(s.unbiased for s in self.stages) and all(s.summable for s in self.stages[:-1])

    def compress(self, x: jax.Array, rng: Rng | None) -> Payload:
        return adapt(self, x, init(self, x), rng)[0]

    def decompress(self, payload: Payload, like: Like, rng: Rng | None) -> jax.Array:
        if few_of_blocks(self, like):
            return accumulate(self, jnp.zeros(like.shape, like.dtype), payload, 1.0, rng)
        likes = [like]
        for stage in self.stages[:-1]:
            likes.append(payload_spec(stage, likes[-1]).main)
        x = payload.main
        for stage, side, target in reversed(
            list(zip(self.stages, payload.side, likes, strict=True))
        ):
            x = stage.decompress(Payload(x, side), target, rng)
        return x


def chain(*codecs: Codec) -> Codec:
    """Composition: the codec that applies `codecs` in order, and undoes them in reverse.

    Each stage compresses the `main` part of the stage before; the `side` parts are sent as they
    are. Shapes flow through the stages by `jax.eval_shape`, so a chain that cannot work is refused
    while tracing. Chains nest flat, `Identity()` is their unit, and `chain(c)` is `c`.

    Args:
      *codecs: the stages, in the order a gradient meets them.

    Wire: the last `main` part and all the `side` parts.

    Claims: summable if every stage is; unbiased if every stage is and all but the last are linear.

    Raises:
      TypeError: if an argument is not a codec.

    Example:
      >>> import fftgrad as fg
      >>> fg.chain(fg.Fft(block=64), fg.chain(fg.TopK(fraction=0.1), fg.RangeFloat(bits=8)))
      chain(Fft(block=64), TopK(fraction=0.1), RangeFloat(bits=8))
    """
    for position, codec in enumerate(codecs):
        if not isinstance(codec, Codec) or isinstance(codec, type):
            raise TypeError(
                f"chain(codecs[{position}]): each argument must be a codec, got {codec!r}; "
                "pass a value such as TopK(fraction=0.01)."
            )
    every = (stage for codec in codecs for stage in stages(codec))
    flat = tuple(stage for stage in every if stage != Identity())
    match flat:
        case ():
            return Identity()
        case (codec,):
            return codec
        case _:
            return Chain(flat)


def stages(codec: Codec) -> tuple[Codec, ...]:
    """The stages of a chain, or the codec itself as the only one."""
    return codec.stages if isinstance(codec, Chain) else (codec,)


def init(codec: Codec, like: Like) -> tuple[PyTree, ...]:
    """The state of each stage before the first step; () where it has none."""
    states: list[PyTree] = []
    for stage in stages(codec):
        states.append(stage.init(like) if isinstance(stage, AdaptiveCodec) else ())
        like = payload_spec(stage, like).main
    return tuple(states)


def adapt(
    codec: Codec, x: jax.Array, states: tuple[PyTree, ...], rng: Rng | None
) -> tuple[Payload, tuple[PyTree, ...]]:
    """What a codec makes of `x`, and the next state of each stage."""
    sides: list[PyTree] = []
    after: list[PyTree] = []
    overflow: jax.Array | int = 0
    for stage, state in zip(stages(codec), states, strict=True):
        if isinstance(stage, AdaptiveCodec):
            payload, state = stage.adapt(x, state, rng)
        else:
            payload = stage.compress(x, rng)
        x = payload.main
        sides.append(payload.side)
        after.append(state)
        overflow = overflow + payload.overflow
    side = tuple(sides) if isinstance(codec, Chain) else sides[0]
    return Payload(x, side, overflow), tuple(after)


def split_linear(codec: Codec) -> tuple[Codec, Codec]:
    """The longest summable prefix of a codec, and the rest.

    Payloads of the rest may be summed after decompressing the rest alone, so the prefix (an
    inverse FFT, say) need be undone only once however many payloads there are.
    """
    parts = stages(codec)
    cut = next((i for i, stage in enumerate(parts) if not stage.summable), len(parts))
    return chain(*parts[:cut]), chain(*parts[cut:])


def split_for_sum(codec: Codec, like: Like) -> tuple[Codec, Codec]:
    """What is undone once for the sum of many payloads, and what for each of them."""
    return (Identity(), codec) if few_of_blocks(codec, like) else split_linear(codec)


def shard(codec: Codec, parts: int) -> Codec:
    """The codec for one of several equal shards of a vector, within the same budget."""
    return chain(*(s.shard(parts) if isinstance(s, BudgetCodec) else s for s in stages(codec)))


FEW = 16
"""A payload of few coefficients is undone at their blocks alone, if those hold 1 value in 16."""


def few_of_blocks(
    codec: Codec, like: Like
) -> tuple[BlockCodec, SupportCodec, tuple[Codec, ...]] | None:
    """Transform, selector and rest of a chain, if hardly any block has a coefficient that is kept.

    None of any other codec.
    """
    match stages(codec):
        case (BlockCodec() as blocks, SupportCodec() as selector, *rest):
            (n,) = like.shape
            kept = payload_spec(selector, payload_spec(blocks, like).main).main
            few = FEW * kept.size * blocks.reach(n) <= n
            return (blocks, selector, tuple(rest)) if few else None
        case _:
            return None


def accumulate(
    codec: Codec, total: jax.Array, payload: Payload, scale: jax.Array | float, rng: Rng | None
) -> jax.Array:
    """`total` + scale * what the payload stands for, in place where the codec is sparse."""
    outer, *inner = stages(codec)
    like = spec(total)
    sides: tuple[PyTree, ...] = payload.side if isinstance(codec, Chain) else (payload.side,)
    if few := few_of_blocks(codec, like):
        blocks, selector, rest = few
        coefficients = payload_spec(blocks, like).main
        kept = payload_spec(selector, coefficients).main
        values = _undo(rest, payload.main, sides[2:], kept, rng)
        positions = selector.positions(sides[1], coefficients.size)
        return blocks.accumulate_at(total, positions, scale * values)
    if not isinstance(outer, SparseCodec):
        return total + scale * codec.decompress(payload, like, rng)
    values = _undo(inner, payload.main, sides[1:], payload_spec(outer, like).main, rng)
    return outer.accumulate(total, Payload(scale * values, sides[0]))


def _undo(
    inner: Sequence[Codec], main: jax.Array, sides: Sequence[PyTree], like: Like, rng: Rng | None
) -> jax.Array:
    """What the last stages of a chain stand for."""
    codec = chain(*inner)
    side = tuple(sides) if isinstance(codec, Chain) else sides[0] if sides else ()
    return codec.decompress(Payload(main, side), like, rng)
