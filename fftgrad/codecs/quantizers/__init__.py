"""Quantizers: how many bits each coefficient gets. They come last in a chain."""

from fftgrad.codecs.quantizers._bin_means import BinMeans
from fftgrad.codecs.quantizers._cast import Cast
from fftgrad.codecs.quantizers._lloyd_max import LloydMax
from fftgrad.codecs.quantizers._log_levels import LogLevels
from fftgrad.codecs.quantizers._range_float import FixedRangeFloat, RangeFloat
from fftgrad.codecs.quantizers._sign import DynamicSign, MeanMagnitude, Sign
from fftgrad.codecs.quantizers._ternary import Ternary
from fftgrad.codecs.quantizers._uniform_levels import UniformLevels

__all__ = [
    "BinMeans",
    "Cast",
    "DynamicSign",
    "FixedRangeFloat",
    "LloydMax",
    "LogLevels",
    "MeanMagnitude",
    "RangeFloat",
    "Sign",
    "Ternary",
    "UniformLevels",
]
