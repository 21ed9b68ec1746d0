"""Compressed gradient averaging for data-parallel JAX over slow links."""

from importlib import import_module as _import_module
from importlib import metadata as _metadata
from typing import TYPE_CHECKING as _TYPE_CHECKING

from fftgrad import codecs, exchanges, memories, methods, optimizers, tools, training
from fftgrad._contracts import Step
from fftgrad.codecs import (
    Budget,
    Cast,
    ChunkTopK,
    Dct,
    Fft,
    Hadamard,
    LogQuantizer,
    RangeFloat,
    Sign,
    Threshold,
    TopK,
    UniformQuantizer,
    chain,
)
from fftgrad.exchanges import (
    AllGather,
    AllReduce,
    Bucketing,
    Eigenbasis,
    Hierarchical,
    PowerSgd,
    Recipe,
    Scheduled,
    TwoStage,
)
from fftgrad.memories import ErrorFeedback, NoMemory
from fftgrad.tools import audit, compress, decompress, link_bytes, wire_bytes
from fftgrad.training import (
    compressed_pmean,
    data_parallel,
    init_state,
    metrics,
    state_specs,
    trainable,
    value_and_grad,
)

if _TYPE_CHECKING:
    from fftgrad import checkpoint, contrib, islands, planning, testing

__all__ = [  # noqa: RUF022 (in reading order)
    # Training
    "compressed_pmean",
    "value_and_grad",
    "init_state",
    "data_parallel",
    "state_specs",
    "metrics",
    "trainable",
    "Recipe",
    "Bucketing",
    # Codecs
    "chain",
    "Dct",
    "Fft",
    "Hadamard",
    "TopK",
    "ChunkTopK",
    "Threshold",
    "Budget",
    "LogQuantizer",
    "RangeFloat",
    "UniformQuantizer",
    "Sign",
    "Cast",
    # Memories
    "ErrorFeedback",
    "NoMemory",
    # Exchanges
    "AllGather",
    "AllReduce",
    "TwoStage",
    "Eigenbasis",
    "PowerSgd",
    "Hierarchical",
    "Scheduled",
    # One array, and bytes
    "compress",
    "decompress",
    "link_bytes",
    "wire_bytes",
    "audit",
    "Step",
    # Modules with the other names, and with the base classes
    "codecs",
    "exchanges",
    "memories",
    "methods",
    "optimizers",
    "tools",
    "training",
    # Modules that are loaded on first access
    "planning",
    "checkpoint",
    "contrib",
    "islands",
    "testing",
]


def __getattr__(name: str) -> object:
    if name in ("planning", "checkpoint", "contrib", "islands", "testing"):
        return _import_module(f"fftgrad.{name}")
    rooms = codecs, exchanges, memories, methods, optimizers, tools, training
    there = [room.__name__ for room in rooms if name in room.__all__]
    remedy = f"; there is {there[0]}.{name}" if there else ""
    raise AttributeError(f"module 'fftgrad' has no attribute {name!r}{remedy}")


try:
    __version__ = _metadata.version("fftgrad")
except _metadata.PackageNotFoundError:  # imported from a checkout
    __version__ = "0+not.installed"
