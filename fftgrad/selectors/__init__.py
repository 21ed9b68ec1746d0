"""Selectors: which coefficients travel."""

from fftgrad.selectors._ada_comp import AdaComp as AdaComp
from fftgrad.selectors._chunk_top_k import ChunkTopK as ChunkTopK
from fftgrad.selectors._random_k import RandomK as RandomK
from fftgrad.selectors._threshold import Threshold as Threshold
from fftgrad.selectors._top_k import TopK as TopK
