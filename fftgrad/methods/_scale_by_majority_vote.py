"""signSGD with majority vote."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fftgrad import _axes
from fftgrad._contracts import AxisName
from fftgrad.codecs._quantizers import Sign
from fftgrad.exchanges._all_gather import AllGather
from fftgrad.training._pmean import compressed_pmean
from fftgrad.training._weigh import ONE_VOTE, refuse_weight


def scale_by_majority_vote(
    *, axis_name: AxisName = "data"
) -> optax.GradientTransformationExtraArgs:
    """Method: every worker votes on the direction of each parameter, with one bit.

        update = sign(Σ_i sign(g_i)),   0 in a tie.

    Args:
      axis_name: the axis of the workers.

    Returns:
      An optax transformation whose updates are -1, 0 and 1: to be chained before `optax.scale` or
      `optax.sgd`.

    Wire: 1 bit a value and 8 bytes.

    Claims: biased; no memory. What sends no gradient votes +1, one bit having no zero.

    Differs from the paper: all workers gather the votes and count them, without a server.

    Raises:
      ValueError: while tracing, if `update` gets a `weight`.

    Example:
      >>> import optax
      >>> tx = optax.chain(fg.methods.scale_by_majority_vote(), optax.sgd(1e-3))

    References:
      Bernstein et al., ICLR 2019, arXiv:1810.05291.
    """

    def vote(
        updates: optax.Updates, state: Any, params: Any = None, **extra: Any
    ) -> tuple[optax.Updates, Any]:
        del params
        refuse_weight("scale_by_majority_vote", extra.get("weight"), *ONE_VOTE)
        # One for zero too, so that all votes have one magnitude; what is not finite becomes NaN.
        own = jax.tree.map(lambda g: jnp.where(g < 0, -1.0, 1.0).astype(g.dtype) + (g - g), updates)
        return own, state

    def count(updates: optax.Updates, params: Any = None) -> optax.Updates:
        del params
        # Half a vote less than which is a tie, whatever the rounding of the mean.
        tie = 0.5 / _axes.size(axis_name)
        return jax.tree.map(lambda m: jnp.where(jnp.abs(m) < tie, 0, jnp.sign(m)), updates)

    return optax.with_extra_args_support(
        optax.chain(
            optax.GradientTransformationExtraArgs(optax.init_empty_state, vote),
            compressed_pmean(AllGather(Sign()), axis_name=axis_name),
            optax.stateless(count),
        )
    )
