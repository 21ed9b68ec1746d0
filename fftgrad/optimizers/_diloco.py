"""Local steps, and an outer optimizer on what they changed."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fftgrad._contracts import AxisName, Exchange, Memory
from fftgrad.codecs._chain import chain
from fftgrad.codecs.quantizers import LogLevels
from fftgrad.codecs.selectors import TopK
from fftgrad.exchanges import AllGather, _parts
from fftgrad.exchanges._per_worker import PerWorker, add_worker_axis, drop_worker_axis
from fftgrad.memories import ErrorFeedback
from fftgrad.training._pmean import CompressedPmeanState, compressed_pmean

DECAYED = ErrorFeedback(decay=0.95)
SPARSE = AllGather(chain(TopK(fraction=0.03), LogLevels(bits=4)))


class DilocoState(NamedTuple):
    """State of `diloco`.

    Attributes:
      step: how many inner steps there were, int32, equal on all workers.
      anchor: the parameters after the last outer step, the same bits on all workers.
      inner: the inner optimizer's state, of which each worker has its own.
      outer: the outer optimizer's state, equal on all workers.
      pmean: the state of the compressed mean of what the workers changed.
    """

    step: jax.Array
    anchor: optax.Params
    inner: PerWorker
    outer: optax.OptState
    pmean: CompressedPmeanState


def diloco(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    every: int,
    exchange: Exchange = SPARSE,
    memory: Memory = DECAYED,
    *,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    """Optimizer: each worker trains on its own, and every H steps they average what they changed.

    With θ the parameters of a worker and θ̄ the last that all had in common, for H steps

        θ ← θ + inner(∇f(θ)),

    then, with C the compressed mean with its memory,

        θ̄ ← θ̄ + outer(C(θ̄ - θ)),   θ ← θ̄.

    It is a whole optimizer and needs nothing after it: `optax.adamw(3e-4)` for inner and
    `optax.sgd(0.7, momentum=0.9, nesterov=True)` for outer are DiLoCo's; the default exchange and
    memory, with `optax.sgd(1.0)` for outer, are near to SparseLoCo.

    Between two outer steps the parameters differ between the workers, so they are sharded as the
    inner state is: with a leading axis of workers under `jax.shard_map`. After an outer step they
    are `state.anchor` up to one rounding, because an optax update is added to them: evaluate and
    save `state.anchor`, from which the workers' parameters are counted and which does not drift.

    Args:
      inner: the optimizer of each worker, complete with its learning rate.
      outer: the optimizer of what all have in common, to which the mean change is the gradient.
      every: H, the number of inner steps to an outer one.
      exchange: how the changes travel and are averaged.
      memory: what is done with what an outer step does not send.
      axis_name: the axis, or axes, of the workers.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a `DilocoState`; it needs `params`.

    Wire: `fg.wire_bytes(exchange, params)` every H steps, in a branch of its own; nothing else.

    Claims: `state.anchor` has the same bits on all workers. An outer step in which anything is not
      finite leaves `anchor`, the outer state and the memory as they were, and the workers whose
      parameters are finite go back to it. No update leads back from a NaN in a worker's parameters,
      and then no outer step is taken any more: let `inner` be
      `optax.apply_if_finite(optax.adamw(3e-4), 100)`, which leaves such a gradient out.

    Raises:
      ValueError: if `every` is not positive; while tracing, if `params` is missing.

    Differs from the paper: SparseLoCo takes the largest of chunks of 4096, in 2 bits; the default
      takes the largest of all, 3 %, in 4 bits.

    Example:
      >>> import fftgrad as fg
      >>> import optax
      >>> tx = fg.optimizers.diloco(optax.adamw(3e-4), optax.sgd(1.0), every=50)
      >>> import jax, jax.numpy as jnp
      >>> jax.eval_shape(tx.init, jnp.zeros(9)).anchor.shape
      (9,)

    References:
      Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
      arXiv:2311.08105. Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo",
      2025, arXiv:2508.15706.
    """
    if every < 1:
        raise ValueError(f"diloco(every): must be at least 1, got {every}; use 50.")
    compressed: Any = compressed_pmean(exchange, memory, axis_name=axis_name)

    def init(params: optax.Params) -> DilocoState:
        return DilocoState(
            step=jnp.zeros((), jnp.int32),
            anchor=jax.tree.map(jnp.asarray, params),
            inner=add_worker_axis(inner.init(params)),
            outer=outer.init(params),
            pmean=compressed.init(params),
        )

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, DilocoState]:
        if params is None:
            raise ValueError(
                "diloco.update(params): the change since the last outer step is counted from "
                "them, got None; call tx.update(grads, state, params)."
            )
        updates, own = inner.update(updates, drop_worker_axis(state.inner), params)
        local = optax.apply_updates(params, updates)

        def together(_: Any) -> Any:
            change = jax.tree.map(jnp.subtract, state.anchor, local)
            mean, pmean = compressed.update(change, state.pmean, **extra)
            moved, after = outer.update(mean, state.outer, state.anchor)
            anchor = optax.apply_updates(state.anchor, moved)
            fine = pmean.skipped == state.pmean.skipped
            anchor, after = _parts.where(fine, (anchor, after), (state.anchor, state.outer))
            return jax.tree.map(jnp.subtract, anchor, params), anchor, after, pmean

        def alone(_: Any) -> Any:
            return updates, state.anchor, state.outer, state.pmean

        due = (state.step + 1) % every == 0
        updates, anchor, after, pmean = lax.cond(due, together, alone, None)
        return updates, DilocoState(state.step + 1, anchor, add_worker_axis(own), after, pmean)

    return optax.GradientTransformationExtraArgs(init, update)
