"""What `sharded` refuses as its inner optimizer: whatever a shard is not enough for."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fftgrad._contracts import PyTree
from fftgrad.optimizers import _dataflow
from fftgrad.optimizers._dataflow import Value

BY_SHAPE = (
    "sharded(inner): must treat a shard as it treats the leaf, got one that goes by the "
    "shape or the size of a leaf, as a mask of all that are long, or a second moment in "
    "factors; let masks go by names or by ndim, which a shard has too."
)


class Flow(NamedTuple):
    """What an optimizer makes of parameters and gradients, which are the leaves.

    Attributes:
      start: the first state.
      moves: the updates of any step.
      after: the state after any step.
    """

    start: list[Value]
    moves: list[Value]
    after: list[Value]


def check_inner(inner: optax.GradientTransformation, like: PyTree, shards: PyTree) -> None:
    """Refuses an optimizer that does not do to each shard what it does to the whole.

    Its programs are read, not run. A step in which a gradient is not finite leaves no trace, so it
    may ask that of a whole leaf.

    Args:
      inner: the optimizer.
      like: the shapes of the parameters.
      shards: those of one worker's shards, in a tree like theirs.
    """
    one, other = (jax.eval_shape(inner.init, tree) for tree in (like, shards))
    if not _keeps_the_same(one, other, like, shards):
        raise ValueError(BY_SHAPE)
    whole = _flow(inner, like)
    if any(value.leaf is not None or value.mixed for value in whole.start):
        raise ValueError(
            "sharded(inner): must start from the shapes of the parameters alone, because its "
            "state is made where no worker knows its shard yet, got one that keeps their "
            "values, as optax.contrib.schedule_free or dog; use optax.adamw."
        )
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(like)]
    moves = [_alone(value, i) for i, value in enumerate(whole.moves)]
    results = [
        *((f"update of params{path}", value) for path, value in zip(paths, moves, strict=True)),
        *(("state", value) for value in whole.after),
    ]
    for name, value in results:
        if value.mixed:
            raise ValueError(
                "sharded(inner): must update each value by itself, because it sees shards, got one "
                f"whose {name} rests on {value.mixed}, as with optax.clip_by_global_norm, "
                "optax.centralize, Adafactor, Muon or noise; clip before it, by "
                "fg.training.clip_by_local_norm, and use optax.adamw."
            )
    if _made(whole) != _made(_flow(inner, shards)):
        raise ValueError(BY_SHAPE)


def check_extra(told: Callable[..., Any], extra: dict[str, Any]) -> None:
    """Refuses arrays that the inner optimizer reads; others are for the rest of a chain."""
    for name, given in extra.items():
        if not any(np.ndim(leaf) for leaf in jax.tree.leaves(given)):
            continue
        program = jax.make_jaxpr(lambda given, name=name: told(**extra | {name: given})[0])(given)
        read = {id(atom) for eqn in program.jaxpr.eqns for atom in eqn.invars}
        if any(id(atom) in read for atom in program.jaxpr.invars):
            raise ValueError(
                f"sharded.update({name}): must be scalars that are equal on all workers, because "
                "inner sees shards and is told nothing of whole leaves, got "
                f"{jax.tree.map(jnp.shape, given)}; leave it out, or use optax.adamw."
            )


def _flow(inner: optax.GradientTransformation, like: PyTree) -> Flow:
    leaves = _dataflow.leaves(like)
    program, state = _dataflow.trace(inner.init, like)
    start = _dataflow.follow(program, leaves)
    program, _ = _dataflow.trace_update("sharded", inner, like, state)
    grads = [leaf._replace(finite=True, made=hash(("gradient", leaf.leaf))) for leaf in leaves]
    loss = Value(1, made=hash("loss"))

    def step(before: list[Value]) -> list[Value]:
        return _dataflow.follow(program, [*grads, *before, *leaves, loss])

    own = [value._replace(made=hash(("state", i))) for i, value in enumerate(start)]
    after = _dataflow.settled(lambda before: step(before)[len(leaves) :], own)
    return Flow(start, step(after)[: len(leaves)], after)


def _alone(move: Value, leaf: int) -> Value:
    """The update of a leaf, which is mixed where it is made of another."""
    if move.mixed or move.leaf == leaf or (move.leaf is None and move.even):
        return move
    return move._replace(mixed="another leaf" if move.even else "what differs by place")


def _made(flow: Flow) -> list[int]:
    return [value.made for values in flow for value in values]


def _keeps_the_same(one: PyTree, other: PyTree, like: PyTree, shards: PyTree) -> bool:
    """Whether the same is kept of shards as of whole leaves, or a shard of it."""
    if jax.tree.structure(one) != jax.tree.structure(other):
        return False
    leaves = list(zip(jax.tree.leaves(like), jax.tree.leaves(shards), strict=True))
    for whole, part in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        shares = (whole.size * b.size == part.size * a.size for a, b in leaves if a.size)
        if whole.shape != part.shape and not any(shares):
            return False
    return True
