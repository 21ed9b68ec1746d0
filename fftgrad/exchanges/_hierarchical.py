"""An exact mean over fast links, and a compressed mean over slow links."""

import functools

import jax
import jax.numpy as jnp

from fftgrad import _axes
from fftgrad._contracts import Averaged, AxisName, Comm, Exchange, Memory, PyTree, Scope, State
from fftgrad._values import check, check_count, check_kind, value
from fftgrad.exchanges import _parts, _shards
from fftgrad.exchanges._recipe import check_exchange
from fftgrad.exchanges._shards import Shards
from fftgrad.memories import ErrorFeedback
from fftgrad.ops import _finite, _shapes


@value
class Hierarchical(Exchange):
    """Exchange: the exact mean along a fast axis, and a compressed mean along the slow axes.

    Fast links join the f workers of a group. Each part is cut into f pieces, one per worker. First,
    an all-to-all in the group sends piece i of all f gradients to worker i, which averages them in
    float32. Then the workers with the same piece in all groups run the exchange `slow` on these
    means. Last, an all-gather in the group collects the pieces. So the f slow links of a group
    share the traffic. The residual of a group is cut into pieces too, one per worker.

    Pass all axes, fast and slow, to `compressed_pmean(axis_name=("slow", "fast"))`. Pass no memory
    to `compressed_pmean`, because this exchange keeps the residual of the group. Only if leaves are
    narrower than float32, also pass `ErrorFeedback()`, which then keeps the mean's rounding error.

    Args:
      fast_axis: name of the axis, or axes, of fast links.
      workers: f, the number of workers along `fast_axis`.
      slow: exchange over the other axes. Its parts are the pieces, vectors of n/f values. So
        `PowerSgd` would send them dense.
      memory: memory of the group for the error of `slow`.

    Wire: over the slow links, the bytes of `slow` for n/f values. Over the fast links, f pieces and
      then one piece of the mean, each with a header: 4 (n + f + n/f + 1) bytes.

    Claims: all workers get the same bits. If any value is not finite, the mean is NaN throughout.
      The result of `mean` has `error=None`, because `memory` keeps the error.

    Raises:
      ValueError: while tracing, if `fast_axis` is not the last of several axes, if it does not have
        `workers` workers, or if the state of `slow` has shared arrays.

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
        pieces = _shards.shard_likes(like, self.workers)
        slow = self.slow.init(pieces)
        # A shared array must be equal on all workers, but it would differ between pieces.
        arrays = [leaf for leaf in jax.tree.leaves(slow.shared) if jnp.ndim(leaf)]
        rule, remedy = "have no shared arrays in its state", "use LeaderTopK(codec) or TwoStage."
        check(not arrays, "Hierarchical(slow)", rule, self.slow, remedy)
        # The own state of `slow` belongs to a piece, as the memory does.
        memory, number = self.memory.init(pieces), jnp.int32(self.workers)
        sizes = jnp.asarray(_parts.sizes(like), jnp.int32)
        return State(slow.shared, Shards(memory, sizes, number, slow.own))

    def mean(self, x: PyTree, state: State, comm: Comm) -> Averaged:
        slow, fast = comm.along(self._slow_axes(comm)), comm.along(self.fast_axis)
        group: Shards = state.own
        y, added = self.memory.add(self._scatter(x, fast), group.cut_rows)
        out = self.slow.mean(y, State(state.shared, group.reset_rows), slow)
        memory = self.memory.update(y, out.error_or_zeros(y), out.mean, added)
        rows, stats = fast.gather(out.mean, of=out.mean, received=out.stats)
        whole = _shards.from_shards(jax.tree.leaves(rows), x)
        return Averaged(
            mean=_finite.nan_unless(jnp.asarray(stats.finite), whole),
            error=None,
            state=State(
                out.state.shared, group._replace(cut_rows=memory, reset_rows=out.state.own)
            ),
            stats=stats,
        )

    def wire_bytes(self, like: PyTree) -> int:
        pieces = _shards.shard_likes(like, self.workers)
        size = sum(piece.size for piece in jax.tree.leaves(pieces))
        return self.slow.wire_bytes(pieces) + 4 * (size * (self.workers + 1) + self.workers + 1)

    def link_bytes(self, like: PyTree, workers: int) -> float:
        """Return the bytes that a worker sends over its slow link; `workers` counts all groups."""
        slow = workers // self.workers
        rule = f"be a multiple of the {self.workers} workers along the fast axis"
        fine = slow * self.workers == workers
        check(fine, "Hierarchical.link_bytes(workers)", rule, workers, "count all workers.")
        return self.slow.link_bytes(_shards.shard_likes(like, self.workers), slow)

    def _slow_axes(self, comm: Comm) -> AxisName:
        _axes.check_workers("Hierarchical", self.workers, self.fast_axis)
        fast, every = _axes.names(self.fast_axis), _axes.names(comm.axis_name)
        slow = tuple(name for name in every if name not in fast)
        rule = "be the last of several axes of compressed_pmean"
        fine, remedy = bool(slow) and every == slow + fast, f"use axis_name=('slow', {fast[0]!r})."
        argument = f"Hierarchical(fast_axis={self.fast_axis!r})"
        check(fine, argument, rule, repr(comm.axis_name), remedy)
        return slow

    def _scatter(self, x: PyTree, fast: Comm) -> PyTree:
        """Average this worker's piece of each part over the group."""
        shards = _shards.to_shards(x, self.workers)
        rows = jnp.concatenate(shards, axis=1)
        received, _ = fast.scatter(rows, of=rows)
        # Divide first, so that no sum of finite values overflows. Add in the order of the workers.
        total = functools.reduce(jnp.add, received * (1.0 / self.workers))
        pieces = _shapes.cut(total, [shard.shape[1] for shard in shards])
        return jax.tree.unflatten(jax.tree.structure(x), pieces)
