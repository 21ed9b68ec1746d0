"""Selectors: which coefficients travel."""

from fftgrad.codecs.selectors._ada_comp import AdaComp as AdaComp
from fftgrad.codecs.selectors._budget import Budget as Budget
from fftgrad.codecs.selectors._chunk_top_k import ChunkTopK as ChunkTopK
from fftgrad.codecs.selectors._one_sided import OneSided as OneSided
from fftgrad.codecs.selectors._random_k import RandomK as RandomK
from fftgrad.codecs.selectors._threshold import Threshold as Threshold
from fftgrad.codecs.selectors._top_k import TopK as TopK
