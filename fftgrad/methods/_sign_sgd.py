"""signSGD with error feedback."""

from fftgrad._contracts import Memory
from fftgrad.codecs.quantizers._sign import Sign
from fftgrad.exchanges._all_gather import AllGather
from fftgrad.exchanges._layout import Layout
from fftgrad.exchanges._recipe import Recipe
from fftgrad.memories._error_feedback import ErrorFeedback


def sign_sgd(*, memory: Memory = ErrorFeedback()) -> Recipe:
    """Method: send signs and one mean magnitude, keep the error for later.

        p = e + g,   Δ = (||p||₁ / d) sign(p),   e' = p - Δ,   apply mean Δ.

    Args:
      memory: the paper's feedback, without decay.

    Wire: 1 bit a value, really, and 4 bytes a part.

    Claims: nothing is lost, without decay.

    Differs from the paper: p = lr · g + e there; here e is in units of the gradient, and the
      learning rate comes after. For a constant rate that is the same; where the rate falls, what
      was kept is applied at the new rate.

    Example:
      >>> tx = fg.compressed_pmean(fg.methods.sign_sgd(), axis_name="data")

    References:
      Karimireddy et al., ICML 2019, arXiv:1901.09847.
    """
    return Recipe(AllGather(Sign()), memory, Layout("leaf"))
