"""Checkpoints through Orbax, and resharding of states for another number of workers.

`save` and `restore` need the extra `pip install -e ".[checkpoint]"`. `fg.checkpoint` is loaded on
first access. This package may import the core, and the core does not import this package.
"""

from fftgrad.checkpoint._reshard import Resharded, reshard_state
from fftgrad.checkpoint._storage import Restored, restore, save

__all__ = ["Resharded", "Restored", "reshard_state", "restore", "save"]
