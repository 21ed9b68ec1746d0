"""Checkpoints of which nothing is lost, and states for another number of workers.

Saving takes an extra, Orbax: `pip install -e ".[checkpoint]"`. The core imports nothing of it;
`fg.checkpoint` loads it. May import the core and `advise`.
"""

from fftgrad.checkpoint._lay_out import Resharded
from fftgrad.checkpoint._reshard import reshard_state
from fftgrad.checkpoint._restore import Restored, restore
from fftgrad.checkpoint._save import save

__all__ = ["Resharded", "Restored", "reshard_state", "restore", "save"]
