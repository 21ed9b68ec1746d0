"""The randomness of a worker in a step."""

import jax

from fftgrad import _axes
from fftgrad._contracts import AxisName, Step


def own_step(
    key: jax.Array, number: jax.Array | int, skipped: jax.Array | int, axis_name: AxisName
) -> Step:
    """The step of this worker, from a key that is equal on all of them."""
    shared, local = jax.random.split(jax.random.fold_in(key, number))
    return Step(number, shared, jax.random.fold_in(local, _axes.index(axis_name)), skipped=skipped)
