"""Clipping before the exchange."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fftgrad.ops import _finite


def clip_by_local_norm(max_norm: float) -> optax.GradientTransformation:
    """Transformation: clip the norm of each worker's own gradient at max_norm.

    So the norm of the workers' mean is at most `max_norm` too. It goes before `compressed_pmean`,
    or before a whole optimizer, in the chain, where nothing has accumulated in a residual yet. If
    the gradients of w workers are mostly independent noise, each is up to √w times as long as their
    mean: then √w times the bound of `optax.clip_by_global_norm` clips as often.

    Args:
      max_norm: bound of the norm of a worker's gradient, over all leaves, positive.

    Returns:
      An `optax.GradientTransformation` without state.

    Claims: gradients of any finite size are clipped; what is not finite stays so.

    Differs from the paper: DGC bounds the workers' sum, if they are independent, by `max_norm`, and
      clips each gradient at max_norm / √w; pass that.

    Raises:
      ValueError: if `max_norm` is not positive.

    Example:
      >>> clip = fg.training.clip_by_local_norm(1.0)
      >>> clip.update(jnp.array([3.0, 4.0]), clip.init(jnp.zeros(2)))[0]
      Array([0.6, 0.8], dtype=float32)

    References:
      Lin et al., ICLR 2018, arXiv:1712.01887.
    """
    if not max_norm > 0:
        raise ValueError(
            f"clip_by_local_norm(max_norm): must be positive, got {max_norm}; leave it out of the "
            "chain to clip nothing."
        )

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        del params
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
        # In units in which no square overflows or vanishes.
        unit = _finite.unit_for(_finite.top(wide))
        norm = jnp.sqrt(_finite.square(wide, unit))
        long = norm * unit > max_norm  # False for NaN, which then stays what it is

        def clip(g: jax.Array, own: jax.Array) -> jax.Array:
            return jnp.where(long, (own / unit) * (max_norm / norm), own).astype(g.dtype)

        return jax.tree.map(clip, updates, wide), state

    return optax.GradientTransformation(optax.identity().init, update)
