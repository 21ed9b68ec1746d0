"""What `sharded` refuses as its inner optimizer: whatever a shard is not enough for."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core

from fftgrad._contracts import PyTree


def check_inner(inner: optax.GradientTransformation, like: PyTree, shards: PyTree) -> None:
    """Refuses an optimizer that does not do to each shard what it does to the whole.

    Args:
      inner: the optimizer.
      like: the shapes of the parameters.
      shards: those of one worker's shards, in a tree like theirs.
    """
    probe: Any = jax.tree.map(lambda leaf: leaf if leaf.size else None, like)
    if not _is_blind_to_shapes(inner, like, shards):
        raise ValueError(
            "sharded(inner): must treat a shard as it treats the leaf, got one that goes by the "
            "shape or the size of a leaf, as a mask of all that are long, or a second moment in "
            "factors; let masks go by names or by ndim, which a shard has too."
        )
    # Outside of any mesh, of which an array that is computed here would have an axis in its type.
    nowhere = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
    with jax.ensure_compile_time_eval(), nowhere:
        if not _starts_without_values(inner, probe):
            raise ValueError(
                "sharded(inner): must start from the shapes of the parameters alone, because its "
                "state is made where no worker knows its shard yet, got one that keeps their "
                "values, as optax.contrib.schedule_free or dog; use optax.adamw."
            )
        if not _updates_each_value(inner, probe):
            raise ValueError(
                "sharded(inner): must update each value by itself, because it sees shards, got one "
                "whose update of a part is not that part of the update, as by "
                "optax.clip_by_global_norm, optax.centralize, Adafactor or Muon, or that draws "
                "noise or goes by sizes; clip before it, by fg.clip_by_local_norm, and use "
                "optax.adamw."
            )


def _starts_without_values(inner: optax.GradientTransformation, like: PyTree) -> bool:
    # Not by `==`, which keys do not have.
    one, other = (
        [np.asarray(leaf) for leaf in jax.tree.leaves(inner.init(_values(like, start, 1.0)))
         if jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.number)]
        for start in (1.0, 2.0)
    )  # fmt: skip
    return all(map(np.array_equal, one, other))


def _updates_each_value(inner: optax.GradientTransformation, like: PyTree) -> bool:
    """Whether two halves, each as a shard, move as the whole does."""

    def moved(half: int | None) -> list[np.ndarray]:
        params: Any = _values(like, 1.0, 1.0, half)
        state, steps = inner.init(params), list[list[np.ndarray]]()
        for size in (1e3, 10.0, 0.1, 1e-3):  # a norm would clip some, and leave others
            grads: Any = _values(like, -2 * size, size, half)
            moves, state = inner.update(grads, state, params)
            steps.append([np.asarray(a).ravel() for a in jax.tree.leaves(moves) if np.ndim(a)])
        return [np.stack(leaf) for leaf in zip(*steps, strict=True)]

    if not any(leaf.ndim for leaf in jax.tree.leaves(like)):
        return True
    whole = np.concatenate(moved(None), axis=1)
    pairs = zip(moved(0), moved(1), strict=True)
    apart = np.abs(whole - np.concatenate([half for pair in pairs for half in pair], axis=1))
    return bool(np.all(apart <= 1e-3 * np.max(np.abs(whole), axis=1, keepdims=True)))


def _values(like: PyTree, start: float, scale: float, half: int | None = None) -> PyTree:
    """Small leaves of as many axes as these, none of length one; or a half of each, as a shard."""

    def leaf(like: Any) -> jax.Array:
        if not like.ndim:
            return jnp.float32(start)
        shape = (6, *[2] * (like.ndim - 1))
        values = (start + scale * np.arange(math.prod(shape))).astype(np.float32)
        if half is not None:
            values = np.split(values, 2)[half]
            shape = (-1, *[1] * (like.ndim - 1))
        return jnp.asarray(values.reshape(shape))

    return jax.tree.map(leaf, like)


def _is_blind_to_shapes(inner: optax.GradientTransformation, like: PyTree, shards: PyTree) -> bool:
    """Whether the same is kept, and read for each move, of shards as of whole leaves."""
    one, other = (jax.eval_shape(inner.init, tree) for tree in (like, shards))
    if jax.tree.structure(one) != jax.tree.structure(other):
        return False
    leaves = list(zip(jax.tree.leaves(like), jax.tree.leaves(shards), strict=True))
    for whole, part in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        shares = (whole.size * b.size == part.size * a.size for a, b in leaves if a.size)
        if whole.shape != part.shape and not any(shares):
            return False
    return _readings(inner, like, one) == _readings(inner, shards, other)


def _readings(inner: optax.GradientTransformation, like: PyTree, state: PyTree) -> list[int]:
    """For each move, of which gradients, states and parameters it is made, a bit for each."""
    jaxpr = jax.make_jaxpr(lambda *args: inner.update(*args)[0])(like, state, like).jaxpr
    read = {var: 1 << i for i, var in enumerate(jaxpr.invars)}

    def bits(atoms: Any) -> int:
        found = 0
        for atom in atoms:
            found |= 0 if isinstance(atom, core.Literal) else read.get(atom, 0)
        return found

    for eqn in jaxpr.eqns:
        read.update(dict.fromkeys(eqn.outvars, bits(eqn.invars)))
    return [bits([out]) for out in jaxpr.outvars]
