"""Compress single arrays, and count bytes. May import `training` and the packages below it."""

from fftgrad.ops._collectives import Collective
from fftgrad.tools._audit import audit
from fftgrad.tools._bytes import from_bytes, link_bytes, to_bytes, wire_bytes
from fftgrad.tools._compress import compress, decompress

__all__ = [
    "Collective",
    "audit",
    "compress",
    "decompress",
    "from_bytes",
    "link_bytes",
    "to_bytes",
    "wire_bytes",
]
