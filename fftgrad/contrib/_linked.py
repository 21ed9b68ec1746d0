"""What optimizers share that talk to neighbors only: state, checks, and the step."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fftgrad import _axes
from fftgrad._contracts import AxisName, Channel, PyTree
from fftgrad._values import check_kind, plain
from fftgrad.contrib import _gossip, _graphs
from fftgrad.contrib._graphs import Graph
from fftgrad.exchanges import _parts
from fftgrad.exchanges._layout import Layout
from fftgrad.exchanges._per_worker import OfShards, add_worker_axis, drop_worker_axis
from fftgrad.exchanges._rules import Codecs
from fftgrad.ops import _count, _rounding
from fftgrad.ops._keys import check_key
from fftgrad.optimizers._local import check_own
from fftgrad.training._check_gradients import check_local, refuse_masked
from fftgrad.training._stands_in import stands_in
from fftgrad.training._weigh import refuse_weight


class Copied(NamedTuple):
    """A tree that neighbors follow, float32.

    Attributes:
      copy: what all neighbors hold to be this worker's.
      pull: Σ_j (copy_j - copy_i) over the neighbors j, to what their copies draw it.
      rest: what rounding has dropped of the pull.
    """

    copy: PyTree
    pull: PyTree
    rest: PyTree


class Links(NamedTuple):
    """A worker's links to its neighbors.

    Attributes:
      trees: what neighbors follow.
      codecs: the state of the codecs.
      skipped: how many times this worker or a neighbor said nothing, because it was not finite.
      invalid: how many buffers were altered. The pull is NaN from the first one on.
      overflow: how many values of this worker no codec could represent.
    """

    trees: tuple[Copied, ...]
    codecs: PyTree
    skipped: jax.Array
    invalid: jax.Array
    overflow: jax.Array


class Linked(NamedTuple):
    """State: the links of each worker; of no use to another graph, or number of workers.

    Attributes:
      links: a row of `Links` for each worker.
    """

    links: OfShards


def check(
    owner: str, codecs: Sequence[Codecs], graph: object, gamma: float, axis: object, key: object
) -> None:
    """Refuses what is no codec, no graph, no share and no axis."""
    for codec in codecs:
        _parts.check_codec(owner, codec)
    check_kind(f"{owner}(graph)", graph, Graph, "use Ring().")
    if not (isinstance(plain(gamma), int | float) and 0 < gamma <= 1):
        raise ValueError(
            f"{owner}(gamma): must be above 0 and at most 1, got {gamma}; use 1.0 for a codec "
            "without loss, in beer graph.largest_gamma(workers), and about the share of the energy "
            "that the codec keeps of that for another."
        )
    _axes.check_names(f"{owner}(axis_name)", axis)
    check_key(f"{owner}(key)", key)


def layout_of(layout: Layout, codec: Codecs) -> Layout:
    """The layout with its scope filled in, as the codec or the rule wants it."""
    return layout if layout.scope else Layout(_parts.scope_of(codec), layout.bucket_bytes)


def start(
    codecs: Sequence[Codecs], copies: Sequence[PyTree], params: PyTree, layout: Layout
) -> Linked:
    """The links before the first step, when all workers know all copies."""
    zero = jnp.zeros((), jnp.int32)
    zeros = jax.tree.map(jnp.zeros_like, copies[0])
    trees = tuple(Copied(copy, zeros, zeros) for copy in copies)
    if stands_in(params):  # nobody knows what is in it, but that it is no parameter
        row = add_worker_axis(Links(trees, zero, zero, zero, zero))
        return Linked(OfShards(row))
    state = _gossip.init(codecs, copies[0], layout)
    row = add_worker_axis(Links(trees, state, zero, zero, zero))
    return Linked(OfShards(row))


def check_call(
    owner: str, updates: PyTree, params: PyTree | None, graph: Graph, axis: AxisName, **extra: Any
) -> PyTree:
    """The parameters, once they and the gradients are known to be this worker's own."""
    refuse_masked(updates, owner, "")
    refuse_weight(owner, extra.get("weight"), "what neighbors average are parameters")
    check_local(updates, axis, owner)
    _graphs.checked(graph, _axes.size(axis, owner))
    if params is None:
        raise ValueError(
            f"{owner}.update(params): what neighbors are told is counted from them, got None; call "
            "tx.update(grads, state, params)."
        )
    check_own(owner, params, axis)
    return params


def copied(state: Linked) -> tuple[Copied, ...]:
    """What neighbors follow, of this worker."""
    links: Links = drop_worker_axis(state.links.value)
    return links.trees


def tell(
    codecs: Sequence[Codecs],
    trees: Sequence[PyTree],
    state: Linked,
    number: jax.Array,
    *,
    graph: Graph,
    key: jax.Array | int,
    axis_name: AxisName,
    layout: Layout,
) -> tuple[tuple[Copied, ...], Linked]:
    """The copies and pulls once the neighbors have been told of these trees, and the next state."""
    before: Links = drop_worker_axis(state.links.value)
    channel = Channel.of(axis_name, key, number)
    lacks = [
        jax.tree.map(jnp.subtract, tree, old.copy)
        for tree, old in zip(trees, before.trees, strict=True)
    ]
    told = _gossip.tell(codecs, lacks, graph, before.codecs, channel, layout)
    news = zip(before.trees, told.sent, told.pull, told.rest, strict=True)
    after = tuple(_moved(*new) for new in news)
    links = Links(
        trees=after,
        codecs=told.state,
        **{
            name: _count.add(getattr(before, name), getattr(told, name))
            for name in ("skipped", "invalid", "overflow")
        },
    )
    return after, Linked(OfShards(add_worker_axis(links)))


def _moved(old: Copied, sent: PyTree, pull: PyTree, rest: PyTree) -> Copied:
    sums = jax.tree.map(_rounding.two_sum, old.pull, pull)
    total, lost = jax.tree.transpose(jax.tree.structure(old.pull), jax.tree.structure((0, 0)), sums)
    return Copied(
        copy=jax.tree.map(jnp.add, old.copy, sent),
        pull=total,
        rest=jax.tree.map(lambda r, dropped, more: r + (dropped + more), old.rest, lost, rest),
    )


def wide(tree: PyTree) -> PyTree:
    """The tree in float32."""
    return jax.tree.map(lambda a: jnp.asarray(a).astype(jnp.float32), tree)


def share(graph: Graph, gamma: float, axis_name: AxisName) -> float:
    """γ / (d + 1): how far a worker goes of the pull of d neighbors."""
    return gamma / (graph.degree(_axes.size(axis_name)) + 1)


def with_pull(moves: PyTree, share: float, tree: Copied) -> PyTree:
    """What an optimizer wants, and a share of what neighbors draw to."""

    def both(move: jax.Array, pull: jax.Array, rest: jax.Array) -> jax.Array:
        return (move + share * (pull + rest)).astype(move.dtype)

    return jax.tree.map(both, moves, tree.pull, tree.rest)
