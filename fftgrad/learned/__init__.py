"""Codes that are learned on the way, by an autoencoder in Flax.

`fftgrad` itself does not import it: `pip install "fftgrad[learned]"`.
May import all but `methods`, `optimizers` and `tools`.
"""

from fftgrad.learned._autoencoder import Autoencoder as Autoencoder
from fftgrad.learned._learned_codes import LearnedCodes as LearnedCodes
from fftgrad.learned._learned_codes import LearnedCodesState as LearnedCodesState
from fftgrad.learned._lgc import lgc as lgc
from fftgrad.learned._training import learn as learn
