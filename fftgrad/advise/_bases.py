"""What a basis makes of a vector: coefficients, and how their energy is spread."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

import fftgrad as fg
from fftgrad.advise._gradient_files import Array
from fftgrad.codecs.transforms._dct import basis
from fftgrad.codecs.transforms._hadamard import matrix

KEPT = (0.1, 0.01, 0.001)
"""Of the coefficients, counted in real numbers."""


class Basis(NamedTuple):
    """A change of basis."""

    name: str  # what tables call it
    codec: fg.Codec | None  # the transform of the library, if there is one for it
    squares: Callable[[Array], Array]  # from rows [r, n] to the squared coefficients [r, m] of each
    reals: int = 1  # how many real numbers a coefficient has


def blocks(rows: Array, size: int) -> Array:
    """The rows [r, n] in blocks [r, c, size], of which the last is filled with zeros."""
    count, n = rows.shape
    return np.pad(rows, ((0, 0), (0, -n % size))).reshape(count, -1, size)


def _in_blocks(squares: Callable[[Array], Array], size: int | None) -> Callable[[Array], Array]:
    """The squares of blocks of a size, or of rows as a whole, as rows again."""

    def run(rows: Array) -> Array:
        even = rows.shape[1] + rows.shape[1] % 2
        return squares(blocks(rows, size or even)).reshape(len(rows), -1)

    return run


def _dct(x: Array) -> Array:
    return np.square(x @ basis(x.shape[-1]))


def _long_dct(x: Array) -> Array:
    """The orthonormal DCT-II of the last axis, by a Fourier transform of the reordered values.

    Makhoul, "A fast cosine transform in one and two dimensions", IEEE Trans. ASSP, 1980.
    """
    n = x.shape[-1]
    z = np.fft.fft(np.concatenate([x[..., ::2], x[..., ::-2]], axis=-1), norm="ortho")
    turned = (z * np.exp(-0.5j * np.pi * np.arange(n) / n).astype(z.dtype)).real * math.sqrt(2)
    turned[..., 0] *= math.sqrt(0.5)
    return np.square(turned)


def _fft(x: Array) -> Array:
    """The complex coefficients along the last axis, as `Fft` has them."""
    c = np.square(np.abs(np.fft.rfft(x, norm="ortho")))
    return np.concatenate([c[..., :1] + c[..., -1:], 2 * c[..., 1:-1]], axis=-1)


def _hadamard(x: Array) -> Array:
    """After random signs, which are others than those of the library."""
    signs = np.random.default_rng(0).integers(0, 2, x.shape[1:], np.int8) * np.float32(2) - 1
    return np.square(walsh(x * signs))


def walsh(x: Array) -> Array:
    """The orthonormal Hadamard transform of the last axis, of 4096 values, by its two factors."""
    pairs = x.reshape(*x.shape[:-1], 64, 64)
    return (matrix(64) @ pairs @ matrix(64)).reshape(x.shape)


BASES = (
    Basis("none", fg.Identity(), np.square),
    Basis("Dct 16", fg.Dct(block=16), _in_blocks(_dct, 16)),
    Basis("Dct 64", fg.Dct(block=64), _in_blocks(_dct, 64)),
    Basis("Dct 4096", None, _in_blocks(_long_dct, 4096)),
    Basis("Fft 64", fg.Fft(block=64), _in_blocks(_fft, 64), 2),
    Basis("Fft 4096", fg.Fft(block=4096), _in_blocks(_fft, 4096), 2),
    Basis("Fft whole", fg.Fft(block=None), _in_blocks(_fft, None), 2),
    Basis("Hadamard", fg.Hadamard(), _in_blocks(_hadamard, 4096)),
)


def dropped(squares: Array, n: int, reals: int) -> Array:
    """The relative error of keeping the largest coefficients of each row, at each of `KEPT`.

    The norm of all that is dropped over that of all; 0 where all is zero.
    """
    size = squares.shape[1]
    counts = [min(size, max(1, math.ceil(share * n) // reals)) for share in KEPT]
    places = sorted({min(size - count, size - 1) for count in counts})
    parted = np.partition(squares, places, axis=1)
    total = float(np.sum(parted, dtype=np.float64))
    lost = [float(np.sum(parted[:, : size - count], dtype=np.float64)) for count in counts]
    return np.sqrt(np.asarray(lost) / (total or 1.0))
