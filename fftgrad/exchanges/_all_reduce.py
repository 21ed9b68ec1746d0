"""A sum of payloads by one all-reduce."""

import dataclasses

import jax
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
    constructor_call,
    payload_spec,
    spec,
)
from fftgrad.transforms._identity import Identity


@dataclasses.dataclass(frozen=True, repr=False)
class AllReduce:
    """Exchange: sum the payloads with one all-reduce; without a codec, the dense mean.

    For w workers: mean = decompress(Σ_i compress(x_i / w)). Dividing first keeps the sum finite
    wherever the mean is. With 4 workers and x_i = [i, 2i], every worker gets [1.5, 3].

    Args:
      codec: a summable codec, or a rule from a part's name and shape to one; `Identity()` is the
        dense baseline, the same as `jax.lax.pmean`.

    Shapes: x float32[...], or a dict of such -> mean, sent of the same shapes.

    Wire: the payloads: 4n bytes when dense. A ring sends it 2 (w - 1) / w times. No header: a sum
      carries a NaN by itself.

    Claims: exact up to rounding; all workers get the same bits.

    Raises:
      ValueError: if the codec is not summable.

    Example:
      >>> import fftgrad as fg
      >>> import jax, jax.numpy as jnp
      >>> x = jnp.outer(jnp.arange(4.0), jnp.array([1.0, 2.0]))
      >>> rng = fg.Rng.of(0)
      >>> mean = lambda x: fg.AllReduce().mean(x, (), rng, "data").mean
      >>> jax.vmap(mean, axis_name="data")(x)[0]
      Array([1.5, 3. ], dtype=float32)
    """

    codec: Codec | CodecRule = Identity()

    __repr__ = constructor_call

    def __post_init__(self) -> None:
        if isinstance(self.codec, Codec):
            _check(self.codec)

    def init(self, like: PyTree) -> PyTree:
        return ()

    def mean(self, x: PyTree, state: PyTree, rng: Rng, axis_name: AxisName) -> Reduced:
        codecs = self._codecs(x)
        vectors = _parts.vectors(x)
        rngs = _parts.rngs(rng, len(codecs))
        payloads = [
            codec.compress(vector, r)[:2]
            for codec, vector, r in zip(codecs, vectors, rngs, strict=True)
        ]
        leaves, structure = jax.tree.flatten(payloads)
        words, restore = _parts.as_one(leaves)
        total = lax.psum(words * (1.0 / _axes.size(axis_name)), axis_name)

        def decompress(payloads: list[tuple[jax.Array, PyTree]]) -> PyTree:
            flat = [
                codec.decompress(Payload(*payload), spec(vector), r)
                for codec, payload, vector, r in zip(codecs, payloads, vectors, rngs, strict=True)
            ]
            return _parts.rebuild(flat, x)

        return Reduced(
            mean=decompress(jax.tree.unflatten(structure, restore(total))),
            sent=decompress(payloads),
            state=state,
        )

    def wire_bytes(self, like: PyTree) -> int:
        payloads = map(payload_spec, self._codecs(like), _parts.vector_likes(like))
        leaves = jax.tree.leaves([payload[:2] for payload in payloads])
        return sum(a.size * a.dtype.itemsize for a in leaves)

    def _codecs(self, like: PyTree) -> list[Codec]:
        codecs = _parts.codecs(self.codec, like)
        for codec in codecs:
            _check(codec)
        return codecs


def _check(codec: Codec) -> None:
    if not codec.summable:
        raise ValueError(
            f"AllReduce(codec): must be summable, because payloads are added as they are, got "
            f"{codec!r}; use AllGather({codec!r})."
        )
