"""A tree through an exchange, bucket by bucket."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fftgrad import _axes
from fftgrad._contracts import (
    AxisName,
    Channel,
    Exchange,
    PyTree,
    Reduced,
    State,
    Step,
    Tally,
)
from fftgrad.exchanges import _layout
from fftgrad.exchanges._layout import Bucket, Layout, Part
from fftgrad.ops import _finite


class Travelled(NamedTuple):
    """What comes of it: `Reduced` of all buckets, in trees.

    Attributes:
      mean: over the workers.
      error: what the others did not receive of this worker's.
      states: of the exchange, one for each bucket.
      tally: of all buckets; its `finite` is that of the means, too.
    """

    mean: PyTree
    error: PyTree
    states: tuple[State, ...]
    tally: Tally


def travel(
    exchange: Exchange, x: PyTree, states: tuple[State, ...], channel: Channel, layout: Layout
) -> Travelled:
    """The mean of a float32 tree."""
    buckets, join = _layout.to_buckets(_axes.whole(x), layout)
    run = _traced_once(exchange, channel.axis_name) if len(buckets) > 1 else exchange.mean
    outs: list[Reduced] = []
    for i, (bucket, state) in enumerate(zip(buckets, states, strict=True)):
        # One after the other: a scheduler that may work on many at a time puts all their
        # collectives at the end, where nothing is left to run beside them. What is bad in one
        # bucket is so in the next, a dependency that no compiler may drop.
        if outs:
            bucket = _finite.nan_unless(jnp.asarray(outs[-1].tally.finite), bucket)
        out = run(bucket, state, channel.fold(i))
        finite = jnp.asarray(out.tally.finite)
        if not exchange.tells_finite:
            finite &= _finite.all_finite(out.mean)
        outs.append(out._replace(tally=out.tally._replace(finite=finite)))
    mean, error = (
        join(_axes.whole(trees)) for trees in ([o.mean for o in outs], [o.error for o in outs])
    )
    return Travelled(
        mean=mean,
        error=error,
        states=tuple(out.state for out in outs),
        tally=Tally.of_all([out.tally for out in outs]),
    )


def _traced_once(exchange: Exchange, axis_name: AxisName) -> Callable[..., Reduced]:
    """`exchange.mean`, traced once for buckets that are alike; a large model has dozens."""

    @jax.jit
    def mean(parts: Bucket, state: State, step: Step) -> Reduced:
        return exchange.mean(parts, state, Channel(axis_name, step))

    def run(bucket: Bucket, state: State, channel: Channel) -> Reduced:
        out = mean(_alike(bucket), _alike(state), channel.step)

        def back(like: PyTree, tree: PyTree) -> PyTree:
            return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(tree))

        averaged, error = back(bucket, out.mean), back(bucket, out.error)
        return Reduced(averaged, error, back(state, out.state), out.tally)

    return run


def _alike(tree: PyTree) -> PyTree:
    """The same whatever pieces of their groups its parts are, which the layout alone reads."""

    def first(node: Any) -> Any:
        return dataclasses.replace(node, piece=0) if isinstance(node, Part) else node

    return jax.tree.map(first, tree, is_leaf=lambda node: isinstance(node, Part))
