"""Composition of codecs."""

import itertools

import jax

from fftgrad._contracts import Codec, Compressed, Like, Payload, PyTree, Sparse, Step
from fftgrad._values import check_kind, value
from fftgrad.codecs import _call, _plan
from fftgrad.codecs._spec import payload_spec
from fftgrad.codecs.transforms._identity import Identity


@value
class Chain(Codec):
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
            out = _call.compress(stage, x, before, step)
            x = out.payload.main
            sides.append(out.payload.side)
            after.append(out.state)
            overflow = overflow + out.overflow
        return Compressed(Payload(x, tuple(sides)), overflow, tuple(after))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        return _plan.undo(self.stages, payload.main, payload.side, like, step)

    def shard(self, parts: int) -> "Codec":
        return Chain(tuple(stage.shard(parts) for stage in self.stages))


def chain(*codecs: Codec) -> Codec:
    """Composition: the codec that applies `codecs` in order, and undoes them in reverse.

    Each stage compresses the `main` part of the stage before; the `side` parts are sent as they
    are. Chains nest flat, `Identity()` is their unit, and `chain(c)` is `c`.

    Args:
      *codecs: the stages, in the order a gradient meets them: transforms and selectors, then at
        most one quantizer.

    Claims: summable if every stage is; unbiased if every stage is and all but the last are linear.

    Raises:
      ValueError: if something follows what has to come last.

    Example:
      >>> fg.chain(fg.Fft(block=64), fg.chain(fg.TopK(fraction=0.1), fg.RangeFloat(bits=8)))
      chain(Fft(block=64), TopK(fraction=0.1), RangeFloat(bits=8))
    """
    for position, codec in enumerate(codecs):
        check_kind(
            f"chain(codecs[{position}])", codec, Codec, "pass a value such as TopK(fraction=0.01)."
        )
    every = (stage for codec in codecs for stage in stages(codec))
    flat = tuple(stage for stage in every if stage != Identity())
    for before, after in itertools.pairwise(flat):
        if before.last:
            raise ValueError(
                f"chain(codecs): nothing can follow {before!r}, because it leaves codes and no "
                f"values, got {after!r} after it; put transforms first, then selectors, and one "
                "quantizer at the end."
            )
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


def split_linear(codec: Codec, like: Like) -> tuple[Codec, Codec]:
    """The longest prefix whose payloads can be summed, and the rest.

    Payloads of the rest may be summed after undoing the rest alone, so the prefix (an inverse FFT,
    say) need be undone only once however many payloads there are. A stage that sends something
    beside its main part is left in the rest, whatever it claims.
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
    """What is undone once for the sum of many payloads, and what for each of them."""
    if _plan.sparse_blocks(stages(codec), like):
        return Identity(), codec
    return split_linear(codec, like)


def undo_linear(codec: Codec, total: jax.Array, like: Like, step: Step) -> jax.Array:
    """The vector that a sum of the main parts of a linear prefix stands for."""
    parts = stages(codec)
    return _plan.undo(parts, total, ((),) * len(parts), like, step)


def sparse(codec: Codec, payload: Payload, like: Like, step: Step) -> Sparse | None:
    """What a payload stands for as values at few positions; None where it is not sparse."""
    parts = stages(codec)
    sides = payload.side if isinstance(codec, Chain) else (payload.side,)
    return _plan.sparse(parts, payload.main, sides, like, step)
