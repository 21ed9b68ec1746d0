"""Codes that are learned on the way, by an autoencoder in Flax.

It takes an extra: `pip install -e ".[learned]"`.
"""

from fftgrad.contrib._autoencoder import Autoencoder, learn
from fftgrad.contrib._learned_codes import LearnedCodes, LearnedCodesState
from fftgrad.contrib._lgc import lgc

__all__ = [
    "Autoencoder",
    "LearnedCodes",
    "LearnedCodesState",
    "learn",
    "lgc",
]
