"""Memories: what a worker remembers of what it could not send. May import the contracts."""

from fftgrad.memories._error_feedback import ErrorFeedback
from fftgrad.memories._momentum_correction import MomentumCorrection
from fftgrad.memories._no_memory import NoMemory

__all__ = [
    "ErrorFeedback",
    "MomentumCorrection",
    "NoMemory",
]
