"""Transforms: invertible linear maps to a basis in which a gradient is compact."""

from fftgrad.codecs.transforms._dct import Dct
from fftgrad.codecs.transforms._fft import Fft
from fftgrad.codecs.transforms._hadamard import Hadamard
from fftgrad.codecs.transforms._identity import Identity
from fftgrad.codecs.transforms._tiles import Tiles

__all__ = [
    "Dct",
    "Fft",
    "Hadamard",
    "Identity",
    "Tiles",
]
