"""Transforms of blocks of a vector, or of tiles of a matrix: Fourier, Hadamard, cosine."""

import math
from collections.abc import Callable
from typing import NamedTuple

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
"""Values per FFT call, 1 GiB. Input, output and scratch space of cuFFT must stay below 4 GiB."""


def check_block(owner: str, block: int, most: int) -> None:
    check_count(f"{owner}(block)", block, "use block=64.", 2, most)
    power = not block & (block - 1)
    check(power, f"{owner}(block)", "be a power of two", block, "use block=64.")


def fit(block: int, n: int) -> int:
    """Return the block length, reduced to the next power of two >= n if n is smaller."""
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
    """Invert a transform only in the blocks that contain one of the few coefficients.

    `inverse` maps coefficients [rows, slots] to values float32[rows, block]. All coefficients of a
    block are inverted together: adding their separate inverses would round differently.
    """
    positions, values = coefficients
    (k,) = positions.shape
    owner, place = positions // slots, positions % slots
    starts = jnp.concatenate([jnp.ones((1,), bool), owner[1:] != owner[:-1]])
    row = _count.cumsum(starts.astype(jnp.int32)) - 1
    rows = jnp.zeros((k, slots), values.dtype)
    rows = rows.at[row, place].set(values, indices_are_sorted=True, unique_indices=True)
    # Unused rows get positions beyond the vector, so that all positions are distinct and ascend.
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
      >>> like = jax.ShapeDtypeStruct((100,), "float32")
      >>> fg.wire_bytes(fg.codecs.Identity(), like)  # with the header
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

    The vector is padded with zeros to blocks of b values. A block has b/2 + 1 coefficients c_j. As
    c_0 and c_{b/2} are real, they share one slot, and b/2 complex slots hold all coefficients:

        z_0 = c_0 + i c_{b/2},   z_j = √2 c_j   (0 < j < b/2).

    This is an isometry: Σ|z_j|² = Σ x_t². Dropping z_j adds |z_j|² to the squared error.

    Args:
      block: length b of a block, a power of two up to 2^28; a shorter vector is one block of the
        next power of two. None: one block for up to 2^28 values, or the fewest equal blocks for
        more. Then b is the next even number without a prime factor above 7.
      half: round to float16 first. Values beyond ±65504 saturate and are counted in `overflow`.

    Wire: x float32[n] -> main complex64[b/2 · ceil(n/b)].

    Claims: summable; unbiased and lossless up to rounding, unless `half`. One non-finite value
      makes its whole block non-finite. Finite values beyond 2^128 / √b can overflow to infinity.

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
    # XLA fuses a select into its reader, but stores the result of a concatenation.
    is_first = jnp.arange(b // 2)[None] == 0
    return jnp.where(is_first, first, c[:, :-1] * math.sqrt(2.0))


def _inverse(slots: jax.Array) -> jax.Array:
    b = 2 * slots.shape[1]
    if b <= PRODUCT:
        # The barrier keeps XLA from adding two products of halves, which rounds differently.
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
    """Return an orthogonal matrix; columns j and b/2 + j give real and imaginary parts of z_j."""
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

    The vector is padded with zeros to blocks of b values. A block x becomes y = H D x, where D is a
    diagonal matrix of signs, and H the b × b Hadamard matrix divided by √b. H² = I, so x = D H y.
    All values of y have a similar magnitude, which suits a quantizer with one scale.

    Args:
      block: length b of a block, a power of two up to 2^24; a shorter vector is one block, padded.
      signs: True to draw D from `step.shared`, equal on all workers. False: D = I. Then H maps some
        vectors, such as a constant, to a single non-zero coefficient.

    Wire: x float32[n] -> main float32[b · ceil(n/b)]. Signs are not sent.

    Claims: summable; unbiased and lossless up to rounding; an isometry. One non-finite value makes
      its whole block non-finite. Finite values beyond 2^128 / √b can overflow to infinity.

    Differs from the paper: DRIVE rotates the whole vector; this codec rotates each block.

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
        rows = self._flip(_shapes.rows(x, fit(self.block, x.size)), step)
        return Compressed(Payload(by_chunks(_hadamard, rows).ravel()))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        (n,) = like.shape
        rows = payload.main.reshape(-1, fit(self.block, n))
        return self._flip(by_chunks(_hadamard, rows), step).ravel()[:n]

    def _flip(self, rows: jax.Array, step: Step) -> jax.Array:
        if not self.signs:
            return rows
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
    """Build the matrix by Sylvester's construction, scaled to be orthogonal."""
    matrix = np.ones((1, 1), np.float32)
    while matrix.shape[0] < b:
        matrix = np.kron(matrix, np.array([[1, 1], [1, -1]], np.float32))
    return matrix / np.float32(math.sqrt(b))


Shape = tuple[int, int]

MAX_BLOCK = 1024


class Tiling(NamedTuple):
    """Tiles of `high` by `wide` values of a matrix of `shape`, padded with zeros."""

    shape: Shape
    high: int
    wide: int

    @property
    def grid(self) -> Shape:
        """Number of tiles down and across."""
        return -(-self.shape[0] // self.high), -(-self.shape[1] // self.wide)

    def cut(self, x: jax.Array, owner: object) -> jax.Array:
        """Cut a matrix into [tiles down, rows of a tile, tiles across, columns of a tile]."""
        (rows, columns), (down, across) = self.shape, self.grid
        rule, remedy = f"have {rows * columns} values", "give each part its own shape, by a rule."
        check(x.size == rows * columns, f"{owner!r}.compress(x)", rule, x.size, remedy)
        fill = [(0, down * self.high - rows), (0, across * self.wide - columns)]
        matrix = jnp.pad(x.reshape(self.shape), fill)
        return matrix.reshape(down, self.high, across, self.wide)

    def apart(self, tiles: jax.Array) -> jax.Array:
        """Reshape a vector of tiles to [tiles down, tiles across, rows, columns]."""
        return tiles.reshape(*self.grid, self.high, self.wide)

    def join(self, tiles: jax.Array) -> jax.Array:
        """Invert `cut`, flat and without padding."""
        (rows, columns), (down, across) = self.shape, self.grid
        matrix = tiles.reshape(down * self.high, across * self.wide)
        return matrix[:rows, :columns].ravel()


@value
class _Tiled(Transform):
    """Transform of each tile of a matrix, or of each block of a vector."""

    block: int = 64
    shape: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        check_block(type(self).__name__, self.block, MAX_BLOCK)

    @property
    def tile_size(self) -> int:
        """Number of values in a tile, or in a block if `shape` is None."""
        tiling = self._tiling(self.block)
        return tiling.high * tiling.wide

    def _tiling(self, n: int) -> Tiling:
        """Choose tiles of at most block by block values; pad a shorter axis to a power of two."""
        shape = self.shape or (1, n)
        high, wide = (1 if size == 1 else fit(self.block, size) for size in shape)
        return Tiling(shape, high, wide)


@value
class Tiles(_Tiled):
    """Transform: the values of a matrix, unchanged, in the order of its tiles.

    If `ChunkTopK(chunk=transform.tile_size)` is the next stage, it selects within each tile.

    Args:
      block: largest side of a tile, a power of two up to 1024. A shorter axis is one tile, padded.
      shape: rows and columns of the matrix, as in `Dct`. None: cut the vector into blocks.

    Wire: x float32[n] -> main float32[tiles · tile_size], padded with zeros.

    Claims: summable; unbiased and lossless.

    Differs from the paper: SparseLoCo cuts an axis at a divisor; this codec pads it, as `Dct` does.

    Example:
      >>> fg.compress(fg.codecs.Tiles(block=2, shape=(2, 3)), jnp.arange(6.0)).main
      Array([0., 1., 3., 4., 2., 0., 5., 0.], dtype=float32)

    References:
      Sarfi et al., 2025, arXiv:2508.15706 (SparseLoCo).
    """

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        check_real("Tiles", x)
        tiles = self._tiling(x.size).cut(x, self)
        return Compressed(Payload(jnp.swapaxes(tiles, 1, 2).ravel()))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        tiling = self._tiling(like.shape[0])
        return tiling.join(jnp.swapaxes(tiling.apart(payload.main), 1, 2))


@value
class Dct(_Tiled):
    """Transform: the orthonormal cosine transform (DCT-II) of blocks of the vector, or of tiles.

    The vector is padded with zeros to blocks of b values. A product with a b × b matrix transforms
    a block x to

        y_j = s_j √(2/b) Σ_t x_t cos(π (2t + 1) j / 2b),   s_0 = √½, s_j = 1 otherwise,

    an isometry: Σ y_j² = Σ x_t². With a `shape`, the vector is a matrix of this shape, padded with
    zeros to tiles of at most b × b values. Each tile is transformed along both axes. The payload
    holds the tiles one by one, so `ChunkTopK(chunk=transform.tile_size)` selects within each tile.

    Args:
      block: length b of a block, or largest side of a tile, a power of two up to 1024. A shorter
        vector or axis is one block of the next power of two.
      shape: rows and columns of the matrix; the last axis of a leaf gives the columns. Use it with
        `Bucketing("leaf")` and a function from each leaf to its codec. None: cut the vector.

    Wire: x float32[n] -> main float32[b · ceil(n/b)], or float32[tiles · tile_size].

    Claims: summable; unbiased and lossless up to rounding. One non-finite value makes its whole
      block or tile non-finite. Finite values beyond 2^128 / √b can overflow to infinity.

    Differs from the paper: DeMo cuts an axis into pieces of its largest divisor up to 64, which is
      1 for a prime length. This codec pads the axis.

    Example:
      >>> y = fg.compress(fg.Dct(block=4), jnp.array([1.0, 1.0, 1.0, 1.0, 3.0])).main
      >>> y.shape, bool(jnp.allclose(y[:4], jnp.array([2.0, 0.0, 0.0, 0.0]), atol=1e-6))
      ((8,), True)

    References:
      Ahmed, Natarajan and Rao, "Discrete Cosine Transform", IEEE Trans. Computers, 1974. Peng,
      Quesnelle and Kingma, 2024, arXiv:2411.19870 (DeMo).
    """

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        check_real("Dct", x)
        if self.shape is not None:
            tiling = self._tiling(x.size)
            y = _both("aibj,ik,jl->abkl", tiling.cut(x, self), tiling)
            return Compressed(Payload(y.ravel()))
        waves = basis(self.reach(x.size))
        rows = _shapes.rows(x, len(waves))
        return Compressed(Payload(_product(rows, waves).ravel()))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        (n,) = like.shape
        if self.shape is not None:
            tiling = self._tiling(n)
            tiles = tiling.apart(payload.main)
            return tiling.join(_both("abkl,ik,jl->aibj", tiles, tiling))
        waves = basis(self.reach(n))
        return _product(payload.main.reshape(-1, len(waves)), waves.T).ravel()[:n]

    def reach(self, n: int) -> int:
        return fit(self.block, n) if self.shape is None else n

    def at_blocks(self, coefficients: Sparse, like: Like, step: Step) -> Sparse:
        (n,) = like.shape
        b = self.reach(n)
        inverse = basis(b).T
        return at_blocks(coefficients, n, lambda r: times(r, inverse), b, b)


def basis(b: int) -> np.ndarray:
    """Return the orthogonal matrix whose column j is the j-th cosine of b values."""
    t, j = np.ogrid[:b, :b]
    waves = np.sqrt(2 / b) * np.cos(np.pi * (2 * t + 1) * j / (2 * b))
    waves[:, 0] *= np.sqrt(0.5)
    return waves.astype(np.float32)


def _product(rows: jax.Array, matrix: np.ndarray) -> jax.Array:
    return by_chunks(lambda r: times(r, matrix), rows)


def _both(spec: str, tiles: jax.Array, tiling: Tiling) -> jax.Array:
    high, wide = basis(tiling.high), basis(tiling.wide)
    return jnp.einsum(spec, tiles, high, wide, precision=lax.Precision.HIGHEST)
