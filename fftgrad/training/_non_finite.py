"""What is done with a gradient that is not finite."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import AxisName, PyTree
from fftgrad.exchanges import _alike, _counts

NonFinite = Literal["propagate", "skip", "drop_worker"]


def who_counts(
    policy: NonFinite, x: PyTree, mine: jax.Array | None, axis_name: AxisName
) -> jax.Array | None:
    """Whether this worker counts, bool[], decided for all buckets and shards; None if all do.

    Whose state is another's does count: its gradient may be fine, and the step is bad for all.
    """
    if policy != "drop_worker":
        return None
    finite = _alike.all_finite(jax.tree.leaves(x))
    if mine is not None:
        finite |= ~mine
    flag = _axes.everywhere(finite, but=_axes.names(axis_name))
    # Kept, as that of the step is.
    return lax.optimization_barrier(_axes.vary(flag, axis_name))


def agreed(flags: list[jax.Array], workers: jax.Array | None, mean: PyTree) -> jax.Array:
    """Whether all is finite, in all buckets and on the whole mesh, also as the leaves' dtypes."""
    leaves = jax.tree.leaves(mean)
    if workers is None:
        # Only a narrower dtype can be left by a mean that was finite.
        leaves = [leaf for leaf in leaves if leaf.dtype != jnp.float32]
    else:
        flags = [*flags, workers > 0]
    every = [*flags, _alike.all_finite(leaves)]
    flag = _axes.everywhere(functools.reduce(jnp.logical_and, every))
    # Kept: every leaf of the state would find it again, which takes XLA minutes for many leaves.
    return lax.optimization_barrier(flag)


def shown(policy: NonFinite, finite: jax.Array, mean: PyTree) -> PyTree:
    """What a step returns for its mean: zeros for a bad one, unless that is to be seen."""
    if policy == "propagate":
        return mean
    return jax.tree.map(lambda m: jnp.where(finite, m, 0), mean)


def left_out(workers: jax.Array | None, finite: jax.Array, axis_name: AxisName) -> jax.Array | int:
    """How many workers a step went without."""
    if workers is None:
        return 0
    missing = _axes.size(axis_name) - _axes.over_other_axes(lax.pmin, workers)
    return jnp.where(finite, missing, 0)


def over_those(
    counts: jax.Array | None, workers: jax.Array | None, value: jax.Array, axis_name: AxisName
) -> jax.Array:
    """The mean of a scalar over the workers that count."""
    total = lax.pmean(_counts.zero_unless(counts, value), axis_name)
    return _counts.over(workers, total, axis_name)
