"""Complete systems from papers, built on the core.

    gossip    exchange with neighbors only, without a collective over all workers
    votes     the votes of DataLens, and their privacy accounting
    learned   LGC: codes from an autoencoder that learns during training

Each of these modules is loaded on first access. They may import the core, which imports none of
them.
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
