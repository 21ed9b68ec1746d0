"""An optimizer of some leaves, where the others stay as they are."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fftgrad._contracts import PyTree
from fftgrad._values import check_transformation
from fftgrad.training._stands_in import stands_in

Mask = PyTree | Callable[[PyTree], PyTree]


def trainable(
    tx: optax.GradientTransformation, mask: Mask
) -> optax.GradientTransformationExtraArgs:
    """Transformation: another one, of the leaves that are trained; the others stay as they are.

    For fine-tuning with frozen leaves, as by LoRA. The transformation inside does not see frozen
    leaves: they take no bytes, no residual and no moments. Put it around the whole chain:

        lora = lambda params: jax.tree_util.tree_map_with_path(
            lambda path, _: "lora" in jax.tree_util.keystr(path), params
        )
        tx = fg.trainable(fg.optimizers.feedback_adam(3e-4, axis_name="data"), lora)

    What comes after it in a chain sees zeros for frozen leaves, and a weight decay there would move
    them. A mask after the exchange, as `optax.freeze` or an `optax.partition` around the optimizer
    alone, is too late: gradients of frozen leaves are compressed with the others, take most of a
    top-k, and pile up in the residual, without an error.

    Args:
      tx: any optax transformation; complete, with its learning rate.
      mask: as for `optax.masked`: a tree of bools like the parameters, or with one in place of a
        subtree, or a function that makes it of them; True for what is trained.

    Returns:
      An `optax.GradientTransformationExtraArgs` with the state of `tx`. The updates of frozen
      leaves are zeros.

    Wire: that of `tx` for the leaves that are trained, `fg.wire_bytes(exchange, trained)` with
      `trained = jax.tree.map(lambda keep, leaf: leaf if keep else None, mask, params)`.

    Claims: the same updates and states, to the bit, as of `tx` on a tree that has these leaves
      alone.

    Raises:
      TypeError: while tracing, if a leaf of the mask is no bool.

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
            # Made anew, because JAX may type the gradient as varying.
            return move if keep else jax.tree.map(lambda g: jnp.zeros(g.shape, g.dtype), grad)

        return jax.tree.map(whole, own, updates, moves), state

    return optax.GradientTransformationExtraArgs(init, update)


def _made(mask: Mask, tree: PyTree) -> PyTree:
    """The mask as a tree of bools."""
    # A module that is a tree of bools may have a call, too.
    is_function = callable(mask) and jax.tree_util.all_leaves([mask])
    made = mask(tree) if is_function else mask
    for path, keep in jax.tree.leaves_with_path(made):
        if not isinstance(keep, bool | np.bool_):
            raise TypeError(
                f"trainable(mask{jax.tree_util.keystr(path)}): must be True for what is trained, "
                f"and False for what is frozen, got {keep!r}; use a tree of bools, or a function "
                "from the parameters to one."
            )
    return made


def _trained(mask: PyTree, tree: PyTree) -> PyTree:
    """The tree without what is frozen."""
    return jax.tree.map(lambda keep, part: part if keep else None, mask, tree)
