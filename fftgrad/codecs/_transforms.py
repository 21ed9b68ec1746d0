"""Transforms of blocks of a vector: Fourier, Hadamard and identity."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fftgrad._contracts import Compressed, Like, Payload, PyTree, Sparse, Step, Transform
from fftgrad._values import check, check_count, value
from fftgrad.codecs._quantizers import check_real
from fftgrad.ops import _count, _random, _shapes
from fftgrad.ops._rounding import saturating_cast, times

CHUNK = 1 << 28
"""Values per transform call, 1 GiB. Input, output and scratch space then stay below 4 GiB, cuFFT's
limit.
"""


def check_block(owner: str, block: int, most: int) -> None:
    check_count(f"{owner}(block)", block, "use block=64.", 2, most)
    power = not block & (block - 1)
    check(power, f"{owner}(block)", "be a power of two", block, "use block=64.")


def fit(block: int, n: int) -> int:
    """Return the block length, at most the least power of two that holds the whole vector."""
    return min(block, 1 << max(1, (n - 1).bit_length()))


def by_chunks(transform: Callable[[jax.Array], jax.Array], rows: jax.Array) -> jax.Array:
    """Apply a row-wise transform in pieces of at most CHUNK values."""
    limit = max(1, CHUNK // rows.shape[1])
    if rows.shape[0] <= limit:
        return transform(rows)
    pieces = -(-rows.shape[0] // limit)
    size = -(-rows.shape[0] // pieces)
    padded = jnp.pad(rows, ((0, pieces * size - rows.shape[0]), (0, 0)))
    out = lax.map(transform, padded.reshape(pieces, size, -1))
    return out.reshape(pieces * size, -1)[: rows.shape[0]]


def at_blocks(
    coefficients: Sparse, n: int, inverse: Callable[[jax.Array], jax.Array], block: int, slots: int
) -> Sparse:
    """Invert a transform of few coefficients, only at the blocks that contain them.

    `inverse` maps rows [., slots] of coefficients to rows float32[., block]. The coefficients of a
    block are gathered first, because sums in another order would differ between replicas.
    """
    positions, values = coefficients
    (k,) = positions.shape
    owner, place = positions // slots, positions % slots
    starts = jnp.concatenate([jnp.ones((1,), bool), owner[1:] != owner[:-1]])
    row = _count.cumsum(starts.astype(jnp.int32)) - 1
    rows = jnp.zeros((k, slots), values.dtype)
    rows = rows.at[row, place].set(values, indices_are_sorted=True, unique_indices=True)
    # Unused rows get distinct positions beyond the vector, so all positions ascend and differ.
    beyond = -(-n // block)
    owners = beyond + jnp.arange(k, dtype=jnp.int32)
    owners = owners.at[row].set(jnp.minimum(owner, beyond + row), indices_are_sorted=True)
    at = block * owners[:, None] + jnp.arange(block, dtype=jnp.int32)[None]
    return Sparse(at, inverse(rows))


@value
class Identity(Transform):
    """Transform: the vector itself, for dense baselines.

    Wire: x dtype[n] -> main dtype[n].

    Claims: summable; unbiased; lossless, bit for bit.

    Example:
      >>> fg.wire_bytes(fg.Identity(), like=jax.ShapeDtypeStruct((100,), "float32"))  # + header
      404
    """

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        return Compressed(Payload(x))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        return payload.main


PRODUCT = 64
"""Longest block for which a matrix product is faster than an FFT."""


@value
class Fft(Transform):
    """Transform: the orthonormal real Fourier transform of each block of the vector.

    The vector is padded with zeros to blocks of b values. Of the b/2 + 1 coefficients c_j of a
    real block, c_0 and c_{b/2} are real, so b/2 complex slots hold them all:

        z_0 = c_0 + i c_{b/2},   z_j = √2 c_j   (0 < j < b/2).

    x -> z is an isometry: Σ|z_j|² = Σ x_t². The squared error is the sum of the dropped |z_j|².

    Args:
      block: length b of a block, a power of two up to 2^28; a shorter vector is one block of the
        next power of two. None: one block for the whole vector, padded to the next even number
        whose prime factors are 2, 3, 5 and 7; beyond 2^28 values, few equal blocks.
      half: round the vector to float16 first. Values saturate at ±65504 and are counted.

    Wire: x float32[n] -> main complex64[b/2 · ceil(n/b)].

    Claims: summable; unbiased and lossless up to rounding, unless `half`. One non-finite value
      makes its whole block non-finite, as may finite values beyond 2^128 / √b.

    Differs from the paper: the paper transforms the whole gradient (`block=None, half=True`).

    Example:
      >>> z = fg.compress(fg.Fft(block=4), jnp.array([1.0, 1.0, 1.0, 1.0, 3.0])).main
      >>> z.shape, round(float(jnp.sum(jnp.abs(z) ** 2)), 4)
      ((4,), 13.0)

    References:
      Wang et al., HPDC 2020, arXiv:1811.08596.
    """

    block: int | None = 256
    half: bool = False

    def __post_init__(self) -> None:
        if self.block is not None:
            check_block("Fft", self.block, CHUNK)

    @property
    def unbiased(self) -> bool:
        return not self.half

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        check_real("Fft", x)
        overflow: jax.Array | int = 0
        if self.half:
            narrow, overflow = saturating_cast(x, jnp.float16)
            x = narrow.astype(jnp.float32)
        rows = _shapes.rows(x, self.reach(x.size))
        return Compressed(Payload(_slots(rows).ravel()), overflow)

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        (n,) = like.shape
        return _inverse(payload.main.reshape(-1, self.reach(n) // 2)).ravel()[:n]

    def reach(self, n: int) -> int:
        if self.block is None:
            return _next_smooth(-(-n // -(-n // CHUNK)))
        return fit(self.block, n)

    def at_blocks(self, coefficients: Sparse, like: Like, step: Step) -> Sparse:
        (n,) = like.shape
        b = self.reach(n)
        return at_blocks(coefficients, n, _inverse, b, b // 2)


def _slots(rows: jax.Array) -> jax.Array:
    b = rows.shape[1]
    if b <= PRODUCT:
        parts = by_chunks(lambda r: times(r, fourier_basis(b)), rows)
        return lax.complex(parts[:, : b // 2], parts[:, b // 2 :])
    c = by_chunks(lambda r: jnp.fft.rfft(r, norm="ortho"), rows)
    first = lax.complex(c[:, :1].real, c[:, -1:].real)
    # XLA fuses a select into its reader, so nothing is stored, unlike a concatenation.
    is_first = jnp.arange(b // 2)[None] == 0
    return jnp.where(is_first, first, c[:, :-1] * math.sqrt(2.0))


def _inverse(slots: jax.Array) -> jax.Array:
    b = 2 * slots.shape[1]
    if b <= PRODUCT:
        # The barrier prevents two products of halves, whose sum rounds differently.
        parts = lax.optimization_barrier(jnp.concatenate([slots.real, slots.imag], axis=1))
        return by_chunks(lambda r: times(r, fourier_basis(b).T), parts)

    def inverse(z: jax.Array) -> jax.Array:
        first = z[:, :1]
        c = jnp.pad(z * math.sqrt(0.5), ((0, 0), (0, 1)))
        zero = jnp.zeros_like(first.real)
        c = c.at[:, :1].set(lax.complex(first.real, zero))
        c = c.at[:, -1:].set(lax.complex(first.imag, zero))
        return jnp.fft.irfft(c, n=b, norm="ortho")

    return by_chunks(inverse, slots)


def fourier_basis(b: int) -> np.ndarray:
    """Return an orthogonal matrix: columns j and b/2 + j are the parts of complex slot j."""
    t, j = np.ogrid[:b, : b // 2]
    angle = 2 * np.pi * (t * j % b) / b
    real, imaginary = np.sqrt(2 / b) * np.cos(angle), -np.sqrt(2 / b) * np.sin(angle)
    real[:, 0], imaginary[:, 0] = np.sqrt(1 / b), np.sqrt(1 / b) * (-1.0) ** t[:, 0]
    return np.concatenate([real, imaginary], axis=1).astype(np.float32)


def _next_smooth(n: int) -> int:
    """Return the least even number >= n, at most 2^28, without a prime factor above 7."""
    candidate = n + n % 2
    while candidate < 2 or 210**30 % candidate:
        candidate += 2
    return candidate


MOST = 1 << 24
FACTOR = 64


@value
class Hadamard(Transform):
    """Transform: random signs, then the orthonormal Hadamard transform of each block.

    The vector is padded with zeros to blocks of b values, and a block x becomes y = H D x, with D
    a diagonal of signs and H the b × b Hadamard matrix over √b. H² = I, so x = D H y. All
    coefficients of a block become similar in magnitude, which suits a quantizer with one scale.

    Args:
      block: length b of a block, a power of two up to 2^24; a shorter vector is one block, padded.
      signs: True to flip signs at random first, drawn from `step.shared`, equal on all workers.
        Without flips, H maps some vectors, such as a constant, to a single coefficient.

    Wire: x float32[n] -> main float32[b · ceil(n/b)]. Signs are not sent.

    Claims: summable; unbiased and lossless up to rounding; an isometry. One non-finite value makes
      its whole block non-finite, as may finite values beyond 2^128 / √b.

    Differs from the paper: DRIVE rotates whole vectors, this codec blocks of fixed length.

    Example:
      >>> x = jnp.array([8.0, 0.0, 0.0, 0.0])
      >>> fg.compress(fg.Hadamard(block=4, signs=False), x).main
      Array([4., 4., 4., 4.], dtype=float32)

    References:
      Vargaftik et al., NeurIPS 2021, arXiv:2105.08339 (DRIVE).
    """

    block: int = 4096
    signs: bool = True

    def __post_init__(self) -> None:
        check_block("Hadamard", self.block, MOST)

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        check_real("Hadamard", x)
        rows = _shapes.rows(x, fit(self.block, x.size))
        if self.signs:
            rows = self._flip(rows, step)
        return Compressed(Payload(by_chunks(_hadamard, rows).ravel()))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        (n,) = like.shape
        rows = payload.main.reshape(-1, fit(self.block, n))
        rows = by_chunks(_hadamard, rows)
        if self.signs:
            rows = self._flip(rows, step)
        return rows.ravel()[:n]

    def _flip(self, rows: jax.Array, step: Step) -> jax.Array:
        remedy = " to compress and decompress, or use signs=False"
        bits = _random.drawn_bits(self, step.shared, rows.size, remedy).reshape(rows.shape)
        return jnp.where(bits >> 31 == 1, -rows, rows)


def _hadamard(rows: jax.Array) -> jax.Array:
    count, block = rows.shape
    done = 1
    while done < block:
        factor = min(FACTOR, block // done)
        parts = rows.reshape(count, block // (done * factor), factor, done)
        rows = jnp.einsum(
            "caib,ij->cajb", parts, hadamard_matrix(factor), precision=lax.Precision.HIGHEST
        )
        done *= factor
    return rows.reshape(count, block)


def hadamard_matrix(b: int) -> np.ndarray:
    """Sylvester's construction, scaled to be orthogonal."""
    matrix = np.ones((1, 1), np.float32)
    while matrix.shape[0] < b:
        matrix = np.kron(matrix, np.array([[1, 1], [1, -1]], np.float32))
    return matrix / np.float32(math.sqrt(b))
