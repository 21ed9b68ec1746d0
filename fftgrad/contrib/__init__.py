"""Complete systems from papers, built on the core.

    gossip    exchange with neighbors only, without a collective over all workers
    votes     the votes of DataLens, and their privacy accounting
    learned   codes that an autoencoder learns during training

`fg.contrib.gossip` and the others are loaded on first access. The core does not import this room,
which may import the core.
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
