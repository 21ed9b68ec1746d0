"""Evenly spaced levels, rounded to at random."""

import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from fftgrad._contracts import Compressed, Like, Payload, PyTree, Quantizer, Step
from fftgrad._values import check_choice, check_count, value
from fftgrad.codecs.quantizers import _scale
from fftgrad.ops import _rows
from fftgrad.ops.packing import _codes

Norm = Literal["l2", "max"]

LARGEST = float(np.finfo(np.float32).max) * (1 - 2**-20)
"""No norm is larger, or the largest level could be rounded to infinity."""


@value
class UniformLevels(Quantizer):
    """Quantizer: round each value to one of 2s + 1 even levels, up or down by chance.

    The vector is cut into buckets, each with its norm ||v||, and with l = s |v_i| / ||v||,

        C(v)_i = ||v|| sign(v_i) (floor(l) + Bernoulli(l - floor(l))) / s,   s = 2^(bits-1) - 1.

    Args:
      bits: width of a code, 2 <= bits <= 16; 2 bits are the ternary case, s = 1.
      bucket: values per norm; a longer one sends fewer norms and has the larger error.
      norm: "l2" (the paper's) or "max", whose levels all get used.

    Wire: x float32[n] -> main uint32[ceil(n · bits / 32)], side float32[ceil(n/bucket)].

    Claims: unbiased; not summable; E||x - C(x)||² <= min(d/s², √d/s) ||x||² for buckets of d. A
      bucket with a NaN or an infinity decodes to NaN.

    Differs from the paper: codes of fixed width in place of Elias coding, whose size follows the
      data.

    Example:
      >>> x, step = jnp.array([0.0, 2.0, -2.0]), fg.Step.of(0)
      >>> codec = fg.UniformLevels(bits=2, norm="max")
      >>> fg.decompress(codec, fg.compress(codec, x, step=step), like=x)
      Array([ 0.,  2., -2.], dtype=float32)

    References:
      Alistarh et al., NeurIPS 2017, arXiv:1610.02132 (QSGD).
    """

    bits: int = 4
    bucket: int = 512
    norm: Norm = "l2"

    def __post_init__(self) -> None:
        check_count("UniformLevels(bits)", self.bits, "for one bit use Sign().", 2, 16)
        check_count("UniformLevels(bucket)", self.bucket, "use bucket=512.")
        check_choice("UniformLevels(norm)", self.norm, get_args(Norm))

    @property
    def unbiased(self) -> bool:
        return True

    @property
    def _levels(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        _scale.check_real("UniformLevels", x)
        bucket = min(self.bucket, x.size)

        def encode(x: jax.Array, uniform: jax.Array) -> tuple[jax.Array, jax.Array]:
            rows = _rows.rows(x, bucket)
            top, length = _scale.norms(rows)
            norms = jnp.minimum(length if self.norm == "l2" else top, LARGEST)
            uniform = _rows.rows(uniform, bucket)
            codes = _scale.to_levels(rows, norms[:, None], self._levels, uniform) + self._levels
            codes = codes.ravel()[: x.size].astype(jnp.uint32)
            return _codes.pack(codes, self.bits), norms

        group = math.lcm(bucket, _codes.period(self.bits))
        uniform = _scale.noise(self, step, x.size)
        return Compressed(Payload(*_rows.whole_then_rest(encode, group, x, uniform)))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        (n,) = like.shape
        codes = _codes.unpack(payload.main, self.bits, n).astype(jnp.float32) - self._levels
        norms = jnp.where(jnp.isfinite(payload.side), payload.side, jnp.nan)
        return codes * jnp.repeat(norms / self._levels, min(self.bucket, n))[:n]
