"""Transforms: invertible linear maps to a basis in which a gradient is compact."""

from fftgrad.transforms._dct import Dct as Dct
from fftgrad.transforms._fft import Fft as Fft
from fftgrad.transforms._hadamard import Hadamard as Hadamard
from fftgrad.transforms._identity import Identity as Identity
from fftgrad.transforms._one_sided import OneSided as OneSided
from fftgrad.transforms._tile_dct import TileDct as TileDct
