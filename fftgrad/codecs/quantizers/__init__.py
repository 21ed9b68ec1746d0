"""Quantizers: how many bits each coefficient gets. They come last in a chain."""

from fftgrad.codecs.quantizers._bin_means import BinMeans as BinMeans
from fftgrad.codecs.quantizers._cast import Cast as Cast
from fftgrad.codecs.quantizers._dynamic_sign import DynamicSign as DynamicSign
from fftgrad.codecs.quantizers._fixed_range_float import FixedRangeFloat as FixedRangeFloat
from fftgrad.codecs.quantizers._levels import Levels as Levels
from fftgrad.codecs.quantizers._lloyd_max import LloydMax as LloydMax
from fftgrad.codecs.quantizers._log_levels import LogLevels as LogLevels
from fftgrad.codecs.quantizers._one_mean import OneMean as OneMean
from fftgrad.codecs.quantizers._range_float import RangeFloat as RangeFloat
from fftgrad.codecs.quantizers._sign import Sign as Sign
from fftgrad.codecs.quantizers._ternary import Ternary as Ternary
