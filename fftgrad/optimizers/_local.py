"""What optimizers have in common whose parameters differ between the workers."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import AxisName, PyTree
from fftgrad.optimizers import _dataflow
from fftgrad.optimizers._dataflow import Value
from fftgrad.training._weigh import weighted


def check_own(owner: str, params: PyTree, axis_name: AxisName) -> None:
    """Refuses parameters that JAX knows to be the same on all workers."""
    for path, leaf in jax.tree.leaves_with_path(params):
        if isinstance(leaf, jax.Array) and not _axes.varies(leaf, axis_name):
            raise ValueError(
                f"{owner}.update(params{jax.tree_util.keystr(path)}): must be this worker's own, "
                "because they differ between workers, got one that does not vary over "
                f"{axis_name!r}; give the parameters a leading axis of workers, and shard it over "
                f"{axis_name!r}."
            )


def check_follows(owner: str, inner: optax.GradientTransformation, params: PyTree) -> None:
    """Refuses an optimizer that moves parameters of its own, from which it makes those it is given.

    What the workers have in common reaches only those that it is given.
    """
    like = jax.eval_shape(lambda tree: tree, params)
    program, state = _dataflow.trace(inner.init, like)
    start = _dataflow.follow(program, _dataflow.leaves(like))
    if all(value.leaf is None for value in start):
        return
    free = [Value(leaf.size) for leaf in _dataflow.leaves(like)]
    program, _ = _dataflow.trace_update(owner, inner, like, state)
    moves = _dataflow.follow(program, [*free, *start, *free, Value(1)])[: len(free)]
    for (path, _), move in zip(jax.tree.leaves_with_path(like), moves, strict=True):
        if move.leaf is not None:
            raise ValueError(
                f"{owner}(inner): must move the parameters that it is given, because workers meet "
                f"in these, got one that makes params{jax.tree_util.keystr(path)} of a copy that "
                "it keeps, as optax.contrib.schedule_free does: its copies would never meet; use "
                "optax.adamw, and let the loss pull towards what is kept."
            )


def mean_loss(
    value: jax.Array | float, weight: jax.Array | float | None, axis_name: AxisName
) -> jax.Array:
    """The mean over the workers of their losses, each counted by its weight, float32[]."""
    own = _axes.vary(jnp.asarray(value, jnp.float32), axis_name)
    return lax.pmean(weighted(own, weight, axis_name), axis_name)
