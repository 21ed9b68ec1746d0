"""What optimizers have in common whose parameters differ between the workers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import AxisName, PyTree
from fftgrad.ops import _finite
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


def finite_step(
    run: Callable[..., tuple[PyTree, PyTree]],
    grads: PyTree,
    state: PyTree,
    params: PyTree,
    axis_name: AxisName,
    **extra: Any,
) -> tuple[PyTree, PyTree, jax.Array]:
    """Run `inner.update` on one worker, and leave a step out in which anything is not finite.

    Returns the updates, zeros in a bad step, the next state, and whether the step was finite. The
    worker decides alone, and `run` is in no branch, because it may contain collectives.
    """
    moves, after = run(grads, state, params, **extra)
    # An optimizer may hide a NaN of the gradient, and a parameter may overflow.
    moved = optax.apply_updates(params, moves)
    fine = _axes.everywhere(_finite.all_finite((grads, moved)), but=_axes.names(axis_name))
    # Every leaf of the state would find the flag again, which takes XLA minutes for many leaves.
    fine = lax.optimization_barrier(_axes.vary(fine, axis_name))
    moves = jax.tree.map(lambda move: jnp.where(fine, move, 0), moves)
    return moves, optax.tree.where(fine, after, state), fine


def mean_loss(
    value: jax.Array | float,
    weight: jax.Array | float | None,
    axis_name: AxisName,
    fine: jax.Array | None = None,
) -> jax.Array:
    """The mean over the workers of their losses, each counted by its weight, float32[].

    The loss of a worker whose step was not `fine` does not count; NaN if none does.
    """
    own = _axes.vary(jnp.asarray(value, jnp.float32), axis_name)
    if fine is None:
        return lax.pmean(weighted(own, weight, axis_name), axis_name)
    share = jnp.where(fine, jnp.float32(1.0 if weight is None else weight), 0)
    share = jnp.where((share >= 0) & (share < jnp.inf), share, jnp.nan)
    loss, total = lax.psum(jnp.stack([jnp.where(share == 0, 0, share * own), share]), axis_name)
    return loss / total
