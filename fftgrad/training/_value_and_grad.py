"""The loss of one worker and its gradient."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import AxisName
from fftgrad._values import check, check_type


def value_and_grad(
    loss: Callable[..., Any],
    axis_name: AxisName,
    *,
    has_aux: bool = False,
    has_weight: bool = False,
    argnums: int | tuple[int, ...] = 0,
) -> Callable[..., tuple[Any, Any]]:
    """Function: `jax.value_and_grad` of the loss of one worker's own batch.

    Under `jax.shard_map(check_vma=True)` JAX sums the gradient of replicated parameters over the
    workers. This function types the parameters as varying over the axis, which prevents that sum.
    In other modes it changes nothing.

        value, grads = fg.value_and_grad(loss, "data")(params, x, y)
        updates, state = tx.update(grads, state, params)
        value = jax.lax.pmean(value, "data")  # to report it

    If a transformation behind `compressed_pmean` reads the loss, such as `optax.polyak_sgd`, pass
    it the mean loss of all workers. Otherwise the parameters would differ between workers.

    If the batches of all workers have the same size, return the mean over the worker's batch from
    `loss`. If the sizes differ, as with masked tokens, return the sum over the worker's tokens and
    the number of its tokens:

        def loss(params, x, y, mask):
            return jnp.sum(mask * cross_entropy(params, x, y)), jnp.sum(mask)

        value, grads = fg.value_and_grad(loss, "data", has_weight=True)(params, x, y, mask)

    Worker i of w, with sum Sᵢ and weight Wᵢ, gets the value w Sᵢ / ΣW and the gradient
    w (∇Sᵢ - ∇Wᵢ ΣS / ΣW) / ΣW. The mean value over the workers is ΣS / ΣW, and the mean gradient
    is the gradient of ΣS / ΣW. If all weights are zero, value and gradient are NaN.

    The loss may compute statistics over the axis, as batch normalization does. But the loss that it
    returns must be that of the worker's own batch:

    | the loss of a worker | `check_vma=True` | `check_vma=False`, `pmap`, `vmap` |
    |---|---|---|
    | mean over its batch | right | right |
    | mean over the axis | refused | right |
    | sum over its batch / global batch size | w times too small, not detected | the same |
    | `has_weight`, returns (mean, weight) | wrong, not detected | wrong, not detected |
    | `has_weight`, sum or weight is summed over the axis | refused | wrong, not detected |

    If a sharded model sums over another mesh axis in its loss, use `check_vma=True`. For other
    modes, docs/api/wrappers.md shows a loss.

    Args:
      loss: a function of the parameters and a worker's batch. It returns a scalar, or a pair (sum,
        weight) with `has_weight`. With `has_aux` it returns (scalar or pair, aux).
      axis_name: the axis, or axes, of the workers.
      has_aux: True if the second value that the loss returns is auxiliary and has no gradient.
      has_weight: True if the loss returns (sum, weight) and the mean loss is global sum / global
        weight. This adds one all-reduce of two numbers over the axis.
      argnums: the positional arguments to differentiate, as for `jax.value_and_grad`.

    Returns:
      A function with the arguments of `loss`. It returns (value, gradient) of this worker, not
      averaged over the workers; with `has_aux`, ((value, aux), gradient).

    Raises:
      ValueError: while tracing, if the axis is not bound, or if JAX types the loss, the sum or the
        weight as equal on all workers.
      TypeError: if the loss is not a function; while tracing, if `has_weight` is True and the loss
        does not return a pair.

    Example:
      >>> loss = lambda w, x, mask: (jnp.sum(mask * w * x), jnp.sum(mask))
      >>> grad = fg.value_and_grad(loss, "data", has_weight=True)
      >>> x, mask = jnp.array([[1.0, 2.0], [6.0, 0.0]]), jnp.array([[1, 1], [1, 0]])
      >>> values, grads = jax.vmap(grad, (None, 0, 0), axis_name="data")(2.0, x, mask)
      >>> values.mean().item(), grads.mean().item()
      (6.0, 3.0)
    """
    remedy = "call value_and_grad(loss, axis_name)."
    check_type(callable(loss), "value_and_grad(loss)", "be a function", loss, remedy)

    def own(*args: Any, **kwargs: Any) -> Any:
        out = loss(*args, **kwargs)
        out, aux = out if has_aux else (out, None)
        if has_weight:
            out = _share(out, axis_name)
        else:
            check_own("value_and_grad(loss)", out, axis_name)
        return (out, aux) if has_aux else out

    differentiate = jax.value_and_grad(functools.wraps(loss)(own), argnums, has_aux=has_aux)

    def run(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        _axes.size(axis_name, "value_and_grad")
        varied = list(args)
        for i in (argnums,) if isinstance(argnums, int) else argnums:
            varied[i] = jax.tree.map(lambda a: _axes.vary(jnp.asarray(a), axis_name), varied[i])
        return differentiate(*varied, **kwargs)

    return functools.wraps(loss)(run)


def check_own(owner: str, loss: Any, axis_name: AxisName) -> None:
    """Refuse a loss that JAX types as equal on all workers."""
    share = f"whose gradient is 1/{_axes.size(axis_name)} of the right one"
    got = f"a constant, or a mean or sum over {axis_name!r}, {share}"
    report = f"report jax.lax.pmean(value, {axis_name!r})."
    remedy = f"return it before jax.lax.pmean or psum, and {report}"
    check(_axes.varies(loss, axis_name), owner, "be of one worker's own batch", got, remedy)


def _share(out: Any, axis_name: AxisName) -> jax.Array:
    """Return w Sᵢ / ΣW of worker i; the mean over the workers is global sum / global weight."""
    pair = isinstance(out, tuple | list) and len(out) == 2
    remedy = "return (sum, weight) over this worker's batch."
    check_type(pair, "value_and_grad(loss)", "be a pair with has_weight=True", out, remedy)
    for name, part in zip(("sum", "weight"), out, strict=True):
        check_own(f"value_and_grad(loss, its {name})", part, axis_name)
    dtypes = (jnp.promote_types(jnp.result_type(part), jnp.float32) for part in out)
    total, weight = map(jnp.asarray, out, dtypes)
    workers = _axes.size(axis_name)
    all_total, all_weight = lax.psum(lax.stop_gradient((total, weight)), axis_name)
    # `change` is zero, but has the gradient of the weight.
    change = weight - lax.stop_gradient(weight)
    return workers * (total - all_total / all_weight * change) / all_weight
