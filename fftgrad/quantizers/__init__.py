"""Quantizers: how many bits each coefficient gets."""

from fftgrad.quantizers._cast import Cast as Cast
from fftgrad.quantizers._range_float import RangeFloat as RangeFloat
