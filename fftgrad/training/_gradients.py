"""Checks of gradients and parameters while tracing, and the weights of workers."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from fftgrad import _axes
from fftgrad._contracts import AxisName, PyTree
from fftgrad._values import check
from fftgrad.exchanges import _bucketing


def checked_like(tree: PyTree, owner: str = "compressed_pmean") -> PyTree:
    """Return the float32 shapes of gradients; refuse leaves that are no floats of <= 32 bits."""
    _bucketing.check_tree(owner, "updates", tree)
    return _bucketing.like(tree)


def widened(tree: PyTree) -> Any:
    """Cast gradients to float32; refuse leaves that are no floats of <= 32 bits."""
    checked_like(tree)
    return optax.tree.cast(tree, jnp.float32)


def check_local(updates: PyTree, axis_name: AxisName, owner: str = "compressed_pmean") -> None:
    """Refuse gradients that JAX has summed over the workers, or types as such a sum."""
    _axes.size(axis_name, owner)
    for path, leaf in jax.tree.leaves_with_path(updates):
        if _axes.half_reduced(leaf) or not _axes.varies(leaf, axis_name):
            raise ValueError(
                f"{owner}(updates{jax.tree_util.keystr(path)}): must be the gradient of one "
                f"worker's own batch, got a sum over workers of type {jax.typeof(leaf)}; use "
                f"fg.value_and_grad(loss, {axis_name!r})(params, batch), and "
                "fg.training.multi_steps in place of optax.MultiSteps."
            )


def check_replicated(params: PyTree, axis_name: AxisName, owner: str = "compressed_pmean") -> None:
    """Refuse parameters that JAX types as different on each worker."""
    for path, leaf in jax.tree.leaves_with_path(params):
        known = _axes.varying(leaf) if isinstance(leaf, jax.Array) else frozenset[str]()
        argument = f"{owner}.update(params{jax.tree_util.keystr(path)})"
        rule, got = "be the same on all workers", f"one that varies over {axis_name!r}"
        remedy = "shard it over another axis, or call fg.optimizers.gather_parameters."
        check(known.isdisjoint(_axes.names(axis_name)), argument, rule, got, remedy)


def refuse_masked(
    updates: PyTree,
    owner: str = "compressed_pmean",
    otherwise: str = ", or allow_masked=True if another transformation averages it",
) -> None:
    """Refuse masked leaves, because they would not be averaged."""
    is_masked = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731
    rule = "not be masked, because it would not be averaged"
    remedy = f"use fg.trainable(tx, mask) to freeze it{otherwise}."
    for path, leaf in jax.tree.leaves_with_path(updates, is_leaf=is_masked):
        argument = f"{owner}(updates{jax.tree_util.keystr(path)})"
        check(not is_masked(leaf), argument, rule, leaf, remedy)


ONE_VOTE = (
    "each worker has one vote, however long its gradient is",
    "leave it out, or use a method that averages gradients",
)
MISTYPED = frozenset({"weights", "sample_weight", "sample_weights"})
IN_THE_LOSS = "in the loss, divide the sum by jax.lax.pmean(weight, axis_name)"


def weighted(
    tree: PyTree,
    weight: jax.Array | float | None,
    axis_name: AxisName,
) -> PyTree:
    """Multiply a worker's tree by w v / Σ v, with v the weight of each of w workers.

    The plain mean over the workers is then the weighted mean. It is NaN if a weight is negative or
    not finite, or if the sum of the weights overflows float32.
    """
    if weight is None:
        return tree
    shape, remedy = jnp.shape(weight), "pass the sum, as weight=mask.sum()."
    check(not shape, "update(weight)", "be a scalar", f"shape {shape}", remedy)
    own = _axes.vary(jnp.asarray(weight, jnp.float32), axis_name)
    own = jnp.where((own >= 0) & (own < jnp.inf), own, jnp.nan)
    # A gradient with weight zero may be NaN, and 0 * NaN is NaN.
    tree = jax.tree.map(lambda leaf: jnp.where(own == 0, 0, leaf), tree)
    workers, total = _axes.size(axis_name), lax.psum(own, axis_name)
    total = jnp.where(total < jnp.inf, total, jnp.nan)
    share = own / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    return jax.tree.map(lambda leaf: (share * workers * leaf).astype(leaf.dtype), tree)


def refuse_mistyped(owner: str, extra: Mapping[str, Any]) -> None:
    """Refuse a misspelled weight, because optax accepts any extra argument."""
    for name in MISTYPED & extra.keys():
        check(False, f"{owner}.update({name})", "be called weight", name, f"pass weight={name}.")


def refuse_weight(owner: str, weight: Any, because: str, remedy: str = IN_THE_LOSS) -> None:
    """Refuse a weight that would have no effect or a wrong effect."""
    rule = f"be left out, because {because}"
    check(weight is None, f"{owner}.update(weight)", rule, "one", f"{remedy}.")


def in_parts(update: Callable[..., Any], axis_name: AxisName) -> Callable[..., Any]:
    """Wrap `update(updates, state, ...)` so that it also takes global unreduced gradients.

    For an unreduced gradient, each device holds the summand of one worker, and the sum over the
    axis is pending. `update` then runs in its own `shard_map` on w times the summands, whose mean
    is the sum.
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
        because, remedy = "an unreduced gradient is of one loss", "weigh the values in the loss"
        refuse_weight("compressed_pmean", extra.get("weight"), because, remedy)
        workers = _axes.mesh_size(jax.sharding.get_abstract_mesh(), axis_name)

        def own(updates: Any, state: Any, params: Any, value: Any) -> Any:
            parts = jax.tree.map(lambda part: part * workers, updates)
            return update(parts, state, params, value=value, **extra)

        args = (updates, state, params, value)
        ins = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, args)
        is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
        outs = jax.tree.map(_axes.summed, ins[:2], is_leaf=is_spec)
        # check_vma=False, because JAX has no cast from unreduced to varying.
        return jax.shard_map(own, in_specs=ins, out_specs=outs, check_vma=False)(*args)

    return run


def _refuse_sums(updates: PyTree, axis_name: AxisName) -> None:
    """Refuse a mix of unreduced and reduced gradients: `own` multiplies all by w."""
    for path, leaf in jax.tree.leaves_with_path(updates):
        fine = _axes.is_unreduced(leaf, axis_name)
        argument = f"compressed_pmean(updates{jax.tree_util.keystr(path)})"
        reduced = f"jax.sharding.reshard(params, jax.P(reduced={set(_axes.names(axis_name))}))"
        rule, remedy = "be unreduced like the others", f"before the loss, call {reduced}."
        check(fine, argument, rule, "one that is summed already", remedy)


def stands_in(params: optax.Params) -> bool:
    """Detect the placeholder that `optax.tree_utils.tree_map_params` passes to `init`."""
    kind: Any = type(params)
    return not jax.tree.leaves(params) and kind.__module__.startswith("optax.tree_utils")
