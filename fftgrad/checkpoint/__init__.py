"""Checkpoints by Orbax, of which nothing is lost: residuals, keys, counters, and their rows.

`fftgrad` itself does not import it: `pip install "fftgrad[checkpoint]"`.
May import all but `methods`, `optimizers` and `tools`.
"""

from fftgrad.checkpoint._restore import Restored as Restored
from fftgrad.checkpoint._restore import restore as restore
from fftgrad.checkpoint._save import save as save
