"""Codecs, which compress vectors. May import `ops`, `_contracts`, `_axes` and `_values`."""

from fftgrad._contracts import Codec, Compressed, Payload, Quantizer, Selector, Transform
from fftgrad.codecs._budget import Budget
from fftgrad.codecs._chain import chain
from fftgrad.codecs._levels import BinMeans, LloydMax, LogQuantizer
from fftgrad.codecs._quantizers import (
    Cast,
    DynamicSign,
    MeanMagnitude,
    Sign,
    Ternary,
    UniformQuantizer,
)
from fftgrad.codecs._range_float import RangeFloat
from fftgrad.codecs._threshold import AdaComp, AlternatingSign, Threshold
from fftgrad.codecs._top_k import ChunkTopK, RandomK, TopK
from fftgrad.codecs._transforms import Dct, Fft, Hadamard, Identity, Tiles
from fftgrad.ops._finite import poison
from fftgrad.ops._positions import Sparse

__all__ = [
    "AdaComp",
    "AlternatingSign",
    "BinMeans",
    "Budget",
    "Cast",
    "ChunkTopK",
    "Codec",
    "Compressed",
    "Dct",
    "DynamicSign",
    "Fft",
    "Hadamard",
    "Identity",
    "LloydMax",
    "LogQuantizer",
    "MeanMagnitude",
    "Payload",
    "Quantizer",
    "RandomK",
    "RangeFloat",
    "Selector",
    "Sign",
    "Sparse",
    "Ternary",
    "Threshold",
    "Tiles",
    "TopK",
    "Transform",
    "UniformQuantizer",
    "chain",
    "poison",
]
