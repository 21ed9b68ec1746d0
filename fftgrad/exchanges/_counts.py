"""Which workers count in a mean: told by what travels anyway.

A worker that does not count has zeros to exchange. So the mean over all w workers, times w over how
many of them count, is the mean over those that do.
"""

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import AxisName, PyTree, Reduced, Step


def zero_unless(counts: jax.Array | None, tree: PyTree) -> PyTree:
    """The tree; zeros where this worker does not count."""
    return tree if counts is None else jax.tree.map(lambda a: jnp.where(counts, a, 0), tree)


def kept_unless(counts: jax.Array | None, new: PyTree, old: PyTree) -> PyTree:
    """The next state of what belongs to this worker; the old one where it does not count."""
    if counts is None:
        return new
    return jax.tree.map(lambda a, b: jnp.where(counts, a, b), new, old)


# In a sum: one more value.


def term(step: Step, axis_name: AxisName) -> list[jax.Array]:
    """What goes into a mean over the workers, for `number` to read; nothing if all count."""
    if step.counts is None:
        return []
    return [step.counts.astype(jnp.float32)[None] * _axes.size(axis_name)]


def number(mean: list[jax.Array]) -> jax.Array | None:
    """How many workers count, from the mean of what `term` returned."""
    return jnp.round(mean[0][0]).astype(jnp.int32) if mean else None


# In a header: the sign of the count of what overflows.


def marked(overflow: jax.Array | int, step: Step) -> jax.Array | int:
    """The count; its complement, which is negative, where this worker does not count."""
    return overflow if step.counts is None else jnp.where(step.counts, overflow, ~overflow)


def read(overflows: jax.Array | int, step: Step) -> tuple[jax.Array, jax.Array | None]:
    """The sum of the counts that all workers marked, and how many of these count."""
    if step.counts is None:
        return jnp.sum(overflows), None
    counts = jnp.asarray(overflows)
    out = counts < 0
    return jnp.sum(jnp.where(out, ~counts, counts)), jnp.sum(~out, dtype=jnp.int32)


def which(overflows: jax.Array | int, step: Step) -> jax.Array:
    """Which workers count, bool[w], from the counts that they marked."""
    marks = jnp.asarray(overflows)
    return jnp.ones(marks.shape, bool) if step.counts is None else marks >= 0


# In what comes of it.


def told(out: Reduced, step: Step, axis_name: AxisName) -> Reduced:
    """`out`, which says how many workers count; by one more sum if the exchange does not."""
    if step.counts is None:
        return out._replace(workers=None)
    if out.workers is not None:
        return out
    return out._replace(workers=lax.psum(step.counts.astype(jnp.int32), axis_name))


def over(workers: jax.Array | None, mean: PyTree, axis_name: AxisName) -> PyTree:
    """A mean over all workers as the mean over those that count; zero if none does."""
    if workers is None:
        return mean
    share = _axes.size(axis_name) / jnp.maximum(workers, 1).astype(jnp.float32)
    return jax.tree.map(lambda m: m * share, mean)
