"""Where a worker's parameters were last, of which it keeps a few values of each leaf.

Parameters that are said to be replicated, and are not, train right until they are saved or moved:
then one worker's are left for all. Whoever gets these finds them elsewhere than its own were left.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fftgrad import _axes
from fftgrad._contracts import AxisName, PyTree

VALUES = 8
UNKNOWN = float(jnp.finfo(jnp.float32).max)
"""Instead of NaN, for which `jax_debug_nans` would stop a healthy step."""


class Left(NamedTuple):
    """What is kept.

    Attributes:
      places: where the last update found and left a few values, float32[2 · values]; `UNKNOWN` if
        there was none, and infinity for parameters that are lost until the workers meet.
      follows: whether the parameters were last seen where they may be.
    """

    places: jax.Array
    follows: jax.Array


def unknown(params: PyTree) -> Left:
    """What is kept before the first update."""
    count = sum(min(VALUES, leaf.size) for leaf in jax.tree.leaves(params))
    return Left(jnp.full(2 * count, UNKNOWN, jnp.float32), jnp.zeros((), bool))


def look(params: PyTree, anchor: PyTree, left: Left) -> tuple[jax.Array, jax.Array]:
    """Whether the parameters are lost, and whether they are where they may be; bool[] each.

    That is where the last update left them, where it found them, because a caller may drop it, or
    the anchor, because a caller may go back to it. Most of those that had moved must be elsewhere,
    because a caller may clip some. Parameters that are elsewhere after every update, because a
    caller decays or projects them, are not lost: those are that were where they may be till then.
    """
    now, home = _some(params), _some(anchor)
    found, went = jnp.split(left.places, 2)
    leaves = [(leaf, min(VALUES, leaf.size)) for leaf in jax.tree.leaves(params)]
    eps = np.repeat(
        [float(jnp.finfo(leaf.dtype).eps) for leaf, _ in leaves], [count for _, count in leaves]
    ).astype(np.float32)
    moved = ~jnp.isnan(went) & (went != UNKNOWN) & (went != home)
    apart = jnp.minimum(jnp.abs(now - went), jnp.abs(now - found))
    near = apart <= 8 * eps * (jnp.abs(home) + jnp.abs(now))
    astray = 2 * jnp.sum(moved & ~near & (now != home)) > jnp.sum(moved)
    return astray & left.follows, jnp.where(jnp.any(moved), ~astray, left.follows)


def after(
    params: PyTree, moves: PyTree, lost: jax.Array, follows: jax.Array, axis_name: AxisName
) -> Left:
    """What to keep once the parameters have moved; where they are lost, what is nowhere.

    On a mesh with other axes nothing: values of a piece are not those of all, and a slice of what
    XLA has in its hands may be a collective.
    """
    mesh, leaves = jax.sharding.get_abstract_mesh(), jax.tree.leaves(params)
    others = any(_axes.beside(leaf, axis_name) for leaf in leaves)
    if others or mesh.auto_axes or mesh.explicit_axes:
        return unknown(params)
    places = [_some(params), _some(optax.apply_updates(params, moves))]
    return Left(jnp.where(lost, jnp.inf, jnp.concatenate(places)), follows | lost)


def _some(tree: PyTree) -> jax.Array:
    """The first values of each leaf, float32[values]."""
    parts = [leaf.ravel()[:VALUES].astype(jnp.float32) for leaf in jax.tree.leaves(tree)]
    return jnp.concatenate([jnp.zeros(0), *parts])
