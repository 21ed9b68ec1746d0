"""Transforms: invertible linear maps to a basis in which a gradient is compact."""

from fftgrad.transforms._fft import Fft as Fft
from fftgrad.transforms._identity import Identity as Identity
