"""A transformation of which each worker keeps a state of its own."""

from typing import Any

import optax

from fftgrad._values import check_transformation
from fftgrad.exchanges._per_worker import PerWorker, add_worker_axis, drop_worker_axis


def per_worker(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Transformation: another one, of which each worker keeps a state of its own.

    What comes before `compressed_pmean` sees the gradients of one worker only, so its state differs
    between the workers. This gives the state a leading axis of workers, which `fg.state_specs`
    shards. To compress the update of a local preconditioner:

        tx = optax.chain(
            fg.per_worker(optax.scale_by_adam()),
            fg.compressed_pmean(fg.AllGather(codec), fg.ErrorFeedback(), axis_name="data"),
            optax.scale(-3e-4),
        )

    The parameters stay equal on all workers, because only the mean of the updates reaches them.

    Args:
      tx: any optax transformation.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a `PerWorker`. What its `update`
      takes besides, such as `value=loss`, `tx` gets if it takes it.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> fg.per_worker(optax.trace(0.9)).init({"w": jnp.zeros(3)}).worker_rows.trace["w"].shape
      (1, 3)
    """
    check_transformation("per_worker(tx)", tx)
    run = optax.with_extra_args_support(tx).update

    def init(params: optax.Params) -> PerWorker:
        return add_worker_axis(tx.init(params))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, Any]:
        updates, inner = run(updates, drop_worker_axis(state), params, **extra)
        return updates, add_worker_axis(inner)

    return optax.GradientTransformationExtraArgs(init, update)
