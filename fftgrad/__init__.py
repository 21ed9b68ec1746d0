"""Gradient exchange in JAX that costs what the information in a gradient costs."""

# ruff: noqa: I001  (in reading order, not by file)

# Training
from fftgrad.training import compressed_pmean as compressed_pmean
from fftgrad.training import value_and_grad as value_and_grad
from fftgrad.training import init as init
from fftgrad.training import data_parallel as data_parallel
from fftgrad.exchanges._layout import Layout as Layout
from fftgrad.training import state_specs as state_specs
from fftgrad.training import reshard_state as reshard_state
from fftgrad.training import Resharded as Resharded
from fftgrad.training import metrics as metrics
from fftgrad.training import clip_by_local_norm as clip_by_local_norm
from fftgrad.training import trainable as trainable
from fftgrad.training import per_worker as per_worker
from fftgrad.training import accumulate as accumulate
from fftgrad.training import delay as delay
from fftgrad.training import offload as offload
from fftgrad.training import gather_parameters as gather_parameters
from fftgrad.training import compressed_psum_scatter as compressed_psum_scatter
from fftgrad.training import Scattered as Scattered
from fftgrad.training import compressed_all_gather as compressed_all_gather
from fftgrad.training import capture as capture
from fftgrad.training import captured as captured
from fftgrad.training import Captured as Captured
from fftgrad import methods as methods
from fftgrad import optimizers as optimizers

# Codecs
from fftgrad.codecs._chain import chain as chain
from fftgrad.codecs.transforms import Dct as Dct
from fftgrad.codecs.transforms import Fft as Fft
from fftgrad.codecs.transforms import Hadamard as Hadamard
from fftgrad.codecs.transforms import Identity as Identity
from fftgrad.codecs.transforms import Tiles as Tiles
from fftgrad.codecs.selectors import AdaComp as AdaComp
from fftgrad.codecs.selectors import Budget as Budget
from fftgrad.codecs.selectors import ChunkTopK as ChunkTopK
from fftgrad.codecs.selectors import OneSided as OneSided
from fftgrad.codecs.selectors import RandomK as RandomK
from fftgrad.codecs.selectors import Threshold as Threshold
from fftgrad.codecs.selectors import TopK as TopK
from fftgrad.codecs.quantizers import BinMeans as BinMeans
from fftgrad.codecs.quantizers import Cast as Cast
from fftgrad.codecs.quantizers import DynamicSign as DynamicSign
from fftgrad.codecs.quantizers import FixedRangeFloat as FixedRangeFloat
from fftgrad.codecs.quantizers import Levels as Levels
from fftgrad.codecs.quantizers import LloydMax as LloydMax
from fftgrad.codecs.quantizers import LogLevels as LogLevels
from fftgrad.codecs.quantizers import OneMean as OneMean
from fftgrad.codecs.quantizers import RangeFloat as RangeFloat
from fftgrad.codecs.quantizers import Sign as Sign
from fftgrad.codecs.quantizers import Ternary as Ternary

# Memories
from fftgrad.memories import ErrorFeedback as ErrorFeedback
from fftgrad.memories import MomentumCorrection as MomentumCorrection
from fftgrad.memories import NoMemory as NoMemory

# Exchanges
from fftgrad.exchanges import AllGather as AllGather
from fftgrad.exchanges import AllReduce as AllReduce
from fftgrad.exchanges import Hierarchical as Hierarchical
from fftgrad.exchanges import IntegerSum as IntegerSum
from fftgrad.exchanges import TopVotes as TopVotes
from fftgrad.exchanges import Piecewise as Piecewise
from fftgrad.exchanges import PowerSgd as PowerSgd
from fftgrad.exchanges import AcpSgd as AcpSgd
from fftgrad.exchanges import Recover as Recover
from fftgrad.exchanges import SharedSupport as SharedSupport
from fftgrad.exchanges import Leader as Leader
from fftgrad.exchanges import Drift as Drift
from fftgrad.exchanges import TwoStage as TwoStage
from fftgrad.exchanges import MedianNormClip as MedianNormClip
from fftgrad.exchanges import TrimmedMean as TrimmedMean
from fftgrad.exchanges import Ring as Ring
from fftgrad.exchanges import Torus as Torus
from fftgrad.exchanges import Exponential as Exponential
from fftgrad.exchanges._policy import Policy as Policy
from fftgrad.exchanges._policy import Rule as Rule

# One array, what is sent, and what pays
from fftgrad.tools import compress as compress
from fftgrad.tools import decompress as decompress
from fftgrad.tools import decompress_mean as decompress_mean
from fftgrad.tools import to_bytes as to_bytes
from fftgrad.tools import from_bytes as from_bytes
from fftgrad.tools import wire_bytes as wire_bytes
from fftgrad.tools import link_bytes as link_bytes
from fftgrad.tools import save_gradients as save_gradients
from fftgrad.tools import load_gradients as load_gradients
from fftgrad.tools import analyze as analyze
from fftgrad.tools import Analysis as Analysis
from fftgrad.tools import Figures as Figures
from fftgrad.tools import StepPair as StepPair
from fftgrad.tools import Rate as Rate
from fftgrad.tools import fit as fit
from fftgrad.tools import Fit as Fit
from fftgrad.tools import FitRow as FitRow
from fftgrad.exchanges._fragments import fragment as fragment
from fftgrad.tools import preview as preview
from fftgrad.tools import PreviewRow as PreviewRow
from fftgrad.tools import audit as audit
from fftgrad.tools import Collective as Collective
from fftgrad.tools import replica_checksum as replica_checksum
from fftgrad.tools import Replicas as Replicas
from fftgrad.tools import consensus_distance as consensus_distance
from fftgrad.tools import redsync_cost as redsync_cost
from fftgrad.tools import SyncCost as SyncCost

# Would it make training faster, and with what
from fftgrad.planning import plan as plan
from fftgrad.planning import Plan as Plan
from fftgrad.planning import PlanRow as PlanRow
from fftgrad.planning import Candidate as Candidate
from fftgrad.planning import measure as measure
from fftgrad.planning import Measured as Measured
from fftgrad.planning import Timing as Timing
from fftgrad.planning import measure_link as measure_link
from fftgrad.planning import time_exchange as time_exchange
from fftgrad.planning import predict_step as predict_step
from fftgrad.tools import Link as Link

# Contracts, and the values that pass between their implementations
from fftgrad._contracts import Codec as Codec
from fftgrad._contracts import Transform as Transform
from fftgrad._contracts import Selector as Selector
from fftgrad._contracts import Quantizer as Quantizer
from fftgrad.exchanges._rules import CodecRule as CodecRule
from fftgrad._contracts import Memory as Memory
from fftgrad._contracts import Exchange as Exchange
from fftgrad._contracts import Step as Step
from fftgrad._contracts import Payload as Payload
from fftgrad._contracts import Compressed as Compressed
from fftgrad._contracts import Sparse as Sparse
from fftgrad._contracts import Reduced as Reduced
from fftgrad.exchanges._choosers import Chooser as Chooser
from fftgrad.exchanges import Average as Average
from fftgrad.exchanges import Graph as Graph
from fftgrad.training import CompressedPmeanState as CompressedPmeanState
from fftgrad.exchanges._per_worker import PerWorker as PerWorker

# For parts of one's own: bad values kept visible, and the laws
from fftgrad.ops._finite import poison as poison
from fftgrad import testing as testing

# Version
from importlib import metadata as _metadata

try:
    __version__ = _metadata.version("fftgrad")
except _metadata.PackageNotFoundError:  # on the path, but not installed
    __version__ = "0+not.installed"
