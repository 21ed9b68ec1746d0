"""What a basis makes of a vector: coefficients, and how their energy is spread."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fftgrad._contracts import Codec
from fftgrad.codecs.transforms import Dct, Fft, Hadamard, Identity
from fftgrad.codecs.transforms._dct import basis
from fftgrad.codecs.transforms._hadamard import matrix

Array = npt.NDArray[Any]

KEPT = (0.1, 0.01, 0.001)
"""Of the coefficients, counted in real numbers."""


class Basis(NamedTuple):
    """A change of basis.

    Attributes:
      name: what tables call it.
      codec: the transform of the library, if there is one for it.
      squares: from rows [r, n] to the squared coefficients [r, m] of each.
      reals: how many real numbers a coefficient has.
    """

    name: str
    codec: Codec | None
    squares: Callable[[Array], Array]
    reals: int = 1


def _blocks(rows: Array, block: int) -> Array:
    """The rows [r, n] in blocks [r, c, b], of which the last is filled with zeros."""
    count, n = rows.shape
    fill = -n % block
    return np.pad(rows, ((0, 0), (0, fill))).reshape(count, -1, block)


def _flat(blocks: Array) -> Array:
    return blocks.reshape(blocks.shape[0], -1)


def _none(rows: Array) -> Array:
    return np.square(rows)


def _dct(block: int) -> Callable[[Array], Array]:
    matrix = basis(block)
    return lambda rows: _flat(np.square(_blocks(rows, block) @ matrix))


def _long_dct(block: int) -> Callable[[Array], Array]:
    """By a fast algorithm: the product is for short blocks."""

    def squares(rows: Array) -> Array:
        return _flat(np.square(_cosines(_blocks(rows, block))))

    return squares


def _cosines(x: Array) -> Array:
    """The orthonormal DCT-II of the last axis, by a Fourier transform of the reordered values.

    Makhoul, "A fast cosine transform in one and two dimensions", IEEE Trans. ASSP, 1980.
    """
    n = x.shape[-1]
    z = np.fft.fft(np.concatenate([x[..., ::2], x[..., ::-2]], axis=-1), norm="ortho")
    turned = (z * np.exp(-0.5j * np.pi * np.arange(n) / n).astype(z.dtype)).real * math.sqrt(2)
    turned[..., 0] *= math.sqrt(0.5)
    return turned


def _fft(block: int) -> Callable[[Array], Array]:
    return lambda rows: _flat(_slots(_blocks(rows, block)))


def _whole(rows: Array) -> Array:
    return _slots(np.pad(rows, ((0, 0), (0, rows.shape[1] % 2))))


def _slots(x: Array) -> Array:
    """The squares of the complex coefficients along the last axis, as `Fft` has them."""
    c = np.square(np.abs(np.fft.rfft(x, norm="ortho")))
    return np.concatenate([c[..., :1] + c[..., -1:], 2 * c[..., 1:-1]], axis=-1)


def _hadamard(rows: Array) -> Array:
    blocks = _blocks(rows, 4096)
    signs = np.random.default_rng(0).integers(0, 2, blocks.shape[1:], np.int8) * np.float32(2) - 1
    return _flat(np.square(walsh(blocks * signs)))


def walsh(x: Array) -> Array:
    """The orthonormal Hadamard transform of the last axis, of 4096 values, by its two factors."""
    pairs = x.reshape(*x.shape[:-1], 64, 64)
    return (matrix(64) @ pairs @ matrix(64)).reshape(x.shape)


BASES = (
    Basis("none", Identity(), _none),
    Basis("Dct 16", Dct(block=16), _dct(16)),
    Basis("Dct 64", Dct(block=64), _dct(64)),
    Basis("Dct 4096", None, _long_dct(4096)),
    Basis("Fft 64", Fft(block=64), _fft(64), 2),
    Basis("Fft 4096", Fft(block=4096), _fft(4096), 2),
    Basis("Fft whole", Fft(block=None), _whole, 2),
    Basis("Hadamard", Hadamard(), _hadamard),
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
