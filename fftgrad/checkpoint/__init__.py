"""Checkpoints through Orbax, and resharding of states for another number of workers.

Saving needs the extra `pip install -e ".[checkpoint]"`. The core does not import this room, which
`fg.checkpoint` loads on first access. This room may import the core.
"""

from fftgrad.checkpoint._reshard import Resharded, reshard_state
from fftgrad.checkpoint._storage import Restored, restore, save

__all__ = ["Resharded", "Restored", "reshard_state", "restore", "save"]
