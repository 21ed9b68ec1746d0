"""Weights of the workers in a mean."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import AxisName, PyTree


def weigh(axis_name: AxisName) -> optax.GradientTransformationExtraArgs:
    """Transformation: a worker's gradient counts as much as its weight says.

    It goes before `compressed_pmean`, whose mean over the w workers is then Σ v_i g_i / Σ v_i for
    the weights v_i: each gradient is multiplied by w v_i / Σ v_j.

        tx = optax.chain(
            fg.weigh("data"), fg.compressed_pmean(exchange, memory, axis_name="data"), optimizer
        )
        updates, state = tx.update(grads, state, params, weight=tokens)

    The weight is the number of examples or tokens behind a gradient, or 0 for a worker that has
    none: what it holds as its gradient is then left out, be it NaN. It takes part in the exchange
    all the same, with zeros or with what its memory has kept, so replicas stay equal.

    A loss that returns its sum and its weight needs none of this: `value_and_grad(has_weight=True)`
    makes gradients of which the plain mean is right.

    Args:
      axis_name: the axis, or axes, of the workers.

    Returns:
      An `optax.GradientTransformationExtraArgs` without state; its `update` takes `weight`, a
      number or a scalar array that is this worker's own.

    Wire: 4 bytes, in an all-reduce of its own.

    Claims: if all weights are 0, all gradients are. A weight that is negative or not finite makes
      the mean NaN.

    Raises:
      ValueError: while tracing, if `weight` is missing or no scalar, or if the axis is not bound.

    Example:
      >>> import fftgrad as fg
      >>> import jax, jax.numpy as jnp
      >>> tx = fg.weigh("data")
      >>> mean = lambda g, v: jax.lax.pmean(tx.update(g, tx.init(g), weight=v)[0], "data")
      >>> grads, tokens = jnp.array([1.0, 5.0]), jnp.array([30, 10])
      >>> jax.vmap(mean, axis_name="data")(grads, tokens)[0]
      Array(2., dtype=float32)
    """
    _axes.check_names("weigh(axis_name)", axis_name)

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        weight: jax.Array | float | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, Any]:
        del params, extra
        if weight is None:
            raise ValueError(
                "weigh.update(weight): must be the weight of this worker, got None; call "
                "tx.update(grads, state, params, weight=tokens)."
            )
        return weighted(updates, weight, axis_name), state

    return optax.GradientTransformationExtraArgs(optax.identity().init, update)


def weighted(tree: PyTree, weight: jax.Array | float, axis_name: AxisName) -> PyTree:
    """What a worker hands to a mean so that it counts by its weight."""
    if jnp.ndim(weight):
        raise ValueError(
            f"weigh.update(weight): must be a scalar, got shape {jnp.shape(weight)}; pass the sum, "
            "as weight=mask.sum()."
        )
    own = _axes.vary(jnp.asarray(weight, jnp.float32), axis_name)
    own = jnp.where((own >= 0) & (own < jnp.inf), own, jnp.nan)
    share = own / jnp.maximum(lax.psum(own, axis_name), jnp.finfo(jnp.float32).tiny)
    factor = share * _axes.size(axis_name)

    def one(leaf: jax.Array) -> jax.Array:
        # A product with zero would keep a NaN.
        return jnp.where(own == 0, 0, factor * leaf).astype(leaf.dtype)

    return jax.tree.map(one, tree)
