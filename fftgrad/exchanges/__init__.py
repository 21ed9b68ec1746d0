"""Exchanges: the collective, and what is decoded and averaged after it.

May import `codecs`, `memories`, `ops`, the contracts and `_axes`.
"""

from fftgrad._contracts import Channel, State, Tally
from fftgrad.exchanges._all_gather import AllGather
from fftgrad.exchanges._all_reduce import AllReduce
from fftgrad.exchanges._eigenbasis import Eigenbasis
from fftgrad.exchanges._hierarchical import Hierarchical
from fftgrad.exchanges._integer_sum import IntegerSum
from fftgrad.exchanges._layout import Layout
from fftgrad.exchanges._low_rank import AcpSgd, PowerSgd
from fftgrad.exchanges._parts import SmallDense
from fftgrad.exchanges._recipe import Recipe
from fftgrad.exchanges._schedule import Ladder, Scheduled, next_level
from fftgrad.exchanges._shards import PerWorker
from fftgrad.exchanges._shared_support import SharedSupport
from fftgrad.exchanges._two_stage import TwoStage

__all__ = [
    "AcpSgd",
    "AllGather",
    "AllReduce",
    "Channel",
    "Eigenbasis",
    "Hierarchical",
    "IntegerSum",
    "Ladder",
    "Layout",
    "PerWorker",
    "PowerSgd",
    "Recipe",
    "Scheduled",
    "SharedSupport",
    "SmallDense",
    "State",
    "Tally",
    "TwoStage",
    "next_level",
]
