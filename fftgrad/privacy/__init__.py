"""Privacy: what the votes of `TopVotes` tell of one worker, as an accountant counts it.

`fftgrad` itself does not import it: `pip install "fftgrad[privacy]"`.
May import all but `methods`, `optimizers` and `tools`.
"""

from fftgrad.privacy._epsilon import epsilon as epsilon
from fftgrad.privacy._rdp import rdp as rdp
from fftgrad.privacy._sensitivity import sensitivity as sensitivity
