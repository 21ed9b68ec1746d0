"""Memories: what a worker remembers of what it could not send. May import the contracts."""

from fftgrad.memories._error_feedback import ErrorFeedback, NoMemory
from fftgrad.memories._momentum_correction import MomentumCorrection

__all__ = [
    "ErrorFeedback",
    "MomentumCorrection",
    "NoMemory",
]
