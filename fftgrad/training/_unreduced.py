"""Gradients that JAX has yet to sum over the workers, under `jax.jit` on an Explicit mesh."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from fftgrad import _axes
from fftgrad._contracts import AxisName, PyTree


def in_parts(update: Callable[..., Any], axis_name: AxisName) -> Callable[..., Any]:
    """`update(updates, state, ...)` that also takes global gradients, unreduced over the axis.

    The type of such a gradient says that it is a sum over the workers which nobody has taken yet;
    each device holds one worker's part. `update` then runs on the parts, in a `shard_map` of its
    own. It returns the sum, as the mean of w times the parts.
    """
    update = _axes.without_explicit(update)

    def run(
        updates: Any,
        state: Any,
        params: Any = None,
        value: Any = None,
        **extra: Any,
    ) -> Any:
        if not any(_axes.is_unreduced(leaf, axis_name) for leaf in jax.tree.leaves(updates)):
            return update(updates, state, params, value=value, **extra)
        _refuse_sums(updates, axis_name)
        if extra.get("weight") is not None:
            raise ValueError(
                "compressed_pmean.update(weight): must be None for gradients of one loss over the "
                f"whole batch, which are unreduced over {axis_name!r}, got a weight; divide by the "
                "sum of the weights in the loss."
            )
        workers = _axes.mesh_size(jax.sharding.get_abstract_mesh(), axis_name)

        def own(updates: Any, state: Any, params: Any, value: Any) -> Any:
            parts = jax.tree.map(lambda part: part * workers, updates)
            return update(parts, state, params, value=value, **extra)

        args = (updates, state, params, value)
        ins = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, args)
        outs = jax.tree.map(_axes.summed, ins[:2], is_leaf=_is_spec)
        # Unchecked, because JAX has no cast from what is unreduced to what varies.
        return jax.shard_map(own, in_specs=ins, out_specs=outs, check_vma=False)(*args)

    return run


def _is_spec(node: object) -> bool:
    return isinstance(node, PartitionSpec)


def _refuse_sums(updates: PyTree, axis_name: AxisName) -> None:
    """Refuses gradients of which only some are left to sum."""
    for path, leaf in jax.tree.leaves_with_path(updates):
        if not _axes.is_unreduced(leaf, axis_name):
            raise ValueError(
                f"compressed_pmean(updates{jax.tree_util.keystr(path)}): must be unreduced over "
                f"{axis_name!r} as others are, got one that JAX has summed already; type its "
                "parameter as reduced before the loss, by jax.sharding.reshard(params, "
                f"jax.P(reduced={set(_axes.names(axis_name))}))."
            )
