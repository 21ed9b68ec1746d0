"""Transformations beside `compressed_pmean`: clipping, freezing, accumulation."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import PyTree
from fftgrad._values import check_count, check_transformation, check_type, check_within
from fftgrad.exchanges._shards import PerWorker, add_worker_axis, drop_worker_axis
from fftgrad.ops import _count, _finite, _rounding
from fftgrad.training._gradients import refuse_weight, stands_in


def local_state(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Transformation: wrap a transformation whose state differs between the workers.

    A transformation before `compressed_pmean` sees the gradients of one worker, so its state
    differs between the workers. This wrapper adds a leading axis of workers to the state, and
    `fg.state_specs` shards this axis. For example, compress the update of a local preconditioner:

        tx = optax.chain(
            fg.training.local_state(optax.scale_by_adam()),
            fg.compressed_pmean(fg.AllGather(codec), fg.ErrorFeedback(), axis_name="data"),
            optax.scale(-3e-4),
        )

    The parameters stay equal on all workers, because only the mean of the updates reaches them.

    Args:
      tx: any optax transformation.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a `PerWorker`. It passes extra
      arguments of `update`, such as `value=loss`, to `tx` if `tx` accepts them.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> tx = fg.training.local_state(optax.trace(0.9))
      >>> tx.init({"w": jnp.zeros(3)}).worker_rows.trace["w"].shape
      (1, 3)
    """
    check_transformation("local_state(tx)", tx)
    run = optax.with_extra_args_support(tx).update

    def init(params: optax.Params) -> PerWorker:
        return add_worker_axis(tx.init(params))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, Any]:
        updates, inner = run(updates, drop_worker_axis(state), params, **extra)
        return updates, add_worker_axis(inner)

    return optax.GradientTransformationExtraArgs(init, update)


def clip_by_local_norm(max_norm: float) -> optax.GradientTransformation:
    """Transformation: clip the norm of each worker's own gradient at max_norm.

    The norm of the mean is then at most `max_norm` too. Put it before `compressed_pmean`, or before
    a whole optimizer, so that it clips gradients before the residual is added. If the gradients
    of w workers are mostly independent noise, the norm of each is about √w times the norm of their
    mean. Then pass √w times the bound that you would pass to `optax.clip_by_global_norm`.

    Args:
      max_norm: largest norm of a worker's gradient, over all leaves, positive.

    Returns:
      An `optax.GradientTransformation` without state.

    Claims: finite gradients of any size are clipped; non-finite values stay non-finite.

    Differs from the paper: DGC bounds the sum of the workers' gradients, so it divides the bound
      by √w. Pass max_norm / √w for the same effect.

    Example:
      >>> clip = fg.training.clip_by_local_norm(1.0)
      >>> clip.update(jnp.array([3.0, 4.0]), clip.init(jnp.zeros(2)))[0]
      Array([0.6, 0.8], dtype=float32)

    References:
      Lin et al., ICLR 2018, arXiv:1712.01887.
    """
    check_within("clip_by_local_norm(max_norm)", max_norm, "(0, inf)", "use 1.0.")

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        del params
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
        # In this unit, no square overflows or underflows.
        unit = _finite.unit_for(_finite.top(wide))
        norm = jnp.sqrt(_finite.square(wide, unit))
        long = norm * unit > max_norm  # False for NaN, which stays NaN

        def clip(g: jax.Array, own: jax.Array) -> jax.Array:
            return jnp.where(long, (own / unit) * (max_norm / norm), own).astype(g.dtype)

        return jax.tree.map(clip, updates, wide), state

    return optax.GradientTransformation(optax.identity().init, update)


Mask = PyTree | Callable[[PyTree], PyTree]


def trainable(
    tx: optax.GradientTransformation, mask: Mask
) -> optax.GradientTransformationExtraArgs:
    """Transformation: apply a transformation to the trained leaves, and freeze the others.

    Use it for fine-tuning with frozen leaves, as in LoRA. The inner transformation does not see
    frozen leaves, so they need no bytes, residual or moments. Put it around the whole chain:

        lora = lambda params: jax.tree_util.tree_map_with_path(
            lambda path, _: "lora" in jax.tree_util.keystr(path), params
        )
        tx = fg.trainable(fg.optimizers.feedback_adam(3e-4, axis_name="data"), lora)

    Put nothing behind it in a chain: a weight decay there would change frozen leaves. Do not use
    `optax.freeze` after the exchange instead: the exchange would compress frozen leaves too.

    Args:
      tx: a whole optax optimizer, with its learning rate.
      mask: as for `optax.masked`: a tree of bools like the parameters, where one bool may stand for
        a subtree, or a function from the parameters to such a tree. True means trained.

    Returns:
      An `optax.GradientTransformationExtraArgs` with the state of `tx`. The updates of frozen
      leaves are zeros.

    Wire: the bytes of `tx` for the trained leaves, `fg.wire_bytes(exchange, trained)` with
      `trained = jax.tree.map(lambda keep, leaf: leaf if keep else None, mask, params)`.

    Claims: updates and states are bit-identical to those of `tx` on a tree of the trained leaves.

    Raises:
      TypeError: while tracing, if a leaf of the mask is not a bool.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> params = {"kernel": jnp.ones(3), "lora": jnp.ones(2)}
      >>> tx = fg.trainable(optax.sgd(1.0), {"kernel": False, "lora": True})
      >>> tx.update(params, tx.init(params))[0]["kernel"].tolist()
      [0.0, 0.0, 0.0]

    References:
      Hu et al., ICLR 2022, arXiv:2106.09685.
    """
    check_transformation("trainable(tx)", tx)
    run = optax.with_extra_args_support(tx).update

    def init(params: optax.Params) -> Any:
        return tx.init(params if stands_in(params) else _trained(_made(mask, params), params))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, Any]:
        own = _made(mask, updates)
        inside = None if params is None else _trained(own, params)
        moves, state = run(_trained(own, updates), state, inside, **extra)

        def whole(keep: bool, grad: PyTree, move: PyTree) -> PyTree:
            # `zeros_like` would keep the gradient's type, which may vary over the workers.
            return move if keep else jax.tree.map(lambda g: jnp.zeros(g.shape, g.dtype), grad)

        return jax.tree.map(whole, own, updates, moves), state

    return optax.GradientTransformationExtraArgs(init, update)


def _made(mask: Mask, tree: PyTree) -> PyTree:
    """Return the mask as a tree of bools."""
    # A module that is a tree of bools may also be callable.
    is_function = callable(mask) and jax.tree_util.all_leaves([mask])
    made = mask(tree) if is_function else mask
    for path, keep in jax.tree.leaves_with_path(made):
        argument = f"trainable(mask{jax.tree_util.keystr(path)})"
        rule, remedy = (
            "be True for trained leaves, else False",
            "use a tree of bools, or a function.",
        )
        check_type(isinstance(keep, bool | np.bool_), argument, rule, keep, remedy)
    return made


def _trained(mask: PyTree, tree: PyTree) -> PyTree:
    """Replace frozen leaves by None."""
    return jax.tree.map(lambda keep, part: part if keep else None, mask, tree)


class MultiStepsState(NamedTuple):
    """State of `multi_steps`.

    Attributes:
      step: number of gradients, int32, equal on all workers.
      total: partial mean of each worker's k gradients, plus the last rounding error, float32.
      inner: state of the inner transformation.
    """

    step: jax.Array
    total: PerWorker
    inner: PyTree


def multi_steps(
    tx: optax.GradientTransformation, every: int
) -> optax.GradientTransformationExtraArgs:
    """Transformation: apply a transformation every k steps, to the mean of k gradients.

    Each worker averages k of its own gradients, and the workers exchange only these averages, once
    in k steps, as for a batch k times as large. The updates of the other steps are zeros. If the
    gradients have a narrow dtype, the rounding error of an average is added to the next average.
    Do not use `optax.MultiSteps` for this: it exchanges in every step and discards most results.

    Args:
      tx: a transformation that contains `compressed_pmean`.
      every: k, the number of gradients per update.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a `MultiStepsState`, which
      `fg.state_specs` shards.

    Raises:
      ValueError: while tracing, if `update` gets a `weight`: each gradient has its own weight.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> tx = fg.training.multi_steps(optax.sgd(1.0), every=2)
      >>> first, state = tx.update(jnp.ones(1), tx.init(jnp.ones(1)))
      >>> second, state = tx.update(3 * jnp.ones(1), state)
      >>> first.tolist(), second.tolist()
      ([0.0], [-2.0])
    """
    check_transformation("multi_steps(tx)", tx)
    check_count("multi_steps(every)", every, "use 1 for each.")

    def init(params: optax.Params) -> MultiStepsState:
        zeros = jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), jnp.float32), params)
        return MultiStepsState(jnp.zeros((), jnp.int32), add_worker_axis(zeros), tx.init(params))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, MultiStepsState]:
        refuse_weight("multi_steps", extra.get("weight"), "each gradient has its own")
        total = jax.tree.map(
            lambda t, g: t + g.astype(jnp.float32) * (1.0 / every),
            drop_worker_axis(state.total),
            updates,
        )
        run = optax.with_extra_args_support(tx).update

        def emit(inner: PyTree) -> Any:
            mean, lost = _rounding.narrowed(total, updates)
            done, inner = run(mean, inner, params, **extra)
            if lost is None:
                return done, jax.tree.map(jnp.zeros_like, total), inner
            # The rounding error of a non-finite mean would spoil all later means.
            return done, jax.tree.map(lambda a: jnp.where(jnp.isfinite(a), a, 0), lost), inner

        def wait(inner: PyTree) -> Any:
            like, *_ = jax.eval_shape(emit, inner)
            # Both branches need one type. The mean may vary along axes other than the workers'.
            zeros = jax.tree.map(lambda a: _axes.vary_like(jnp.zeros(a.shape, a.dtype), a), like)
            return zeros, total, inner

        step = _count.next_step(state.step, every)
        due = step % every == 0
        out, total, inner = lax.cond(due, emit, wait, state.inner)
        return out, MultiStepsState(step, add_worker_axis(total), inner)

    return optax.GradientTransformationExtraArgs(init, update)
