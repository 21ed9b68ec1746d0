"""Codecs: one vector <-> what is sent for it. May import `ops`, the contracts and `_axes`."""

from fftgrad.codecs._chain import chain
from fftgrad.codecs.quantizers._bin_means import BinMeans
from fftgrad.codecs.quantizers._cast import Cast
from fftgrad.codecs.quantizers._lloyd_max import LloydMax
from fftgrad.codecs.quantizers._log_levels import LogLevels
from fftgrad.codecs.quantizers._range_float import FixedRangeFloat, RangeFloat
from fftgrad.codecs.quantizers._sign import DynamicSign, MeanMagnitude, Sign
from fftgrad.codecs.quantizers._ternary import Ternary
from fftgrad.codecs.quantizers._uniform_levels import UniformLevels
from fftgrad.codecs.selectors._ada_comp import AdaComp
from fftgrad.codecs.selectors._alternating_sign import AlternatingSign
from fftgrad.codecs.selectors._budget import Budget
from fftgrad.codecs.selectors._chunk_top_k import ChunkTopK
from fftgrad.codecs.selectors._random_k import RandomK
from fftgrad.codecs.selectors._threshold import Threshold
from fftgrad.codecs.selectors._top_k import TopK
from fftgrad.codecs.transforms._dct import Dct
from fftgrad.codecs.transforms._fft import Fft
from fftgrad.codecs.transforms._hadamard import Hadamard
from fftgrad.codecs.transforms._identity import Identity
from fftgrad.codecs.transforms._tiles import Tiles
from fftgrad.ops._finite import poison
from fftgrad.ops._sparse import Sparse

__all__ = [
    "AdaComp",
    "AlternatingSign",
    "BinMeans",
    "Budget",
    "Cast",
    "ChunkTopK",
    "Dct",
    "DynamicSign",
    "Fft",
    "FixedRangeFloat",
    "Hadamard",
    "Identity",
    "LloydMax",
    "LogLevels",
    "MeanMagnitude",
    "RandomK",
    "RangeFloat",
    "Sign",
    "Sparse",
    "Ternary",
    "Threshold",
    "Tiles",
    "TopK",
    "UniformLevels",
    "chain",
    "poison",
]
