"""The window of representable values that an N-bit code counts, and its arithmetic.

The top bits of a float32, bits(|x|) >> (23 - m), number the values with m mantissa bits from 0
upwards. A window is a run of these numbers, one on each side of zero.
"""

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fftgrad._contracts import Like, Step
from fftgrad._values import check_count
from fftgrad.codecs.quantizers import _scale

Rounding = Literal["nearest", "truncate", "stochastic"]


class Window(NamedTuple):
    """The values that have a code; that of zero is 0.

    Attributes:
      base: number of the smallest positive one, eps.
      positive: how many there are from eps upwards.
      negative: how many there are from -eps downwards.
      m: mantissa bits.
    """

    base: jax.Array | int
    positive: int
    negative: int
    m: int

    @property
    def eps(self) -> jax.Array:
        """The smallest positive value, float32[]."""
        return lax.bitcast_convert_type(
            jnp.asarray(self.base, jnp.int32) << (23 - self.m), jnp.float32
        )

    def encode(self, x: jax.Array, rounding: Rounding, noise: jax.Array) -> jax.Array:
        """Values float32[k] to codes uint32[k]; `noise` is random bits uint32[k], or zero."""
        shift = 23 - self.m
        magnitude = jnp.abs(x)
        low = {
            "nearest": jnp.uint32((1 << shift) >> 1),
            "truncate": jnp.uint32(0),
            "stochastic": noise & jnp.uint32((1 << shift) - 1),
        }[rounding]
        # Not magnitude >= eps / 2: half of the smallest normal number may be flushed to zero.
        to_eps = {
            "nearest": 2 * magnitude >= self.eps,
            "truncate": jnp.zeros(x.shape, bool),
            "stochastic": (noise >> 8).astype(jnp.float32) * 2.0**-24 * self.eps < magnitude,
        }[rounding]
        number = (lax.bitcast_convert_type(magnitude, jnp.uint32) + low) >> shift
        index = number.astype(jnp.int32) - self.base + 1
        # Written so that a NaN, which is not below eps, saturates instead of becoming zero.
        index = jnp.where(magnitude < self.eps, to_eps.astype(jnp.int32), index)
        negative = x < 0
        index = jnp.minimum(index, jnp.where(negative, self.negative, self.positive))
        return jnp.where(negative & (index > 0), index + self.positive, index).astype(jnp.uint32)

    def decode(self, codes: jax.Array) -> jax.Array:
        """Codes uint32[k] to values float32[k], finite whatever the codes are."""
        index = codes.astype(jnp.int32)
        negative = index > self.positive
        index = jnp.where(negative, jnp.minimum(index - self.positive, self.negative), index)
        number = jnp.minimum(index - 1 + self.base, _last(self.m))
        magnitude = lax.bitcast_convert_type(number << (23 - self.m), jnp.float32)
        magnitude = jnp.where(index > 0, magnitude, 0.0)
        return jnp.where(negative, -magnitude, magnitude)


def fitted(largest: jax.Array, codes: int, m: int, rounding: Rounding) -> Window:
    """The symmetric window of `codes` values that reaches up to `largest`."""
    shift = 23 - m
    up = {"nearest": (1 << shift) >> 1, "truncate": 0, "stochastic": (1 << shift) - 1}[rounding]
    top = jnp.minimum((lax.bitcast_convert_type(largest, jnp.int32) + up) >> shift, _last(m))
    # Not below the smallest normal number: subnormal ones are flushed to zero by accelerators.
    base = jnp.maximum(top - codes // 2 + 1, 1 << m)
    return Window(base, codes // 2, codes // 2, m)


def fixed(
    minimum: float,
    maximum: float,
    eps: float | None,
    codes: int,
    m: int,
    rounding: Rounding,
) -> Window:
    """The window from minimum to maximum; without eps, the one that uses up all the codes."""
    rounds = rounding == "nearest"
    top, bottom = number_of(maximum, m, rounds=rounds), number_of(-minimum, m, rounds=rounds)
    if eps is None:
        base = max(-((codes - top - bottom - 2) // 2), 1 << m)
    else:
        base = number_of(eps, m, rounds=False)
    return Window(base, top - base + 1, bottom - base + 1, m)


def number_of(value: float, m: int, *, rounds: bool) -> int:
    """The number of a positive value, rounded down or to the nearest."""
    half = (1 << (23 - m)) >> 1 if rounds else 0
    return min((int(np.float32(value).view(np.int32)) + half) >> (23 - m), _last(m))


def value_of(number: int, m: int) -> float:
    """The positive value of a number."""
    return float(np.int32(number << (23 - m)).view(np.float32))


def best_mantissa(codes: int, bits: int) -> int:
    """The m with the smallest expected squared error on normal values up to 5 sigma.

    Inside a binade the squared error is a share 3/7 · 4^-m of the energy, and of the values below
    eps √(2/π) · eps³, both up to the same factor, which depends on the rounding.
    """

    def error(m: int) -> float:
        eps = 5.0 * 2.0 ** (-(codes // 2 - 1) / 2**m)
        return 3 / 7 * 4.0**-m + math.sqrt(2 / math.pi) * eps**3

    return min(range(1, bits + 1), key=error)


def _last(m: int) -> int:
    """The number of the largest finite value."""
    return (255 << m) - 1


def codes(bits: int) -> int:
    """How many codes of a width stand for a value other than zero."""
    return 2**bits - 1


def mantissa(given: int | None, bits: int) -> int:
    """The number of mantissa bits, given or the best."""
    return best_mantissa(codes(bits), bits) if given is None else given


def check_format(owner: str, bits: int, given: int | None) -> None:
    """Refuses a width or a mantissa that is none."""
    remedy = "for more bits use no quantizer, for one bit keep signs only."
    check_count(f"{owner}(bits)", bits, remedy, 2, 16)
    if given is not None:
        remedy = f"use mantissa={mantissa(None, bits)}."
        check_count(f"{owner}(mantissa)", given, remedy, 1, bits)


def as_real(owner: str, x: jax.Array) -> jax.Array:
    """A float or complex vector as float32, real parts first."""
    if x.ndim != 1 or not jnp.issubdtype(x.dtype, jnp.inexact):
        raise ValueError(
            f"{owner}.compress(x): must be a float or complex vector, got {x.dtype}"
            f"{list(x.shape)}; a chain has one quantizer, at its end."
        )
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.concatenate([x.real, x.imag])
    return x.astype(jnp.float32)


def count(like: Like) -> int:
    """How many real values a vector has."""
    return math.prod(like.shape) * (1 + jnp.issubdtype(like.dtype, jnp.complexfloating))


def shaped(values: jax.Array, like: Like) -> jax.Array:
    """The inverse of `as_real`."""
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        return lax.complex(*jnp.split(values, 2))
    return values.astype(like.dtype)


def noise(owner: object, rounding: Rounding, step: Step, size: int) -> jax.Array:
    """Random bits for stochastic rounding, or zero."""
    if rounding != "stochastic":
        return jnp.zeros((), jnp.uint32)
    return _scale.noise_bits(owner, step, size)
