"""Transforms: invertible linear maps to a basis in which a gradient is compact."""

from fftgrad.codecs.transforms._dct import Dct as Dct
from fftgrad.codecs.transforms._fft import Fft as Fft
from fftgrad.codecs.transforms._hadamard import Hadamard as Hadamard
from fftgrad.codecs.transforms._identity import Identity as Identity
from fftgrad.codecs.transforms._tiles import Tiles as Tiles
