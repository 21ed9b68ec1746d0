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
    """Refuses gradients that are summed already, or vary over different axes."""
    _axes.size(axis_name, owner)
    for path, leaf in jax.tree.leaves_with_path(updates):
        if half := _axes.half_reduced(leaf):
            raise ValueError(
                f"{owner}(updates{jax.tree_util.keystr(path)}): must be the gradient of "
                "one worker's own batch, got one that JAX types as unreduced or reduced over "
                f"{sorted(half)}: a sum that it has yet to take there; over {axis_name!r} take the "
                f"gradient by fg.value_and_grad(loss, {axis_name!r})(params, batch), and over "
                "other axes sum it before, by jax.lax.psum."
            )
        if not _axes.varies(leaf, axis_name):
            raise ValueError(
                f"{owner}(updates{jax.tree_util.keystr(path)}): must be the gradient of "
                f"one worker's own batch, got one that does not vary over {axis_name!r}: under "
                "shard_map with check_vma=True the gradient of replicated parameters is already "
                "summed over the axis, so there is nothing left to compress; take it by "
                f"fg.value_and_grad(loss, {axis_name!r})(params, batch). Behind another exchange "
                "there is none left either: fg.optimizers have one of their own. Inside "
                "optax.MultiSteps, which holds what it adds up to be replicated, use "
                "fg.accumulate(tx, every=k) in its place."
            )

    varying = {
        _axes.varying(leaf): jax.tree_util.keystr(path)
        for path, leaf in jax.tree.leaves_with_path(updates)
    }
    if len(varying) > 1:
        (some, one), (others, other) = list(varying.items())[:2]
        raise ValueError(
            f"{owner}(updates): must all vary over the same axes, because they travel in "
            f"one buffer, got updates{one} over {sorted(some)} and updates{other} over "
            f"{sorted(others)}; give each kind a compressed_pmean of its own, with "
            "masked='elsewhere' in optax.partition."
        )


def check_replicated(params: PyTree, axis_name: AxisName, owner: str = "compressed_pmean") -> None:
    """Refuses parameters that JAX knows to differ between the workers."""
    for path, leaf in jax.tree.leaves_with_path(params):
        if _axes.known_to_vary(leaf, axis_name):
            raise ValueError(
                f"{owner}.update(params{jax.tree_util.keystr(path)}): must be the same on "
                f"all workers, got one that varies over {axis_name!r}: if it is sharded over the "
                "axis, the mean would be one of gradients of different parameters. Shard the "
                "parameters over another axis of the mesh than axis_name, or gather them by "
                "fg.optimizers.gather_parameters, whose gradients need no mean. If they are "
                "copies, pass "
                "what came in by in_specs=P(), before any cast, or nothing."
            )


def refuse_masked(
    updates: PyTree,
    owner: str = "compressed_pmean",
    otherwise: str = f"; else send it dense by an fg.Policy, {ELSEWHERE}",
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
