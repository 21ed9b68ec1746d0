"""What codecs make of a sample: bits against error, beside an ideal entropy coder."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from fftgrad._contracts import Codec, Step, Transform
from fftgrad.advise import _search_codec as _fit
from fftgrad.advise._bound import Bound
from fftgrad.codecs import _chain
from fftgrad.codecs._chain import chain
from fftgrad.codecs.selectors import Budget, TopK
from fftgrad.codecs.transforms import Fft, Identity

Array = npt.NDArray[Any]

LEVEL_BITS = (4, 6)

EXACT = 32.0
"""Bits a value where nothing is lost."""


class Rate(NamedTuple):
    """What a codec costs on the sample, and what it loses.

    Attributes:
      codec: what it is, for a gradient of any size.
      ratio: how many times fewer bytes than float32 it was to send at most.
      bits: what it sends, in bits a value.
      error: the relative error.
      bound: bits a value of an ideal entropy coder at the same error, in the basis of the codec.
    """

    codec: Codec
    ratio: float
    bits: float
    error: float
    bound: float

    @property
    def is_dense(self) -> bool:
        """Whether it sends something for every value."""
        return self.codec in _fit.DENSE

    @property
    def basis(self) -> Codec:
        """The transform in the codec; `Identity()` if there is none."""
        return _basis(self.codec)


def measured(rows: Array, ratios: Sequence[float], compact: Codec) -> tuple[Rate, ...]:
    """Candidates of `fg.advise.search_codec` at each of some sizes, the best of each size first.

    Sparse ones without a transform, and in the basis that is known to compact the energy; of all
    bases `fg.advise.search_codec` would compile three times as many programs.
    """
    n = rows.shape[1]
    like = jax.ShapeDtypeStruct((n,), jnp.float32)
    measure = functools.cache(functools.partial(_fit._measure, jnp.asarray(rows), like))
    families = [
        *(functools.partial(_fit._filled, basis) for basis in dict.fromkeys((Identity(), compact))),
        *(functools.partial(_fit._counted, compact, bits, like) for bits in LEVEL_BITS),
        *(functools.partial(_fit._dense, codec, like) for codec in _fit.DENSE),
    ]

    @functools.cache
    def bound(basis: Codec) -> Bound:
        return Bound(_coefficients(basis, rows))

    found: list[Rate] = []
    for ratio in sorted(ratios, reverse=True):
        size = int(4 * n / ratio)
        codecs = [codec for family in families if (codec := family(size)) is not None]
        for codec, sent, error in sorted(map(measure, codecs), key=lambda row: row.error):
            ideal = bound(_basis(codec)).bits(error) if error else EXACT
            found.append(Rate(_of_any_size(codec, ratio, n), ratio, 8 * sent / n, error, ideal))
    return tuple(found)


def _basis(codec: Codec) -> Codec:
    return next((c for c in _chain.stages(codec) if isinstance(c, Transform)), Identity())


def _of_any_size(codec: Codec, ratio: float, n: int) -> Codec:
    """With a ratio in place of bytes, and a fraction in place of a number of coefficients."""
    stages = _chain.stages(codec)
    slots = n // 2 if any(isinstance(stage, Fft) for stage in stages) else n

    def one(stage: Codec) -> Codec:
        if isinstance(stage, Budget):
            return Budget(ratio=ratio)
        if isinstance(stage, TopK):
            return TopK(fraction=min(1.0, float(f"{(stage.k or 1) / slots:.3g}")))
        return stage

    return chain(*map(one, stages))


def _coefficients(transform: Codec, rows: Array) -> Array:
    """The coefficients [r, m] of rows, as real numbers."""
    run = jax.jit(lambda x: transform.compress(x, (), Step.of(0)).payload.main)
    out = np.stack([np.asarray(run(jnp.asarray(row))) for row in rows])
    return out.view(np.float32) if np.iscomplexobj(out) else out
