"""Gossip: workers that send to their neighbors in a graph, in place of a mean over all."""

from fftgrad.contrib._beer import beer
from fftgrad.contrib._choco_sgd import choco_sgd
from fftgrad.contrib._gossip import consensus_distance
from fftgrad.contrib._graphs import Exponential, Graph, Ring, Torus

__all__ = [
    "Exponential",
    "Graph",
    "Ring",
    "Torus",
    "beer",
    "choco_sgd",
    "consensus_distance",
]
