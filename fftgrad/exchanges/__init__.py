"""Exchanges: compress, run the collective, decode and average.

May import `codecs`, `memories`, `ops`, the contracts and `_axes`.
"""

from fftgrad._contracts import Averaged, Comm, Exchange, State, Stats
from fftgrad.exchanges._all_gather import AllGather
from fftgrad.exchanges._all_reduce import AllReduce, QuantizedAllReduce
from fftgrad.exchanges._bucketing import Bucketing
from fftgrad.exchanges._eigenbasis import Eigenbasis
from fftgrad.exchanges._hierarchical import Hierarchical
from fftgrad.exchanges._leader_top_k import LeaderTopK
from fftgrad.exchanges._low_rank import AcpSgd, PowerSgd
from fftgrad.exchanges._recipe import Recipe
from fftgrad.exchanges._schedule import Ladder, Scheduled, next_level
from fftgrad.exchanges._shards import PerWorker
from fftgrad.exchanges._two_stage import TwoStage

__all__ = [
    "AcpSgd",
    "AllGather",
    "AllReduce",
    "Averaged",
    "Bucketing",
    "Comm",
    "Eigenbasis",
    "Exchange",
    "Hierarchical",
    "Ladder",
    "LeaderTopK",
    "PerWorker",
    "PowerSgd",
    "QuantizedAllReduce",
    "Recipe",
    "Scheduled",
    "State",
    "Stats",
    "TwoStage",
    "next_level",
]
