"""SGD behind error feedback, with settings that were measured together."""

import jax
import optax

from fftgrad import _tree
from fftgrad._base import AxisName, Codec
from fftgrad.memories._error_feedback import ErrorFeedback
from fftgrad.methods._top_k import top_k
from fftgrad.transforms._identity import Identity


def feedback_sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.9,
    density: float = 0.04,
    bits: int | None = 4,
    *,
    transform: Codec = Identity(),
    decay: float = 0.95,
    scope: _tree.Scope = "model",
    axis_name: AxisName = "data",
    key: jax.Array | int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Method: the largest values, error feedback, and SGD whose momentum became a factor.

    A momentum of m makes of each gradient 1 / (1 - m) times itself, over time. Feedback spreads
    gradients over time already, so what stays of the momentum is that factor: tuned learning rates
    carry over.

    Placement: before the optimizer. The residual differs between the workers, the parameters do
    not.

    Args:
      learning_rate: as for `optax.sgd(learning_rate, momentum)`, a number or an optax schedule.
      momentum: of the dense optimizer that this replaces.
      density: share of the coefficients sent.
      bits: width of a coefficient; None sends float32.
      transform: a linear transform before the selection, such as `Dct(block=64)`.
      decay: of the residual.
      scope: what the largest are counted over: "model", "leaf", or a function that names groups.
      axis_name: the axis of the workers.
      key: seed or PRNG key, handed to `compressed_pmean`.

    Returns:
      A whole optimizer, as `optax.sgd` is.

    Wire: density · n (bits + 2 + log2(1/density)) bits: at the defaults 0.42 bits a parameter, 76
      times less than float32.

    Claims: parameters equal on all workers.

    Raises:
      ValueError: if `momentum` is outside [0, 1), or an argument outside its part's range.

    Example:
      >>> import fftgrad as fg
      >>> tx = fg.methods.feedback_sgd(learning_rate=0.05, momentum=0.9, axis_name="data")

    References:
      Stich et al., NeurIPS 2018, arXiv:1809.07599.
    """
    if not 0 <= momentum < 1:
        raise ValueError(
            f"feedback_sgd(momentum): must be in [0, 1), got {momentum}; use that of the dense "
            "optimizer, or 0.0."
        )
    sparse = top_k(
        density,
        bits,
        transform=transform,
        memory=ErrorFeedback(decay),
        scope=scope,
        axis_name=axis_name,
        key=key,
    )
    return optax.with_extra_args_support(
        optax.chain(
            sparse,
            optax.scale(1 / (1 - momentum)),
            optax.scale_by_learning_rate(learning_rate),
        )
    )
