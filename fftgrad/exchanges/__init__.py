"""Exchanges: the collective, and what is decoded and averaged after it."""

from fftgrad.exchanges._all_gather import AllGather as AllGather
from fftgrad.exchanges._all_reduce import AllReduce as AllReduce
from fftgrad.exchanges._piecewise import Piecewise as Piecewise
