"""Clipping before the exchange."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fftgrad import _axes
from fftgrad._contracts import AxisName
from fftgrad.ops import _norms


def clip_by_local_norm(max_norm: float, axis_name: AxisName) -> optax.GradientTransformation:
    """Transformation: clip the norm of one worker's gradient at max_norm / √w, as DGC does.

    If the gradients of w workers are independent, the norm of their sum is √w times that of one, so
    their sum then has a norm of at most about `max_norm`, and their mean of `max_norm` / w. To clip
    at what you give `optax.clip_by_global_norm` for the mean, pass w times that: where they agree,
    up to √w times more then comes through. With √w times that, no more enters the exchange. It goes
    before `compressed_pmean` in the chain, before anything accumulates in a residual.

    Args:
      max_norm: bound of the norm of the workers' sum, over all leaves, positive.
      axis_name: the axis, or axes, of the workers.

    Returns:
      An `optax.GradientTransformation` without state.

    Claims: gradients of any finite size are clipped; what is not finite stays so.

    Raises:
      ValueError: if `max_norm` is not positive; while tracing, if the axis is not bound.

    Example:
      >>> clip = fg.training.clip_by_local_norm(1.0, "data")
      >>> update = lambda g: clip.update(g, clip.init(g))[0]
      >>> jax.vmap(update, axis_name="data")(jnp.full((4, 1), 3.0))[0]
      Array([0.5], dtype=float32)

    References:
      Lin et al., ICLR 2018, arXiv:1712.01887.
    """
    _axes.check_names("clip_by_local_norm(axis_name)", axis_name)
    if not max_norm > 0:
        raise ValueError(
            f"clip_by_local_norm(max_norm): must be positive, got {max_norm}; leave it out of the "
            "chain to clip nothing."
        )

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        del params
        bound = max_norm / math.sqrt(_axes.size(axis_name, "clip_by_local_norm"))
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
        # In units in which no square overflows or vanishes.
        unit = _norms.unit_for(_norms.top(wide))
        norm = jnp.sqrt(_norms.square(wide, unit))
        long = norm * unit > bound  # False for NaN, which then stays what it is

        def clip(g: jax.Array, own: jax.Array) -> jax.Array:
            return jnp.where(long, (own / unit) * (bound / norm), own).astype(g.dtype)

        return jax.tree.map(clip, updates, wide), state

    return optax.GradientTransformation(optax.identity().init, update)
