"""The loss of one worker and its gradient."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fftgrad import _axes
from fftgrad._contracts import AxisName
from fftgrad._values import check, check_type


def value_and_grad(
    loss: Callable[..., Any],
    axis_name: AxisName,
    *,
    has_aux: bool = False,
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

    `loss` returns the mean over the worker's batch. If the batches differ in size, as with masked
    tokens, also pass the sizes: `tx.update(grads, state, params, weight=jnp.sum(mask))`. If a
    transformation refuses a weight, divide by the mean size over the workers in the loss, by
    `jnp.sum(mask * error) / jax.lax.pmean(jnp.sum(mask), "data")`. The mean value over the workers
    is then the global sum over the global size, and so are the gradients.

    The loss may compute statistics over the axis, as batch normalization does. But the loss that it
    returns must be that of the worker's own batch:

    | the loss of a worker | `check_vma=True` | `check_vma=False`, `pmap`, `vmap` |
    |---|---|---|
    | mean over its batch | right | right |
    | mean over the axis | refused | right |
    | sum over its batch / global batch size | w times too small, not detected | the same |

    If a sharded model sums over another mesh axis in its loss, use `check_vma=True`. For other
    modes, docs/api/wrappers.md shows a loss.

    Args:
      loss: a function of the parameters and a worker's batch. It returns a scalar; with `has_aux`,
        (scalar, aux).
      axis_name: the axis, or axes, of the workers.
      has_aux: True if the second value that the loss returns is auxiliary and has no gradient.
      argnums: the positional arguments to differentiate, as for `jax.value_and_grad`.

    Returns:
      A function with the arguments of `loss`. It returns (value, gradient) of this worker, not
      averaged over the workers; with `has_aux`, ((value, aux), gradient).

    Raises:
      ValueError: while tracing, if the axis is not bound, or if JAX types the loss as equal on all
        workers.
      TypeError: if the loss is not a function.

    Example:
      >>> grad = fg.value_and_grad(lambda w, x: jnp.mean(w * x), "data")
      >>> x = jnp.array([[1.0, 2.0], [6.0, 0.0]])
      >>> values, grads = jax.vmap(grad, (None, 0), axis_name="data")(2.0, x)
      >>> values.tolist(), grads.tolist()
      ([3.0, 6.0], [1.5, 3.0])
    """
    remedy = "call value_and_grad(loss, axis_name)."
    check_type(callable(loss), "value_and_grad(loss)", "be a function", loss, remedy)

    def own(*args: Any, **kwargs: Any) -> Any:
        out = loss(*args, **kwargs)
        out, aux = out if has_aux else (out, None)
        check_own(out, axis_name)
        return (out, aux) if has_aux else out

    differentiate = jax.value_and_grad(functools.wraps(loss)(own), argnums, has_aux=has_aux)

    def run(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        _axes.size(axis_name, "value_and_grad")
        varied = list(args)
        for i in (argnums,) if isinstance(argnums, int) else argnums:
            varied[i] = jax.tree.map(lambda a: _axes.vary(jnp.asarray(a), axis_name), varied[i])
        return differentiate(*varied, **kwargs)

    return functools.wraps(loss)(run)


def check_own(loss: Any, axis_name: AxisName) -> None:
    """Refuse a loss that JAX types as equal on all workers."""
    share = f"whose gradient is 1/{_axes.size(axis_name)} of the right one"
    got = f"a constant, or a mean or sum over {axis_name!r}, {share}"
    report = f"report jax.lax.pmean(value, {axis_name!r})."
    remedy = f"return it before jax.lax.pmean or psum, and {report}"
    fine, rule = _axes.varies(loss, axis_name), "be of one worker's own batch"
    check(fine, "value_and_grad(loss)", rule, got, remedy)
