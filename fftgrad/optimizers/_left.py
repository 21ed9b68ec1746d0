"""Where a worker's last update left its parameters, of which it keeps a few values of each leaf.

Parameters that are said to be replicated, and are not, train right until they are saved or moved:
then one worker's are left for all. Whoever gets these finds them elsewhere than its own were left.
"""

import jax
import jax.numpy as jnp
import optax

from fftgrad._contracts import PyTree

VALUES = 8


def unknown(params: PyTree) -> PyTree:
    """What is kept before the first update."""
    return jax.tree.map(lambda leaf: jnp.full_like(_some(leaf), jnp.nan), params)


def astray(params: PyTree, anchor: PyTree, left: PyTree) -> jax.Array:
    """Whether most of the values that had moved are neither where they were left nor at the anchor.

    Most, because a caller may clip some; the anchor, because a caller may go back to it.
    """
    off, moved = jnp.int32(0), jnp.int32(0)
    for now, home, last in zip(*map(jax.tree.leaves, (params, anchor, left)), strict=True):
        now, home, eps = _some(now), _some(home), float(jnp.finfo(now.dtype).eps)
        has_moved = ~jnp.isnan(last) & (last != home)
        near = jnp.abs(now - last) <= 8 * eps * (jnp.abs(home) + jnp.abs(now))
        off += jnp.sum(has_moved & ~near & (now != home), dtype=jnp.int32)
        moved += jnp.sum(has_moved, dtype=jnp.int32)
    return 2 * off > moved


def after(params: PyTree, moves: PyTree, lost: jax.Array) -> PyTree:
    """What to keep once the parameters have moved; where they are lost, what is nowhere."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.auto_axes or mesh.explicit_axes:  # a slice would be a collective, or has no type
        return unknown(params)
    ends = optax.apply_updates(params, moves)
    return jax.tree.map(lambda end: jnp.where(lost, jnp.inf, _some(end)), ends)


def _some(leaf: jax.Array) -> jax.Array:
    """The first values of the first row, in float32 and with as many axes as the leaf."""
    rows = (slice(1),) * max(0, leaf.ndim - 1) + (slice(VALUES),) * min(1, leaf.ndim)
    return leaf[rows].astype(jnp.float32)
