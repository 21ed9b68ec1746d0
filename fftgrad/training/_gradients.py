"""What `compressed_pmean` refuses of gradients and parameters, while tracing."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from fftgrad import _axes
from fftgrad._contracts import AxisName, PyTree
from fftgrad.exchanges import _bucketing

ELSEWHERE = "or say allow_masked=True, if another transformation averages it, as in optax.partition"


def checked_like(tree: PyTree, owner: str = "compressed_pmean") -> PyTree:
    """The shapes of gradients, in float32, once each is one that can be exchanged."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        _bucketing.check_leaf(owner, f"updates{jax.tree_util.keystr(path)}", leaf)
    return _bucketing.like(tree)


def widened(tree: PyTree) -> Any:
    """The tree in float32, once each leaf is one that can be exchanged."""
    checked_like(tree)
    return optax.tree.cast(tree, jnp.float32)


def check_local(updates: PyTree, axis_name: AxisName, owner: str = "compressed_pmean") -> None:
    """Refuses gradients that are summed already."""
    _axes.size(axis_name, owner)
    for path, leaf in jax.tree.leaves_with_path(updates):
        if half := _axes.half_reduced(leaf):
            raise ValueError(
                f"{owner}(updates{jax.tree_util.keystr(path)}): must be the gradient of one "
                f"worker's own batch, got one that is unreduced or reduced over {sorted(half)}; "
                f"take it by fg.value_and_grad(loss, {axis_name!r})(params, batch), and sum over "
                "other axes before, by jax.lax.psum."
            )
        if not _axes.varies(leaf, axis_name):
            raise ValueError(
                f"{owner}(updates{jax.tree_util.keystr(path)}): must be the gradient of one "
                f"worker's own batch, got one that does not vary over {axis_name!r}, because JAX "
                f"has summed it already; take it by fg.value_and_grad(loss, {axis_name!r})"
                "(params, batch), and in place of optax.MultiSteps use fg.multi_steps(tx, every=k)."
            )


def check_replicated(params: PyTree, axis_name: AxisName, owner: str = "compressed_pmean") -> None:
    """Refuses parameters that JAX knows to differ between the workers."""
    for path, leaf in jax.tree.leaves_with_path(params):
        if _axes.known_to_vary(leaf, axis_name):
            raise ValueError(
                f"{owner}.update(params{jax.tree_util.keystr(path)}): must be the same on all "
                f"workers, got one that varies over {axis_name!r}; shard parameters over another "
                "axis, or gather them by fg.optimizers.gather_parameters. Of copies, pass what "
                "came in by in_specs=P()."
            )


def refuse_masked(
    updates: PyTree,
    owner: str = "compressed_pmean",
    otherwise: str = f"; else send it dense by a rule, as fg.SmallDense, {ELSEWHERE}",
) -> None:
    """Refuses leaves that are hidden, and would stay unaveraged."""

    def is_masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    for path, leaf in jax.tree.leaves_with_path(updates, is_leaf=is_masked):
        if is_masked(leaf):
            raise ValueError(
                f"{owner}(updates{jax.tree_util.keystr(path)}): must not be masked, because it "
                f"would stay what each worker has of its own, got optax.MaskedNode(); to "
                f"freeze it, use fg.trainable(tx, mask) in place of what hides it{otherwise}."
            )


ONE_VOTE = (
    "each worker has one vote, however long its gradient is",
    "leave it out, or use a method that averages gradients",
)
MISTYPED = frozenset({"weights", "sample_weight", "sample_weights"})
IN_THE_LOSS = (
    "take the gradients by fg.value_and_grad(has_weight=True), whose plain mean is the weighted one"
)


def weighted(
    tree: PyTree,
    weight: jax.Array | float | None,
    axis_name: AxisName,
) -> PyTree:
    """What a worker hands to a mean so that it counts by its weight: w v / Σ v times it.

    A weight that is negative or not finite, or a sum beyond float32, makes the mean NaN. Without
    one, all workers count alike.
    """
    if weight is None:
        return tree
    if jnp.ndim(weight):
        raise ValueError(
            f"update(weight): must be a scalar, got shape {jnp.shape(weight)}; pass the sum, as "
            "weight=mask.sum()."
        )
    own = _axes.vary(jnp.asarray(weight, jnp.float32), axis_name)
    own = jnp.where((own >= 0) & (own < jnp.inf), own, jnp.nan)
    # A product with zero would keep a NaN.
    tree = jax.tree.map(lambda leaf: jnp.where(own == 0, 0, leaf), tree)
    workers, total = _axes.size(axis_name), lax.psum(own, axis_name)
    total = jnp.where(total < jnp.inf, total, jnp.nan)
    share = own / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    return jax.tree.map(lambda leaf: (share * workers * leaf).astype(leaf.dtype), tree)


def refuse_mistyped(owner: str, extra: Mapping[str, Any]) -> None:
    """Refuses what would be a weight: optax hands on all arguments, and none is missed."""
    for name in MISTYPED & extra.keys():
        raise TypeError(
            f"{owner}.update({name}): must be called weight, got {name}, which has no effect; "
            f"pass it as weight={name}, or not at all."
        )


def refuse_weight(owner: str, weight: Any, because: str, remedy: str = IN_THE_LOSS) -> None:
    """Refuses a weight where it would have no effect, or a wrong one."""
    if weight is not None:
        raise ValueError(
            f"{owner}.update(weight): must be left out, because {because}, got one; {remedy}."
        )


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


def stands_in(params: optax.Params) -> bool:
    """Whether it is what `optax.tree_utils.tree_map_params` passes in place of parameters."""
    kind: Any = type(params)
    return not jax.tree.leaves(params) and kind.__module__.startswith("optax.tree_utils")
