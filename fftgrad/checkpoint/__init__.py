"""Checkpoints of which nothing is lost, and states for another number of workers.

Saving takes an extra, Orbax: `pip install -e ".[checkpoint]"`. The core imports nothing of it;
`fg.checkpoint` loads it. May import the core.
"""

from fftgrad.checkpoint._reshard import Resharded, reshard_state
from fftgrad.checkpoint._storage import Restored, restore, save

__all__ = ["Resharded", "Restored", "reshard_state", "restore", "save"]
