"""Codecs: one vector <-> what is sent for it. May import `ops`, the contracts and `_axes`."""

from fftgrad.codecs._chain import chain
from fftgrad.codecs.quantizers import (
    BinMeans,
    Cast,
    DynamicSign,
    FixedRangeFloat,
    LloydMax,
    LogLevels,
    MeanMagnitude,
    RangeFloat,
    Sign,
    Ternary,
    UniformLevels,
)
from fftgrad.codecs.selectors import (
    AdaComp,
    AlternatingSign,
    Budget,
    ChunkTopK,
    RandomK,
    Threshold,
    TopK,
)
from fftgrad.codecs.transforms import Dct, Fft, Hadamard, Identity, Tiles
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
