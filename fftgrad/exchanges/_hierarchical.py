"""An exact mean over fast links, and a compressed one over slow links."""

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import (
    Averaged,
    AxisName,
    Comm,
    Exchange,
    Memory,
    PyTree,
    Scope,
    State,
    Stats,
)
from fftgrad._values import check_count, check_kind, value
from fftgrad.exchanges import _shards
from fftgrad.exchanges._recipe import check_exchange
from fftgrad.exchanges._shards import Shards
from fftgrad.memories import ErrorFeedback
from fftgrad.ops import _count, _finite, _shapes, _wire


@value
class Hierarchical(Exchange):
    """Exchange: the exact mean along a fast axis, and a compressed one along the slow axes.

    Each part is cut into f pieces. The f workers that fast links join each get one piece of all
    their gradients (an all-to-all) and average it exactly; each exchanges the mean of its piece
    with its peers over the slow links; and the pieces come together again (an all-gather). So the f
    slow links of a group each carry a share, and what compressing loses stays in one residual for
    the whole group, of which each worker keeps its piece.

    It takes all axes, fast and slow, from `compressed_pmean(axis_name=("slow", "fast"))`, and the
    memory is its own, because the residual belongs to the group: leave that of `compressed_pmean`
    out. Only where leaves are narrower than float32 has that something to keep, which is what
    rounding the mean to their dtype drops.

    Args:
      fast_axis: the name of the axis, or axes, of fast links.
      workers: f, the number of workers along it: the size of the pieces, and of the state, follows
        from it.
      slow: the exchange over the other axes. Its parts are the pieces, vectors of n/f values: a
        rule gets their shapes, and `PowerSgd` would send them dense.
      memory: what a group does with what the slow exchange loses.

    Shapes: x float32[...], or a tuple of parts -> mean, error of the same shapes.

    Wire: over the slow links that of `slow` for n/f values; over the fast ones 4 (n + f + n/f)
      bytes, and 4 for what `slow` counts.

    Claims: all workers get the same bits. If anything is not finite anywhere the mean is NaN
      throughout. `error` is None: the group has it all.

    Raises:
      ValueError: while tracing, if `fast_axis` is not among the axes, has not `workers` workers, or
        leaves no other axis, or if `slow` keeps arrays that all share.

    Example:
      >>> exchange = fg.Hierarchical("fast", 2, slow=fg.AllGather(fg.TopK(k=1)))
      >>> x = jnp.array([[[4.0, 1.0], [2.0, 3.0]], [[0.0, 0.0], [2.0, 0.0]]])
      >>> comm = fg.exchanges.Comm(("slow", "fast"))
      >>> mean = lambda x: exchange.mean(x, exchange.init(x), comm).mean
      >>> jax.vmap(jax.vmap(mean, axis_name="fast"), axis_name="slow")(x)[0, 0]
      Array([2., 1.], dtype=float32)
    """

    fast_axis: AxisName
    workers: int
    slow: Exchange
    memory: Memory = ErrorFeedback()

    def __post_init__(self) -> None:
        _axes.check_names("Hierarchical(fast_axis)", self.fast_axis)
        check_count("Hierarchical(workers)", self.workers, "use that of the fast axis.")
        check_exchange("Hierarchical(slow)", self.slow)
        check_kind("Hierarchical(memory)", self.memory, Memory, "use ErrorFeedback().")

    @property
    def scope(self) -> Scope | None:
        return self.slow.scope

    def init(self, like: PyTree) -> State:
        pieces = self._pieces_like(like)
        slow = self.slow.init(pieces)
        _check_scalars(self.slow, slow.shared)
        # What the slow exchange keeps of a piece belongs to the group, as the memory does.
        memory, learned = self.memory.init(pieces), (slow.own, slow.shards)
        return State(slow.shared, shards=_shards.start(like, memory, learned, self.workers))

    def mean(self, x: PyTree, state: State, comm: Comm) -> Averaged:
        slow, fast = comm.along(self._slow_axes(comm)), comm.along(self.fast_axis)
        group: Shards = state.shards
        own, shards = group.learned
        y, added = self.memory.add(self._scatter(x, fast), group.memory)
        out = self.slow.mean(y, State(state.shared, own, shards), slow)
        memory = self.memory.update(y, out.error_or_zeros(y), out.mean, added)
        whole, stats = self._gather(out, x, fast)
        return Averaged(
            # Of all pieces: each worker has seen only its own.
            mean=_finite.nan_unless(_finite.all_finite(whole), whole),
            error=None,
            state=State(
                out.state.shared,
                shards=group._replace(memory=memory, learned=(out.state.own, out.state.shards)),
            ),
            stats=stats,
        )

    def wire_bytes(self, like: PyTree) -> int:
        pieces = jax.tree.leaves(self._pieces_like(like))
        values = sum(piece.size for piece in pieces) * (self.workers + 1) + self.workers
        return self.slow.wire_bytes(self._pieces_like(like)) + 4 * values + 4

    def link_bytes(self, like: PyTree, workers: int) -> float:
        """Bytes over the slow link of one of so many workers, those of the fast axis counted."""
        slow = workers // self.workers
        if slow * self.workers != workers:
            raise ValueError(
                f"Hierarchical.link_bytes(workers): must be a multiple of the {self.workers} "
                f"workers along the fast axis, got {workers}; count all workers."
            )
        return self.slow.link_bytes(self._pieces_like(like), slow)

    def _slow_axes(self, comm: Comm) -> AxisName:
        _axes.check_workers("Hierarchical", self.workers, self.fast_axis)
        fast, every = _axes.names(self.fast_axis), _axes.names(comm.axis_name)
        slow = tuple(name for name in every if name not in fast)
        if not slow or every != slow + fast:
            raise ValueError(
                f"Hierarchical(fast_axis={self.fast_axis!r}): must be the last of several axes of "
                f"the exchange, got {comm.axis_name!r}; use axis_name=('slow', {fast[0]!r}) in "
                "compressed_pmean."
            )
        return slow

    def _pieces_like(self, like: PyTree) -> PyTree:
        return _shards.shard_likes(like, self.workers)

    def _scatter(self, x: PyTree, fast: Comm) -> PyTree:
        """This worker's piece of each part, averaged over the group."""
        rows = _shards.to_shards(x, self.workers)
        # One more value a row, so that all pieces see a NaN in any of them.
        flag = _finite.poison_unless(_finite.all_finite(x))
        rows.append(jnp.broadcast_to(flag, (self.workers, 1)))
        sizes = [row.shape[1] for row in rows]
        words = fast.all_to_all(_to_words(jnp.concatenate(rows, axis=1)))
        # Divided first, so that no sum of finite values overflows.
        received = _from_words(words) * (1.0 / self.workers)
        total = received[0]
        for row in received[1:]:  # in their order, which a sum over an axis does not promise
            total = total + row
        *pieces, flag = _shapes.cut(total, sizes)
        return jax.tree.unflatten(jax.tree.structure(x), [piece + flag for piece in pieces])

    def _gather(self, out: Averaged, like: PyTree, fast: Comm) -> tuple[PyTree, Stats]:
        """All pieces of each part, and the stats of all."""
        word = jnp.asarray(out.stats.overflow).astype(jnp.uint32)
        words = [*map(_to_words, jax.tree.leaves(out.mean)), word[None]]
        rows = fast.all_gather(jnp.concatenate(words))
        sizes = [part.size for part in words]
        *values, counts = jax.vmap(lambda row: _shapes.cut(row, sizes))(rows)
        whole = _shards.from_shards(list(map(_from_words, values)), like)
        return whole, Stats(overflow=_count.total(counts.astype(jnp.int32)))


def _to_words(x: jax.Array) -> jax.Array:
    return _wire.without_gradient(lax.bitcast_convert_type(x, jnp.uint32), x)


def _from_words(words: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(words, jnp.float32)


def _check_scalars(slow: Exchange, shared: PyTree) -> None:
    """Refuses a state that would differ from piece to piece and yet count as the same on all."""
    for path, leaf in jax.tree.leaves_with_path(shared):
        if jnp.ndim(leaf):
            raise ValueError(
                f"Hierarchical(slow): must keep no arrays that all workers share, because each "
                f"piece would have others, got {slow!r} with "
                f"state.shared{jax.tree_util.keystr(path)}; "
                "use LeaderTopK(codec), AllGather or TwoStage."
            )
