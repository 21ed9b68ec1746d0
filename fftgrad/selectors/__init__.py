"""Selectors: which coefficients travel."""

from fftgrad.selectors._top_k import TopK as TopK
