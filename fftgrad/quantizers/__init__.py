"""Quantizers: how many bits each coefficient gets."""

from fftgrad.quantizers._cast import Cast as Cast
from fftgrad.quantizers._levels import Levels as Levels
from fftgrad.quantizers._lloyd_max import LloydMax as LloydMax
from fftgrad.quantizers._one_mean import OneMean as OneMean
from fftgrad.quantizers._range_float import RangeFloat as RangeFloat
from fftgrad.quantizers._sign import Sign as Sign
from fftgrad.quantizers._ternary import Ternary as Ternary
