"""A sum of coefficients that one worker chooses for all."""

import dataclasses
from typing import NamedTuple

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
    payload_spec,
    spec,
)
from fftgrad._chain import split_linear


class SharedSupportState(NamedTuple):
    """State: the step, equal on all workers, which decides who leads."""

    step: jax.Array


@dataclasses.dataclass(frozen=True)
class SharedSupport:
    """Exchange: one worker chooses the coefficients, all send their values there, summed.

    The workers lead in turn: at step t worker t mod w selects its k largest coefficients and
    broadcasts their indices, in Elias-Fano code. All-reduces of the k values follow, so the bytes
    per worker do not grow with the number of workers, as those of `AllGather` do, and what is
    averaged is the same coefficients of all. A linear transform may come before the selector: it
    commutes with the sum, so the support can be shared in the frequency domain too.

    With 2 workers, k = 1 and x_0 = [4, 1], x_1 = [1, 2], at step 0 both send coefficient 0 and the
    mean is [2.5, 0]; at step 1 it is [0, 1.5].

    Args:
      codec: linear transforms, then `TopK` or `ChunkTopK`; without a selector the part is summed
        dense. Or a rule from a part's name and shape to such a codec.

    Shapes: x float32[...], or a dict of such -> mean, sent of the same shapes.

    Wire: the index words of all parts once, then 4 bytes a value (8 if complex) and 4 for the
      finite flag, in two all-reduces, whatever the number of workers.

    Claims: all workers get the same bits. If anything is not finite anywhere the mean is NaN
      throughout.

    Differs from the paper: indices in Elias-Fano code; they travel by an all-reduce to which only
      the leader contributes, because XLA has no broadcast from a worker that is chosen at run time.

    Raises:
      ValueError: if something other than linear transforms and one such selector is in the chain.

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

    def __post_init__(self) -> None:
        if isinstance(self.codec, Codec):
            _split(self.codec)

    def init(self, like: PyTree) -> SharedSupportState:
        return SharedSupportState(jnp.zeros((), jnp.int32))

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
        leads = _axes.index(axis_name) == state.step % workers
        own = [
            () if selector is None else selector.compress(z, r).side
            for selector, z, r in zip(selectors, coefficients, rngs, strict=True)
        ]
        sides = _lead(own, leads, axis_name)
        values = [
            z if selector is None else selector.at(z, side)
            for selector, z, side in zip(selectors, coefficients, sides, strict=True)
        ]
        # One more value, so that what is not chosen cannot hide a NaN.
        flag = jnp.where(_parts.all_finite(vectors), 0.0, jnp.nan)[None]
        whole, restore = _parts.as_one([flag, *values])
        total = lax.psum(whole * (1.0 / workers), axis_name)

        def decompress(flag: jax.Array, *values: jax.Array) -> PyTree:
            flat: list[jax.Array] = []
            for linear, selector, value, side, z, like, r in zip(
                linears, selectors, values, sides, coefficients, likes, rngs, strict=True
            ):
                if selector is not None:
                    value = selector.decompress(Payload(value, side), spec(z), r)
                flat.append(linear.decompress(Payload(value), like, r) + flag)
            return _parts.rebuild(flat, x)

        return Reduced(
            mean=decompress(*restore(total)),
            sent=decompress(jnp.zeros((1,), jnp.float32), *values),
            state=SharedSupportState(state.step + 1),
        )

    def wire_bytes(self, like: PyTree) -> int:
        codecs = _parts.codecs(self.codec, like)
        payloads = list(map(payload_spec, codecs, _parts.vector_likes(like)))
        leaves = jax.tree.leaves([payload[:2] for payload in payloads])
        return 4 + sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


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
    out: list[jax.Array] = []
    start = 0
    for leaf in leaves:
        out.append(words[start : start + leaf.size].reshape(leaf.shape))
        start += leaf.size
    return jax.tree.unflatten(structure, out)
