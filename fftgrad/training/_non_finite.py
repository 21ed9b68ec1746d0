"""What is done with a gradient that is not finite."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import PyTree, Tally
from fftgrad.ops import _count, _finite

NonFinite = Literal["propagate", "skip"]


def all_finite(tally: Tally, mean: PyTree) -> jax.Array:
    """Whether a step was finite in all buckets, on the whole mesh, and in the leaves' dtypes."""
    # Only a narrower dtype can be left by a mean that was finite.
    leaves = [leaf for leaf in jax.tree.leaves(mean) if leaf.dtype != jnp.float32]
    flag = _axes.everywhere(jnp.asarray(tally.finite) & _finite.all_finite(leaves))
    # Kept: every leaf of the state would find it again, which takes XLA minutes for many leaves.
    return lax.optimization_barrier(flag)


def hide_bad(policy: NonFinite, finite: jax.Array, mean: PyTree) -> PyTree:
    """What a step returns for its mean: zeros for a bad one, unless that is to be seen."""
    if policy == "propagate":
        return mean
    return jax.tree.map(lambda m: jnp.where(finite, m, 0), mean)


def counters(before: Any, tally: Tally, finite: jax.Array) -> dict[str, jax.Array]:
    """The counters of a state after a step."""
    # What is bad in one bucket makes all later ones so, whose values then count for nothing.
    overflow = _axes.over_other_axes(_sum, jnp.where(finite, tally.overflow, 0))
    return {
        "step": _count.next_step(before.step),
        "skipped": jnp.where(finite, before.skipped, _count.next_step(before.skipped)),
        "overflow": _count.add(before.overflow, overflow),
    }


def _sum(count: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Sum a count over mesh axes. Each device has an equal share of the largest count at most."""
    return lax.psum(jnp.minimum(count, _count.MOST // _axes.size(axes)), axes)
