"""Selectors: which coefficients travel."""

from fftgrad.codecs.selectors._ada_comp import AdaComp
from fftgrad.codecs.selectors._alternating_sign import AlternatingSign
from fftgrad.codecs.selectors._budget import Budget
from fftgrad.codecs.selectors._chunk_top_k import ChunkTopK
from fftgrad.codecs.selectors._random_k import RandomK
from fftgrad.codecs.selectors._threshold import Threshold
from fftgrad.codecs.selectors._top_k import TopK

__all__ = [
    "AdaComp",
    "AlternatingSign",
    "Budget",
    "ChunkTopK",
    "RandomK",
    "Threshold",
    "TopK",
]
