"""Islands: programs that train one model together through an object store.

A crashed island never blocks the others. Islands need no server and no common `jax.distributed`.
Stores need the extra `pip install -e ".[islands]"`. The core does not import this room, which
`fg.islands` loads on first access. This room may import the core.
"""

from fftgrad.islands._island import Island
from fftgrad.islands._residual import Outcome, Residual
from fftgrad.islands._run import Settings
from fftgrad.islands._status import RoundStatus, Status, status
from fftgrad.islands._store import open_store

__all__ = [
    "Island",
    "Outcome",
    "Residual",
    "RoundStatus",
    "Settings",
    "Status",
    "open_store",
    "status",
]
