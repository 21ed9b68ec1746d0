"""How the workers of an exchange talk: every collective, and what travels with the values.

A buffer that is gathered or scattered has a header and a checksum before its payloads. A sum has
one more value for how many workers participate, where not all do. Exchanges see neither.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fftgrad import _axes
from fftgrad._axes import AxisName
from fftgrad._step import Step, Tally
from fftgrad.ops import _count, _finite, _joined, _keys, _norms, _wire
from fftgrad.ops._shapes import PyTree, spec
from fftgrad.ops._wire import Header


class Received(NamedTuple):
    """The payloads that came to a worker, stacked in the order of the workers.

    Attributes:
      payloads: a leading axis of w before that of each array.
      tally: what their headers say.
      participates: which of the w workers participate, bool[w]; None if all do.
    """

    payloads: Any
    tally: Tally
    participates: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Channel:
    """Value: one worker's connection to the others along an axis, in one step.

    Its methods are the only collectives of an exchange. A worker that does not participate has
    zeros to exchange; what it sends counts for nothing, whatever its codec makes of zeros.

    Args:
      axis_name: the axis, or axes, of the workers.
      step: the number of the step and its randomness.
      participates: whether this worker participates, bool[]; None if all workers do.

    Example:
      >>> mean = lambda x: fg.exchanges.Channel("data").mean([x])[0][0]
      >>> jax.vmap(mean, axis_name="data")(jnp.array([[1.0, 2.0], [3.0, 4.0]])).tolist()
      [[2.0, 3.0], [2.0, 3.0]]
    """

    axis_name: AxisName
    step: Step = Step()
    participates: jax.Array | None = None

    @classmethod
    def of(
        cls,
        axis_name: AxisName,
        key: jax.Array | int,
        number: jax.Array | int = 0,
        skipped: jax.Array | int = 0,
    ) -> "Channel":
        """That of this worker, inside the axis, from a seed or key that is equal on all workers."""
        shared, local = jax.random.split(
            jax.random.fold_in(_keys.as_key("Channel.of(key)", key), number)
        )
        local = jax.random.fold_in(local, _axes.index(axis_name))
        return cls(axis_name, Step(number, shared, local, skipped))

    @property
    def workers(self) -> int:
        """The number of workers along the axis."""
        return _axes.size(self.axis_name)

    @property
    def index(self) -> jax.Array:
        """The number of this worker along the axis."""
        return _axes.index(self.axis_name)

    def fold(self, number: int) -> "Channel":
        """The same channel with other randomness, for one of several exchanges in a step."""
        return dataclasses.replace(self, step=self.step.fold(number))

    def fold_local(self, number: int) -> "Channel":
        """The same channel with other local randomness only."""
        return dataclasses.replace(self, step=self.step.fold_local(number))

    def along(self, axis_name: AxisName) -> "Channel":
        """The same channel along another axis."""
        return dataclasses.replace(self, axis_name=axis_name)

    def among(self, participates: jax.Array | None) -> "Channel":
        """The same channel, in which this worker participates or does not."""
        return dataclasses.replace(self, participates=participates)

    def counted(self, tree: PyTree) -> PyTree:
        """The tree; zeros if this worker does not participate."""
        takes_part = self.participates
        if takes_part is None:
            return tree
        return jax.tree.map(lambda a: jnp.where(takes_part, a, 0), tree)

    def kept(self, new: PyTree, old: PyTree) -> PyTree:
        """The next state of what is this worker's own; the old one if it does not participate."""
        return new if self.participates is None else optax.tree.where(self.participates, new, old)

    # Payloads in buffers.

    def gather(
        self,
        payloads: PyTree,
        made_by: int,
        *,
        of: PyTree,
        overflow: jax.Array | int = 0,
        received: Tally | None = None,
    ) -> Received:
        """The payloads of all workers, by one all-gather.

        Args:
          payloads: what this worker sends, a pytree of arrays.
          made_by: the number of the codecs and shapes, `Parts.number`, which must be equal on all.
          of: the values that the payloads stand for; the header says whether they are finite.
          overflow: how many of them the codecs could not represent.
          received: what this worker was sent before, as the owner of a shard. The header then also
            counts that, and says whether all of it was finite and valid.
        """
        buffer = self._pack(payloads, made_by, of, overflow, received)
        return self._unpack(_axes.all_gather(buffer, self.axis_name), spec(payloads), made_by)

    def scatter(
        self, payloads: PyTree, made_by: int, *, of: PyTree, overflow: jax.Array | int = 0
    ) -> Received:
        """Payload i of w, stacked, to worker i, by one all-to-all; what all have for this one."""

        def pack(payloads: PyTree, of: PyTree, overflow: jax.Array | int) -> jax.Array:
            return self._pack(payloads, made_by, of, overflow)

        counts = jnp.broadcast_to(jnp.asarray(overflow, jnp.int32), (self.workers,))
        buffers = jax.vmap(pack)(payloads, of, counts)
        one = jax.eval_shape(lambda tree: jax.tree.map(lambda leaf: leaf[0], tree), payloads)
        return self._unpack(self.all_to_all(buffers), spec(one), made_by)

    def _pack(
        self,
        payloads: PyTree,
        made_by: int,
        of: PyTree,
        overflow: jax.Array | int,
        received: Tally | None = None,
    ) -> jax.Array:
        finite, valid = _finite.all_finite(of), True
        if received is None:
            overflow = self.counted(overflow)
        else:  # what is sent as an owner is that of all workers
            overflow = _count.add(received.overflow, overflow)
            finite &= jnp.asarray(received.finite)
            valid = jnp.asarray(received.invalid) == 0
        if self.participates is not None:  # the complement, which is negative, if it does not
            overflow = jnp.where(self.participates, overflow, ~jnp.asarray(overflow))
        payloads = _wire.without_gradient(payloads, of)
        return _wire.pack(Header(finite, overflow, valid), payloads, self._seed(made_by))

    def _unpack(self, buffers: jax.Array, like: PyTree, made_by: int) -> Received:
        seed = self._seed(made_by)
        headers, payloads = jax.vmap(lambda words: _wire.unpack(words, like, seed))(buffers)
        counts, participates, workers = jnp.asarray(headers.overflow), None, None
        if self.participates is not None:
            participates = counts >= 0
            counts = jnp.where(participates, counts, ~counts)
            workers = jnp.sum(participates, dtype=jnp.int32)
        return Received(
            payloads,
            Tally(
                finite=jnp.all(jnp.asarray(headers.finite)),
                overflow=_count.total(counts),
                workers=workers,
                invalid=_wire.count_invalid(headers),
            ),
            participates,
        )

    def _seed(self, made_by: int) -> jax.Array:
        return _wire.seed(made_by, self.step.number, self.step.skipped)

    # Sums.

    def mean(
        self,
        arrays: Sequence[jax.Array],
        *,
        overflow: jax.Array | int | None = None,
        tallied: bool = True,
    ) -> tuple[list[jax.Array], Tally]:
        """The means over all workers of real and complex arrays, by one all-reduce.

        Args:
          arrays: this worker's; zeros, or `counted` made them so, if it does not participate.
          overflow: how many values this worker could not represent; None if that cannot happen,
            which saves four bytes.
          tallied: False for a further sum of the same exchange: the tally is that of the first.
        """
        if not arrays:
            return [], Tally()
        workers = self.workers
        extra = [] if overflow is None else [jnp.asarray(overflow, jnp.float32)[None] * workers]
        if tallied and self.participates is not None:
            extra.append(self.participates.astype(jnp.float32)[None] * workers)
        whole, restore = _joined.as_one([*arrays, *extra])
        # Divided first, so that no sum of finite values overflows.
        found = restore(lax.psum(whole * (1.0 / workers), self.axis_name))
        means, rest = found[: len(arrays)], found[len(arrays) :]
        numbers = [_count.rounded(one[0]) for one in rest]
        seen = 0 if overflow is None else numbers.pop(0)
        return means, Tally(overflow=seen, workers=numbers[0] if numbers else None)

    def sum(self, vector: jax.Array) -> tuple[jax.Array, Tally]:
        """The sum over all workers of a vector of any dtype, by one all-reduce."""
        if self.participates is None:
            return lax.psum(vector, self.axis_name), Tally()
        one = self.participates.astype(vector.dtype)[None]
        total = lax.psum(jnp.concatenate([vector, one]), self.axis_name)
        return total[:-1], Tally(workers=jnp.round(total[-1]).astype(jnp.int32))

    def broadcast(self, tree: PyTree, leads: jax.Array) -> PyTree:
        """The arrays, of one dtype, of the one worker that leads, on all workers."""
        leaves, structure = jax.tree.flatten(tree)
        if not leaves:
            return tree
        # One sum, to which the others add nothing: XLA has no broadcast from a worker that is
        # chosen at run time.
        whole = jnp.concatenate([leaf.ravel() for leaf in leaves])
        whole = lax.psum(jnp.where(leads, whole, jnp.zeros((), whole.dtype)), self.axis_name)
        pieces = _joined.cut(whole, [leaf.size for leaf in leaves])
        shaped = [piece.reshape(leaf.shape) for piece, leaf in zip(pieces, leaves, strict=True)]
        return jax.tree.unflatten(structure, shaped)

    def max(self, x: jax.Array) -> jax.Array:
        """The largest values over the workers; no NaN may be among them."""
        return _wire.without_gradient(lax.pmax(lax.stop_gradient(x), self.axis_name), x)

    def relative_error(self, lost: PyTree, x: PyTree) -> jax.Array:
        """√(Σ ||lost_i||² / Σ ||x_i||²) over the workers i; 0 where all is zero.

        12 bytes a worker, in two all-reduces, and over all axes of the mesh.
        """

        def everywhere(reduce: Any, values: jax.Array) -> jax.Array:
            return _axes.over_other_axes(reduce, reduce(values, self.axis_name))

        unit = _norms.unit_for(everywhere(lax.pmax, _norms.top(x)))
        squares = jnp.stack([_norms.square(lost, unit), _norms.square(x, unit)])
        lost_square, square = everywhere(lax.psum, squares)
        return jnp.sqrt(lost_square / jnp.where(square > 0, square, 1.0))

    # Words of an exchange with a format of its own.

    def all_gather(self, words: jax.Array) -> jax.Array:
        """The words of all workers, stacked."""
        return _axes.all_gather(words, self.axis_name)

    def all_to_all(self, rows: jax.Array) -> jax.Array:
        """Row i of w to worker i; what all workers have for this one, stacked."""
        return _axes.all_to_all(rows, self.axis_name)

    # How many workers there were.

    def complete(self, tally: Tally) -> Tally:
        """The tally with the number of workers, by one more sum if it does not have that."""
        if self.participates is None:
            return tally._replace(workers=None)
        if tally.workers is not None:
            return tally
        return tally._replace(workers=lax.psum(self.participates.astype(jnp.int32), self.axis_name))

    def of_participants(self, mean: PyTree, tally: Tally) -> PyTree:
        """A mean over all workers as that of the workers that participate; zero if none does."""
        if tally.workers is None:
            return mean
        share = self.workers / jnp.maximum(tally.workers, 1).astype(jnp.float32)
        return jax.tree.map(lambda m: m * share, mean)
