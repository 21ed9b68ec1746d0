"""A sum of coefficients that one worker chooses for all, or that all know already."""

import dataclasses
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes, _parts
from fftgrad._base import (
    AxisName,
    Codec,
    CodecRule,
    Payload,
    PyTree,
    Reduced,
    Rng,
    SupportCodec,
    constructor_call,
    payload_spec,
    spec,
)
from fftgrad._chain import split_linear

Support = Literal["leader", "mean"]


class Drift(NamedTuple):
    """What the means so far tell of a part's coefficients, equal on all workers.

    Attributes:
      rate: how much each one's mean grew a step, up to when it was last sent; infinite before.
      age: how many steps ago that was.
    """

    rate: jax.Array
    age: jax.Array


class SharedSupportState(NamedTuple):
    """State of `SharedSupport`, equal on all workers.

    Attributes:
      step: how many means there were; it decides who leads.
      drifts: of each part, where the means choose the support.
    """

    step: jax.Array
    drifts: tuple[Drift | tuple[()], ...]


@dataclasses.dataclass(frozen=True, repr=False)
class SharedSupport:
    """Exchange: all workers send the same coefficients, summed, chosen by one or by the last means.

    With `support="leader"` one worker selects its k largest coefficients and broadcasts their
    indices, in Elias-Fano code: at step t worker t mod w, or always the same one. With
    `support="mean"` no index travels: from the means so far, which all workers have, each expects
    how much a coefficient has piled up since it was last sent, and all choose the k largest of

        (r_i + mean(r)) · a_i,

    r_i the size of its last mean over the steps that this was of, or the mean of the others where
    it was never sent, a_i the steps since. Nothing waits for ever. This is made for error feedback,
    without which nothing piles up, and finds what matters later than a leader does.

    All-reduces of the k values follow, so the bytes per worker do not grow with the number of
    workers, as those of `AllGather` do, and what is averaged is the same coefficients of all. A
    linear transform may come before the selector: it commutes with the sum, so the support can be
    shared in the frequency domain too.

    With 2 workers, k = 1 and x_0 = [4, 1], x_1 = [1, 2], at step 0 both send coefficient 0 and the
    mean is [2.5, 0]; at step 1 it is [0, 1.5].

    Args:
      codec: linear transforms, then `TopK` or `ChunkTopK`; without a selector the part is summed
        dense. Or a rule from a part's name and shape to such a codec.
      leader: "cyclic", or the number of the worker that always leads.
      support: who chooses, "leader" or "mean".

    Shapes: x float32[...], or a dict of such -> mean, sent of the same shapes.

    Wire: the index words of all parts once, then 4 bytes a value (8 if complex) and 4 for the
      finite flag, in two all-reduces, whatever the number of workers; without the index words, and
      in one all-reduce, if the means choose.

    Claims: all workers get the same bits. If anything is not finite anywhere the mean is NaN
      throughout.

    Differs from the paper: indices in Elias-Fano code; they travel by an all-reduce to which only
      the leader contributes, because XLA has no broadcast from a worker that is chosen at run time.
      The choice by the means is ours.

    Raises:
      ValueError: if something other than linear transforms and one such selector is in the chain,
        or if `leader` or `support` is none of these.

    Example:
      >>> import fftgrad as fg
      >>> import jax, jax.numpy as jnp
      >>> exchange = fg.SharedSupport(fg.TopK(k=1))
      >>> x = jnp.array([[4.0, 1.0], [1.0, 2.0]])
      >>> mean = lambda x: exchange.mean(x, exchange.init(x), fg.Rng.of(0), "data").mean
      >>> jax.vmap(mean, axis_name="data")(x)[0]
      Array([2.5, 0. ], dtype=float32)

    References:
      Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient
      Distributed Training", NeurIPS 2020, arXiv:2104.11125.
    """

    codec: Codec | CodecRule
    leader: Literal["cyclic"] | int = "cyclic"
    support: Support = "leader"

    __repr__ = constructor_call

    def __post_init__(self) -> None:
        if isinstance(self.codec, Codec):
            _split(self.codec)
        if self.support not in get_args(Support):
            raise ValueError(
                f"SharedSupport(support): must be one of {get_args(Support)}, got "
                f"{self.support!r}; use 'leader'."
            )
        fixed = isinstance(self.leader, int) and self.leader >= 0
        if not fixed and self.leader != "cyclic":
            raise ValueError(
                f"SharedSupport(leader): must be 'cyclic' or the number of a worker, got "
                f"{self.leader!r}; use 'cyclic'."
            )

    def init(self, like: PyTree) -> SharedSupportState:
        drifts: list[Drift | tuple[()]] = []
        for codec, part in zip(
            _parts.codecs(self.codec, like), _parts.vector_likes(like), strict=True
        ):
            linear, selector = _split(codec)
            if selector is None or self.support == "leader":
                drifts.append(())
            else:
                shape = payload_spec(linear, part).main.shape
                unknown = jnp.full(shape, jnp.inf, jnp.float32)
                drifts.append(Drift(unknown, jnp.ones(shape, jnp.float32)))
        return SharedSupportState(jnp.zeros((), jnp.int32), tuple(drifts))

    def mean(self, x: PyTree, state: SharedSupportState, rng: Rng, axis_name: AxisName) -> Reduced:
        linears, selectors = _parts.unzip(map(_split, _parts.codecs(self.codec, x)))
        vectors = _parts.vectors(x)
        likes = [spec(vector) for vector in vectors]
        rngs = _parts.rngs(rng, len(vectors))
        coefficients = [
            linear.compress(vector, r).main
            for linear, vector, r in zip(linears, vectors, rngs, strict=True)
        ]
        workers = _axes.size(axis_name)

        def choose(scores: list[jax.Array]) -> list[PyTree]:
            return [
                () if selector is None else selector.compress(score, r).side
                for selector, score, r in zip(selectors, scores, rngs, strict=True)
            ]

        if self.support == "mean":
            sides = choose(list(map(_expected, state.drifts, coefficients)))
        else:
            if isinstance(self.leader, int) and self.leader >= workers:
                raise ValueError(
                    f"SharedSupport(leader): must be the number of one of {workers} workers, got "
                    f"{self.leader}; use 'cyclic'."
                )
            leader = state.step % workers if self.leader == "cyclic" else self.leader
            sides = _lead(choose(coefficients), _axes.index(axis_name) == leader, axis_name)
        values = [
            z if selector is None else selector.at(z, side)
            for selector, z, side in zip(selectors, coefficients, sides, strict=True)
        ]
        # One more value, so that what is not chosen cannot hide a NaN.
        flag = jnp.where(_parts.all_finite(vectors), 0.0, jnp.nan)[None]
        whole, restore = _parts.as_one([flag, *values])
        total = lax.psum(whole * (1.0 / workers), axis_name)
        total_flag, *total_values = restore(total)

        def spectra(values: list[jax.Array]) -> list[jax.Array]:
            return [
                value if selector is None else selector.decompress(Payload(value, side), spec(z), r)
                for selector, value, side, z, r in zip(
                    selectors, values, sides, coefficients, rngs, strict=True
                )
            ]

        def rebuild(spectra: list[jax.Array], flag: jax.Array | float) -> PyTree:
            flat = [
                linear.decompress(Payload(z), like, r) + flag
                for linear, z, like, r in zip(linears, spectra, likes, rngs, strict=True)
            ]
            return _parts.rebuild(flat, x)

        means = spectra(total_values)
        finite = _parts.all_finite(total)
        drifts = tuple(
            _parts.where(finite, _drifted(drift, selector, side, mean), drift)
            if isinstance(drift, Drift)
            else drift
            for drift, selector, side, mean in zip(
                state.drifts, selectors, sides, means, strict=True
            )
        )
        return Reduced(
            mean=rebuild(means, total_flag),
            sent=rebuild(spectra(values), 0.0),
            state=SharedSupportState(state.step + 1, drifts),
        )

    def wire_bytes(self, like: PyTree) -> int:
        codecs = _parts.codecs(self.codec, like)
        payloads = map(payload_spec, codecs, _parts.vector_likes(like))
        sent = [payload[: 1 if self.support == "mean" else 2] for payload in payloads]
        return 4 + sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(sent))


def _expected(drift: Drift | tuple[()], z: jax.Array) -> jax.Array:
    """How much of each coefficient is expected to wait."""
    if not isinstance(drift, Drift):
        return z
    known = jnp.isfinite(drift.rate)
    total = jnp.sum(jnp.where(known, drift.rate, 0.0))
    usual = total / jnp.maximum(jnp.sum(known.astype(jnp.float32)), 1.0)
    return (jnp.where(known, drift.rate, usual) + usual) * drift.age


def _drifted(drift: Drift, selector: SupportCodec, side: PyTree, mean: jax.Array) -> Drift:
    """What is known of the coefficients once the mean of some has come."""
    ones = selector.at(jnp.ones_like(drift.age), side)
    sent = selector.decompress(Payload(ones, side), spec(drift.age), None) > 0
    rate = jnp.where(sent, jnp.abs(mean) / drift.age, drift.rate)
    return Drift(rate, jnp.where(sent, 1.0, drift.age + 1.0))


def _split(codec: Codec) -> tuple[Codec, SupportCodec | None]:
    linear, rest = split_linear(codec)
    if rest.summable:
        return linear, None
    if not isinstance(rest, SupportCodec):
        raise ValueError(
            "SharedSupport(codec): must be linear transforms and then TopK or ChunkTopK, because "
            f"values are summed as they are, got {codec!r}; leave quantizers out, or use "
            "AllGather."
        )
    return linear, rest


def _lead(own: list[PyTree], leads: jax.Array, axis_name: AxisName) -> list[PyTree]:
    """The leader's index words, on all workers, by one sum to which the others add nothing."""
    leaves, structure = jax.tree.flatten(own)
    if not leaves:
        return own
    words = jnp.concatenate([leaf.ravel() for leaf in leaves])
    words = lax.psum(jnp.where(leads, words, jnp.uint32(0)), axis_name)
    pieces = _parts.cut(words, [leaf.size for leaf in leaves])
    shaped = [piece.reshape(leaf.shape) for piece, leaf in zip(pieces, leaves, strict=True)]
    return jax.tree.unflatten(structure, shaped)
