"""Exchanges: the collective, and what is decoded and averaged after it.

May import `codecs`, `memories`, `ops`, the contracts and `_axes`.
"""

from fftgrad.exchanges._acp_sgd import AcpSgd as AcpSgd
from fftgrad.exchanges._all_gather import AllGather as AllGather
from fftgrad.exchanges._all_reduce import AllReduce as AllReduce
from fftgrad.exchanges._averages import Average as Average
from fftgrad.exchanges._averages import MedianNormClip as MedianNormClip
from fftgrad.exchanges._averages import TrimmedMean as TrimmedMean
from fftgrad.exchanges._choosers import Drift as Drift
from fftgrad.exchanges._choosers import Leader as Leader
from fftgrad.exchanges._graphs import Exponential as Exponential
from fftgrad.exchanges._graphs import Graph as Graph
from fftgrad.exchanges._graphs import Ring as Ring
from fftgrad.exchanges._graphs import Torus as Torus
from fftgrad.exchanges._hierarchical import Hierarchical as Hierarchical
from fftgrad.exchanges._integer_sum import IntegerSum as IntegerSum
from fftgrad.exchanges._piecewise import Piecewise as Piecewise
from fftgrad.exchanges._power_sgd import PowerSgd as PowerSgd
from fftgrad.exchanges._recover import Recover as Recover
from fftgrad.exchanges._shared_support import SharedSupport as SharedSupport
from fftgrad.exchanges._top_votes import TopVotes as TopVotes
from fftgrad.exchanges._two_stage import TwoStage as TwoStage
