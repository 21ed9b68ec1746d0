"""Less compression where the loss rises."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import AxisName
from fftgrad._values import check_within
from fftgrad.exchanges._schedule import next_level
from fftgrad.training._gradients import weighted
from fftgrad.training._pmean import CompressedPmeanState

NONE = float(jnp.finfo(jnp.float32).max)
"""No loss so far; an infinity would stop a healthy step under `jax_debug_infs`."""


class RecoverByLossState(NamedTuple):
    """State of `recover_by_loss`.

    Attributes:
      inner: the state of `compressed_pmean`, with the level of each `Ladder`.
      loss: the smoothed loss; the largest float32 before the first.
      best: the least smoothed loss since the level was reached.
    """

    inner: CompressedPmeanState
    loss: jax.Array
    best: jax.Array


def recover_by_loss(
    tx: optax.GradientTransformationExtraArgs,
    tolerance: float = 0.1,
    smoothing: float = 0.9,
    *,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    """Transformation: go to the next level of a `Ladder` when the loss says so, never back.

    After a step the level rises by one if the smoothed mean loss exceeds (1 + tolerance) times the
    least since the level was reached, or is not finite. A step whose gradients are not finite is
    skipped, and tells nothing.

    Args:
      tx: `compressed_pmean` with a `Ladder`, as
        `fg.methods.fft_sparsification(recover=(0.5, 0.0))` is.
      tolerance: by how much the loss may rise, 0.1 for a tenth.
      smoothing: weight of the past in the smoothed loss.
      axis_name: the axis, or axes, of the workers.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a `RecoverByLossState`. Its
      `update` takes the loss of the worker, or the mean over the workers:
      `tx.update(grads, state, params, value=loss)`.

    Wire: that of `tx`, and 4 bytes for the mean of the loss.

    Differs from the paper: it says that lowering theta recovers a failed run; when to, is ours.

    Raises:
      ValueError: if `tolerance` is not positive, or `smoothing` not in [0, 1); while tracing, if
        `value` is missing.
      TypeError: in `init`, if `tx` is something other than `compressed_pmean`.

    Example:
      >>> method = fg.methods.fft_sparsification(theta=0.9, recover=(0.5, 0.0))
      >>> tx = fg.compressed_pmean(method, axis_name="data")
      >>> tx = fg.methods.recover_by_loss(tx, tolerance=0.1, axis_name="data")

    References:
      Wang et al., HPDC 2020, arXiv:1811.08596.
    """
    check_within("recover_by_loss(tolerance)", tolerance, "(0, inf)", "use 0.1.")
    check_within("recover_by_loss(smoothing)", smoothing, "[0, 1)", "use 0.9.")

    def init(params: optax.Params) -> RecoverByLossState:
        inner: Any = tx.init(params)
        if not isinstance(inner, CompressedPmeanState):
            raise TypeError(
                "recover_by_loss(tx): must be fg.compressed_pmean(...), got a transformation whose "
                f"state is a {type(inner).__name__}; chain the others after recover_by_loss."
            )
        none = jnp.full((), NONE, jnp.float32)
        return RecoverByLossState(inner, none, none)

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        value: jax.Array | None = None,
        weight: jax.Array | float | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, Any]:
        if value is None:
            raise ValueError(
                "recover_by_loss.update(value): must be the loss, got none; call "
                "tx.update(grads, state, params, value=loss)."
            )
        out: Any = tx.update(updates, state.inner, params, weight=weight, **extra)
        updates, inner = out
        loss = jnp.asarray(value, jnp.float32)
        if _axes.varies(loss, axis_name):
            loss = lax.pmean(weighted(loss, weight, axis_name), axis_name)
        smoothed = smoothing * state.loss + (1 - smoothing) * loss
        smoothed = jnp.where(state.loss < NONE, smoothed, loss)
        best = jnp.fmin(state.best, smoothed)
        worse = ~(smoothed <= state.best + tolerance * jnp.abs(state.best))
        worse = (state.best < NONE) & worse | ~jnp.isfinite(loss)
        seen = RecoverByLossState(
            inner=next_level(inner, worse),
            loss=jnp.where(worse, NONE, smoothed),
            best=jnp.where(worse, NONE, best),
        )
        counts = inner.skipped == state.inner.skipped
        return updates, optax.tree.where(counts, seen, state._replace(inner=inner))

    return optax.GradientTransformationExtraArgs(init, update)
