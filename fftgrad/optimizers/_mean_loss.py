"""The loss of all workers, for an optimizer that is to do the same on each."""

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import AxisName
from fftgrad.training._weigh import weighted


def mean_loss(
    value: jax.Array | float, weight: jax.Array | float | None, axis_name: AxisName
) -> jax.Array:
    """The mean over the workers of their losses, each counted by its weight, float32[]."""
    own = _axes.vary(jnp.asarray(value, jnp.float32), axis_name)
    return lax.pmean(weighted(own, weight, axis_name), axis_name)
