"""signSGD with error feedback."""

import optax

from fftgrad._contracts import AxisName, Memory
from fftgrad.codecs.quantizers._sign import Sign
from fftgrad.exchanges._all_gather import AllGather
from fftgrad.exchanges._layout import Layout
from fftgrad.memories._error_feedback import ErrorFeedback
from fftgrad.training._pmean import compressed_pmean


def sign_sgd(
    *,
    memory: Memory = ErrorFeedback(),
    layout: Layout = Layout("leaf"),
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    """Method: send signs and one mean magnitude, keep the error for later.

        p = e + g,   Δ = (||p||₁ / d) sign(p),   e' = p - Δ,   apply mean Δ.

    Args:
      memory: the paper's feedback, without decay.
      layout: what has one magnitude, leaves as in the authors' code; see `Layout`.
      axis_name: the axis of the workers.

    Returns:
      An optax transformation, to be chained before an optimizer without momentum.

    Wire: 1 bit a value, really, and 4 bytes a part.

    Claims: nothing is lost, without decay.

    Differs from the paper: p = lr · g + e there; here e is in units of the gradient, and the
      learning rate comes after. For a constant rate that is the same; where the rate falls, what
      was kept is applied at the new rate.

    Raises:
      ValueError: while tracing, if the axis is not bound.

    Example:
      >>> import fftgrad as fg
      >>> import optax
      >>> tx = optax.chain(fg.methods.sign_sgd(), optax.sgd(0.1))

    References:
      Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
      ICML 2019, arXiv:1901.09847.
    """
    return compressed_pmean(AllGather(Sign()), memory, axis_name=axis_name, layout=layout)
