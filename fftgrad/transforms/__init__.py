"""Transforms: invertible linear maps to a basis in which a gradient is compact."""

from fftgrad.transforms._dct import Dct as Dct
from fftgrad.transforms._fft import Fft as Fft
from fftgrad.transforms._hadamard import Hadamard as Hadamard
from fftgrad.transforms._identity import Identity as Identity
