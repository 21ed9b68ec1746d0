"""What `compressed_pmean` refuses of gradients and parameters, while tracing."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fftgrad import _axes
from fftgrad._contracts import AxisName, PyTree
from fftgrad.exchanges import _layout

ELSEWHERE = "or say masked='elsewhere' if another transformation averages it, as in optax.partition"


def checked_like(tree: PyTree, owner: str = "compressed_pmean") -> PyTree:
    """The shapes of gradients, in float32, once each is one that can be exchanged."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        _layout.check_leaf(owner, f"updates{jax.tree_util.keystr(path)}", leaf)
    return _layout.like(tree)


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
                "(params, batch), and in place of optax.MultiSteps use fg.accumulate(tx, every=k)."
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
