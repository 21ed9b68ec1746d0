"""Whole systems of papers, on the parts of the core, which imports nothing of them.

    gossip    workers that talk to neighbors only: no collective over all
    votes     the votes of DataLens, and what noisy ones tell of a worker
    learned   codes that an autoencoder learns on the way

Each is loaded when it is asked for, as `fg.contrib.gossip`. May import the core.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from fftgrad.contrib import gossip, learned, votes

__all__ = ["gossip", "learned", "votes"]


def __getattr__(name: str) -> object:
    if name in ("gossip", "learned", "votes"):
        return _import_module(f"fftgrad.contrib.{name}")
    raise AttributeError(f"module 'fftgrad.contrib' has no attribute {name!r}")
