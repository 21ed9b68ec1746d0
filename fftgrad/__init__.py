"""Gradient exchange in JAX that costs what the information in a gradient costs."""

# ruff: noqa: I001  (in groups, not by file)

# Training
from fftgrad._pmean import compressed_pmean as compressed_pmean
from fftgrad._state import state_specs as state_specs
from fftgrad import methods as methods

# Codecs
from fftgrad._chain import chain as chain
from fftgrad.transforms import Dct as Dct
from fftgrad.transforms import Fft as Fft
from fftgrad.transforms import Hadamard as Hadamard
from fftgrad.transforms import Identity as Identity
from fftgrad.selectors import TopK as TopK
from fftgrad.quantizers import Cast as Cast
from fftgrad.quantizers import RangeFloat as RangeFloat

# Memories
from fftgrad.memories import ErrorFeedback as ErrorFeedback
from fftgrad.memories import NoMemory as NoMemory

# Exchanges
from fftgrad.exchanges import AllGather as AllGather
from fftgrad.exchanges import AllReduce as AllReduce
from fftgrad.exchanges import Piecewise as Piecewise

# One array, and what is sent
from fftgrad._compress import compress as compress
from fftgrad._compress import decompress as decompress
from fftgrad._compress import wire_bytes as wire_bytes
from fftgrad._audit import Collective as Collective
from fftgrad._audit import audit as audit

# Contracts, and the values that pass between their implementations
from fftgrad._base import Codec as Codec
from fftgrad._base import Exchange as Exchange
from fftgrad._base import Memory as Memory
from fftgrad._base import Payload as Payload
from fftgrad._base import Reduced as Reduced
from fftgrad._base import Rng as Rng
from fftgrad._base import SparseCodec as SparseCodec
from fftgrad._pmean import CompressedPmeanState as CompressedPmeanState
from fftgrad._state import PerWorker as PerWorker
