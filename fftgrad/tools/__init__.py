"""Tools: one array through a codec, and its bytes. May import `training` and what is below it."""

from fftgrad.ops._collectives import Collective
from fftgrad.tools._audit import audit
from fftgrad.tools._bytes import from_bytes, to_bytes
from fftgrad.tools._compress import compress, decompress, decompress_mean
from fftgrad.tools._replicas import Replicas, replica_checksum
from fftgrad.tools._wire_bytes import link_bytes, wire_bytes

__all__ = [
    "Collective",
    "Replicas",
    "audit",
    "compress",
    "decompress",
    "decompress_mean",
    "from_bytes",
    "link_bytes",
    "replica_checksum",
    "to_bytes",
    "wire_bytes",
]
