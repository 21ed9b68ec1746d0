"""Gradient exchange in JAX that costs what the information in a gradient costs."""

# ruff: noqa: I001  (in groups, not by file)

# Training
from fftgrad._pmean import compressed_pmean as compressed_pmean
from fftgrad._state import state_specs as state_specs
from fftgrad._local import clip_by_local_norm as clip_by_local_norm
from fftgrad._local import per_worker as per_worker
from fftgrad._accumulate import accumulate as accumulate
from fftgrad._delay import delay as delay
from fftgrad._policy import Policy as Policy
from fftgrad._policy import Rule as Rule
from fftgrad._policy import preview as preview
from fftgrad._policy import PreviewRow as PreviewRow
from fftgrad._replicas import replica_checksum as replica_checksum
from fftgrad._replicas import Replicas as Replicas
from fftgrad._schedules import diminishing_theta as diminishing_theta
from fftgrad import methods as methods

# Codecs
from fftgrad._chain import chain as chain
from fftgrad.transforms import Dct as Dct
from fftgrad.transforms import Fft as Fft
from fftgrad.transforms import Hadamard as Hadamard
from fftgrad.transforms import Identity as Identity
from fftgrad.transforms import OneSided as OneSided
from fftgrad.transforms import TileDct as TileDct
from fftgrad.selectors import AdaComp as AdaComp
from fftgrad.selectors import ChunkTopK as ChunkTopK
from fftgrad.selectors import RandomK as RandomK
from fftgrad.selectors import Threshold as Threshold
from fftgrad.selectors import TopK as TopK
from fftgrad.quantizers import Cast as Cast
from fftgrad.quantizers import Levels as Levels
from fftgrad.quantizers import LloydMax as LloydMax
from fftgrad.quantizers import OneMean as OneMean
from fftgrad.quantizers import RangeFloat as RangeFloat
from fftgrad.quantizers import Sign as Sign
from fftgrad.quantizers import Ternary as Ternary

# Memories
from fftgrad.memories import ErrorFeedback as ErrorFeedback
from fftgrad.memories import LowPass as LowPass
from fftgrad.memories import MomentumCorrection as MomentumCorrection
from fftgrad.memories import NoMemory as NoMemory

# Exchanges
from fftgrad.exchanges import AllGather as AllGather
from fftgrad.exchanges import AllReduce as AllReduce
from fftgrad.exchanges import Hierarchical as Hierarchical
from fftgrad.exchanges import IntegerSum as IntegerSum
from fftgrad.exchanges import Piecewise as Piecewise
from fftgrad.exchanges import PowerSgd as PowerSgd
from fftgrad.exchanges import Recover as Recover
from fftgrad.exchanges import SharedSupport as SharedSupport
from fftgrad.exchanges import TwoStage as TwoStage

# One array, and what is sent
from fftgrad._compress import compress as compress
from fftgrad._compress import decompress as decompress
from fftgrad._compress import wire_bytes as wire_bytes
from fftgrad._audit import Collective as Collective
from fftgrad._audit import audit as audit

# What pays
from fftgrad._cost import redsync_cost as redsync_cost
from fftgrad._cost import SyncCost as SyncCost

# Contracts, and the values that pass between their implementations
from fftgrad._base import AdaptiveCodec as AdaptiveCodec
from fftgrad._base import BudgetCodec as BudgetCodec
from fftgrad._base import Codec as Codec
from fftgrad._base import Exchange as Exchange
from fftgrad._base import Memory as Memory
from fftgrad._base import Payload as Payload
from fftgrad._base import Reduced as Reduced
from fftgrad._base import Rng as Rng
from fftgrad._base import SparseCodec as SparseCodec
from fftgrad._base import SupportCodec as SupportCodec
from fftgrad._base import WatchfulExchange as WatchfulExchange
from fftgrad._pmean import CompressedPmeanState as CompressedPmeanState
from fftgrad._state import PerWorker as PerWorker

# Version
from importlib import metadata as _metadata

try:
    __version__ = _metadata.version("fftgrad")
except _metadata.PackageNotFoundError:  # on the path, but not installed
    __version__ = "0+not.installed"
