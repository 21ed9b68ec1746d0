"""The loss of a worker and its gradient."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import AxisName
from fftgrad._values import brief


def value_and_grad(
    loss: Callable[..., Any],
    axis_name: AxisName,
    *,
    has_aux: bool = False,
    has_weight: bool = False,
    argnums: int | tuple[int, ...] = 0,
) -> Callable[..., tuple[Any, Any]]:
    """Function: `jax.value_and_grad` of the loss of one worker's own batch.

    It is what `compressed_pmean` takes. Under `jax.shard_map(check_vma=True)` JAX sums the gradient
    of replicated parameters over the workers, unless they are typed as varying over the axis, which
    this does. Elsewhere there is nothing to do.

        value, grads = fg.value_and_grad(loss, "data")(params, x, y)
        updates, state = tx.update(grads, state, params)
        value = jax.lax.pmean(value, "data")  # to report it

    What reads the loss behind `compressed_pmean`, as `optax.polyak_sgd` does, must take the mean,
    or the parameters would differ.

    The loss is the mean over the worker's batch, and the mean over the workers is that over all
    batches where these have the same size. Where they have not, as with tokens under a mask, let
    it return the sum over the worker's tokens and their number:

        def loss(params, x, y, mask):
            return jnp.sum(mask * cross_entropy(params, x, y)), jnp.sum(mask)

        value, grads = fg.value_and_grad(loss, "data", has_weight=True)(params, x, y, mask)

    With Sᵢ and Wᵢ of worker i of w, worker i then gets the value w Sᵢ / ΣW and the gradient
    w (∇Sᵢ - ∇Wᵢ ΣS / ΣW) / ΣW, whose means over the workers are ΣS / ΣW and its gradient. Where no
    worker has any weight the value is NaN, and the gradient that of 0/0.

    What must not be in the loss is the mean over the workers itself (`jax.lax.pmean(loss)`, or
    `jax.lax.psum` and a division by the global batch), nor a division by the global batch without
    the sum. Statistics over the axis inside of it, as of batch normalization, are right in all
    modes.

    | the loss of a worker | `check_vma=True` | `check_vma=False`, `pmap`, `vmap` |
    |---|---|---|
    | mean over its batch | right | right |
    | mean over the axis | refused: each would get 1/w | right: a psum's transpose is a psum there |
    | its sum / global batch | 1/w of it, and nobody can know | 1/w of it |
    | `has_weight`, (mean, weight) for (sum, weight) | wrong, and nobody can know | wrong |
    | `has_weight`, a sum or weight over the axis | refused | wrong |

    A sum over another axis of the mesh, of a model that is sharded over it, is right with
    `check_vma=True` alone: else what lies before it gets its gradient as many times as that axis is
    long, as by `jax.grad`. docs/api/wrappers.md has a form that is right there.

    Args:
      loss: a function of the parameters and a worker's batch to its scalar loss; with `has_weight`
        to (sum, weight); with `has_aux` to that and anything else.
      axis_name: the axis, or axes, of the workers; other mesh axes are left alone.
      has_aux: whether the loss returns a pair, of which the second is passed on as it is.
      has_weight: whether the loss returns a sum and its weight, and the mean that is wanted is that
        of all workers: global sum over global weight. It takes a sum of two numbers over the axis.
      argnums: the positional arguments to differentiate, as of `jax.value_and_grad`.

    Returns:
      A function with the arguments of `loss`. It returns (value, gradient), or with `has_aux`
      ((value, aux), gradient): both this worker's, before any mean over the workers.

    Raises:
      ValueError: while tracing, if the axis is not bound, or if JAX knows that the loss, the sum or
        the weight does not vary over the axis.
      TypeError: if the loss is no function; while tracing, if `has_weight` and it returns no pair.

    Example:
      >>> loss = lambda w, x, mask: (jnp.sum(mask * w * x), jnp.sum(mask))
      >>> grad = fg.value_and_grad(loss, "data", has_weight=True)
      >>> x, mask = jnp.array([[1.0, 2.0], [6.0, 0.0]]), jnp.array([[1, 1], [1, 0]])
      >>> values, grads = jax.vmap(grad, (None, 0, 0), axis_name="data")(2.0, x, mask)
      >>> values.mean().item(), grads.mean().item()
      (6.0, 3.0)
    """
    if not callable(loss):
        raise TypeError(
            f"value_and_grad(loss): must be a function, got {brief(loss)}; the loss comes first: "
            "value_and_grad(loss, axis_name)."
        )

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
    """Refuses a loss that is known to be the same on all workers."""
    if not _axes.varies(loss, axis_name):
        raise ValueError(
            f"{owner}: must be the loss of one worker's own batch, got one that does not vary over "
            f"{axis_name!r}: a mean or a sum over the workers, by jax.lax.pmean or psum, is in it "
            f"already, and each worker's gradient would be 1/{_axes.size(axis_name)} of what "
            "it should be. Return the mean over this worker's batch, and take "
            f"jax.lax.pmean(value, {axis_name!r}) of the value afterwards; for a mean weighted by "
            "tokens, return (sum, weight) of this worker with fg.value_and_grad(has_weight=True)."
        )


def _share(out: Any, axis_name: AxisName) -> jax.Array:
    """The worker's share of global sum / global weight, of which the mean is to be taken."""
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise TypeError(
            "value_and_grad(loss): must be of two numbers with has_weight=True, got "
            f"{type(out).__name__}; return (sum, weight) over this worker's batch."
        )
    for name, part in zip(("sum", "weight"), out, strict=True):
        if not _axes.varies(part, axis_name):
            raise ValueError(
                f"value_and_grad(loss): the {name} must be over this worker's own batch, got one "
                f"that does not vary over {axis_name!r}; return what it is before jax.lax.psum, or "
                "leave out has_weight=True and return the mean if all workers have the same weight."
            )
    total, weight = (_at_least_float32(part) for part in out)
    workers = _axes.size(axis_name)
    all_total, all_weight = lax.psum(lax.stop_gradient((total, weight)), axis_name)
    # Zero, with the gradient of the weight.
    change = weight - lax.stop_gradient(weight)
    return workers * (total - all_total / all_weight * change) / all_weight


def _at_least_float32(x: Any) -> jax.Array:
    array = jnp.asarray(x)
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))
