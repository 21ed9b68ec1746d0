"""Testing: the laws of the contracts, for parts of one's own. Nothing may import it.

May import everything but `methods` and `optimizers`.
"""

from fftgrad.testing._codec import check_codec as check_codec
from fftgrad.testing._exchange import check_exchange as check_exchange
from fftgrad.testing._memory import check_memory as check_memory
