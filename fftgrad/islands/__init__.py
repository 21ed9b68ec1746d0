"""Islands: programs that train together over nothing but a store of objects.

A crashed island never blocks the others, and nothing but the store is in common: no server, no
`jax.distributed` over all. Stores take an extra, `pip install -e ".[islands]"`. The core imports
nothing of it; `fg.islands` loads it. May import the core.
"""

from fftgrad.islands._island import Island
from fftgrad.islands._model import nesterov
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
    "nesterov",
    "open_store",
    "status",
]
