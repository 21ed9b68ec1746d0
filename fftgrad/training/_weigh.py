"""Weights of the workers in a mean."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import AxisName, PyTree

ONE_VOTE = (
    "each worker has one vote, however long its gradient is",
    "leave it out, or use a method that averages gradients",
)
MISTYPED = frozenset({"weights", "sample_weight", "sample_weights"})
IN_THE_LOSS = (
    "take the gradients by fg.value_and_grad(has_weight=True), whose plain mean is the weighted one"
)


def weighted(
    tree: PyTree,
    weight: jax.Array | float | None,
    axis_name: AxisName,
) -> PyTree:
    """What a worker hands to a mean so that it counts by its weight: w v / Σ v times it.

    A weight that is negative or not finite, or a sum beyond float32, makes the mean NaN. Without
    one, all workers count alike.
    """
    if weight is None:
        return tree
    if jnp.ndim(weight):
        raise ValueError(
            f"update(weight): must be a scalar, got shape {jnp.shape(weight)}; pass the sum, as "
            "weight=mask.sum()."
        )
    own = _axes.vary(jnp.asarray(weight, jnp.float32), axis_name)
    own = jnp.where((own >= 0) & (own < jnp.inf), own, jnp.nan)
    # A product with zero would keep a NaN.
    tree = jax.tree.map(lambda leaf: jnp.where(own == 0, 0, leaf), tree)
    workers, total = _axes.size(axis_name), lax.psum(own, axis_name)
    total = jnp.where(total < jnp.inf, total, jnp.nan)
    share = own / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    return jax.tree.map(lambda leaf: (share * workers * leaf).astype(leaf.dtype), tree)


def refuse_mistyped(owner: str, extra: Mapping[str, Any]) -> None:
    """Refuses what would be a weight: optax hands on all arguments, and none is missed."""
    for name in MISTYPED & extra.keys():
        raise TypeError(
            f"{owner}.update({name}): must be called weight, got {name}, which has no effect; "
            f"pass it as weight={name}, or not at all."
        )


def refuse_weight(owner: str, weight: Any, because: str, remedy: str = IN_THE_LOSS) -> None:
    """Refuses a weight where it would have no effect, or a wrong one."""
    if weight is not None:
        raise ValueError(
            f"{owner}.update(weight): must be left out, because {because}, got one; {remedy}."
        )
