"""Laws of the contracts, for your own parts. No other room may import it.

May import everything but `methods` and `optimizers`.
"""

from fftgrad.testing._codec import check_codec
from fftgrad.testing._exchange import check_exchange
from fftgrad.testing._memory import check_memory

__all__ = ["check_codec", "check_exchange", "check_memory"]
