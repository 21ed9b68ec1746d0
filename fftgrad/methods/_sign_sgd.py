"""signSGD with error feedback."""

import jax
import optax

from fftgrad import _tree
from fftgrad._base import AxisName, Memory
from fftgrad._pmean import compressed_pmean
from fftgrad.exchanges._all_gather import AllGather
from fftgrad.memories._error_feedback import ErrorFeedback
from fftgrad.quantizers._sign import Sign


def sign_sgd(
    *,
    memory: Memory = ErrorFeedback(),
    scope: _tree.Scope = "leaf",
    axis_name: AxisName = "data",
    key: jax.Array | int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Method: send signs and one mean magnitude, keep the error for later.

        p = e + g,   Δ = (||p||₁ / d) sign(p),   e' = p - Δ,   apply mean Δ.

    Args:
      memory: the paper's feedback, without decay.
      scope: what has one magnitude: "leaf" as in the authors' code, "model", or a function that
        names groups.
      axis_name: the axis of the workers.
      key: seed or PRNG key, handed to `compressed_pmean`; this method draws nothing.

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
    return compressed_pmean(AllGather(Sign()), memory, axis_name=axis_name, scope=scope, key=key)
