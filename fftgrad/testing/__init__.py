"""Checks that your own codec, exchange or memory obeys the laws of its contract.

No other package of fftgrad imports this one, which imports neither `methods` nor `optimizers`.
"""

from fftgrad.testing._codec import check_codec
from fftgrad.testing._exchange import check_exchange
from fftgrad.testing._memory import check_memory

__all__ = ["check_codec", "check_exchange", "check_memory"]
