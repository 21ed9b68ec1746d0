"""How the workers of an exchange talk: every collective, and what travels with the values.

A buffer that is gathered or scattered has a header before its payloads, which exchanges do not
see.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad._axes import AxisName
from fftgrad.ops import _count, _finite, _random, _shapes, _wire
from fftgrad.ops._shapes import PyTree, spec
from fftgrad.ops._wire import Header


class Step(NamedTuple):
    """What a step knows of itself: its number, and its randomness; `Step()` has none.

    Attributes:
      number: how many steps there were before, int32, equal on all workers; 2^30 comes after
        2^31 - 1, so from then on the keys of the last 2^30 steps repeat.
      shared: a key equal on all workers: random supports, random signs. Decompressing may use it.
      local: a key that differs between workers: dither. Decompressing must not use it, because
        the receiver has another one.
    """

    number: jax.Array | int = 0
    shared: jax.Array | None = None
    local: jax.Array | None = None

    @classmethod
    def of(cls, key: jax.Array | int, number: jax.Array | int = 0) -> "Step":
        """The step of a worker that is on its own, from a seed or a key."""
        shared, local = jax.random.split(_random.as_key("Step.of(key)", key))
        return cls(number, shared, local)

    def fold(self, other: jax.Array | int) -> "Step":
        """The same step with other randomness, for one of several things done in it."""
        if self.shared is None:
            return self
        return self.fold_local(other)._replace(shared=jax.random.fold_in(self.shared, other))

    def fold_local(self, other: jax.Array | int) -> "Step":
        """The same step with other local randomness only."""
        if self.local is None:
            return self
        return self._replace(local=jax.random.fold_in(self.local, other))


class Stats(NamedTuple):
    """What an exchange learned of all workers on the way, the same on all of them.

    Attributes:
      finite: False if a header said that something was not finite, bool[].
        A sum needs no header: what is not finite in it shows in the mean.
      overflow: how many values the codecs could not represent, int32[].
    """

    finite: jax.Array | bool = True
    overflow: jax.Array | int = 0

    @property
    def poison(self) -> jax.Array:
        """0.0 if all is finite, else NaN: to be added to a mean."""
        return _finite.poison_unless(jnp.asarray(self.finite))

    @classmethod
    def of_all(cls, stats: "Sequence[Stats]") -> "Stats":
        """The stats of several exchanges in one step."""
        every = [jnp.asarray(one.finite) for one in stats]
        return cls(
            finite=jnp.all(jnp.stack(every)) if every else jnp.ones((), bool),
            overflow=_sum([one.overflow for one in stats]),
        )


@dataclasses.dataclass(frozen=True)
class Comm:
    """Value: one worker's connection to the others along an axis, in one step.

    Its methods are the only collectives of an exchange.

    Args:
      axis_name: the axis, or axes, of the workers.
      step: the number of the step and its randomness.

    Example:
      >>> mean = lambda x: fg.exchanges.Comm("data").mean([x])[0][0]
      >>> jax.vmap(mean, axis_name="data")(jnp.array([[1.0, 2.0], [3.0, 4.0]])).tolist()
      [[2.0, 3.0], [2.0, 3.0]]
    """

    axis_name: AxisName
    step: Step = Step()

    @classmethod
    def of(
        cls,
        axis_name: AxisName,
        key: jax.Array | int,
        number: jax.Array | int = 0,
    ) -> "Comm":
        """That of this worker, inside the axis, from a seed or key that is equal on all workers."""
        shared, local = jax.random.split(
            jax.random.fold_in(_random.as_key("Comm.of(key)", key), number)
        )
        local = jax.random.fold_in(local, _axes.index(axis_name))
        return cls(axis_name, Step(number, shared, local))

    @property
    def workers(self) -> int:
        """The number of workers along the axis."""
        return _axes.size(self.axis_name)

    @property
    def index(self) -> jax.Array:
        """The number of this worker along the axis."""
        return _axes.index(self.axis_name)

    def fold(self, number: int) -> "Comm":
        """The same comm with other randomness, for one of several exchanges in a step."""
        return dataclasses.replace(self, step=self.step.fold(number))

    def fold_local(self, number: int) -> "Comm":
        """The same comm with other local randomness only."""
        return dataclasses.replace(self, step=self.step.fold_local(number))

    def along(self, axis_name: AxisName) -> "Comm":
        """The same comm along another axis."""
        return dataclasses.replace(self, axis_name=axis_name)

    # Payloads in buffers.

    def gather(
        self,
        payloads: PyTree,
        *,
        of: PyTree,
        overflow: jax.Array | int = 0,
        received: Stats | None = None,
    ) -> tuple[Any, Stats]:
        """The payloads of all workers, stacked in their order, and what their headers say.

        One all-gather.

        Args:
          payloads: what this worker sends, a pytree of arrays.
          of: the values that the payloads stand for; the header says whether they are finite.
          overflow: how many of them the codecs could not represent.
          received: what this worker was sent before, as the owner of a shard. The header then also
            counts that, and says whether all of it was finite.
        """
        buffer = _pack(payloads, of, overflow, received)
        return _unpack(_axes.all_gather(buffer, self.axis_name), spec(payloads))

    def scatter(
        self, payloads: PyTree, *, of: PyTree, overflow: jax.Array | int = 0
    ) -> tuple[Any, Stats]:
        """Payload i of w, stacked, to worker i, by one all-to-all; what all have for this one."""
        counts = jnp.broadcast_to(jnp.asarray(overflow, jnp.int32), (self.workers,))
        buffers = jax.vmap(_pack)(payloads, of, counts)
        one = jax.eval_shape(lambda tree: jax.tree.map(lambda leaf: leaf[0], tree), payloads)
        return _unpack(self.all_to_all(buffers), spec(one))

    # Sums.

    def mean(
        self, arrays: Sequence[jax.Array], *, overflow: jax.Array | int | None = None
    ) -> tuple[list[jax.Array], Stats]:
        """The means over all workers of real and complex arrays, by one all-reduce.

        Args:
          arrays: this worker's.
          overflow: how many values this worker could not represent; None if that cannot happen,
            which saves four bytes.
        """
        if not arrays:
            return [], Stats()
        workers = self.workers
        extra = [] if overflow is None else [jnp.asarray(overflow, jnp.float32)[None] * workers]
        whole, restore = _shapes.as_one([*arrays, *extra])
        # Divided first, so that no sum of finite values overflows.
        found = restore(lax.psum(whole * (1.0 / workers), self.axis_name))
        if overflow is None:
            return found, Stats()
        *means, count = found
        return means, Stats(overflow=_count.rounded(count[0]))

    def sum(self, vector: jax.Array) -> jax.Array:
        """The sum over all workers of a vector of any dtype, by one all-reduce."""
        return lax.psum(vector, self.axis_name)

    def broadcast(self, tree: PyTree, leads: jax.Array) -> PyTree:
        """The arrays, of one dtype, of the one worker that leads, on all workers."""
        leaves, structure = jax.tree.flatten(tree)
        if not leaves:
            return tree
        # One sum, to which the others add nothing: XLA has no broadcast from a worker that is
        # chosen at run time.
        whole = jnp.concatenate([leaf.ravel() for leaf in leaves])
        whole = lax.psum(jnp.where(leads, whole, jnp.zeros((), whole.dtype)), self.axis_name)
        pieces = _shapes.cut(whole, [leaf.size for leaf in leaves])
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

        unit = _finite.unit_for(everywhere(lax.pmax, _finite.top(x)))
        squares = jnp.stack([_finite.square(lost, unit), _finite.square(x, unit)])
        lost_square, square = everywhere(lax.psum, squares)
        return jnp.sqrt(lost_square / jnp.where(square > 0, square, 1.0))

    # Words of an exchange with a format of its own.

    def all_gather(self, words: jax.Array) -> jax.Array:
        """The words of all workers, stacked."""
        return _axes.all_gather(words, self.axis_name)

    def all_to_all(self, rows: jax.Array) -> jax.Array:
        """Row i of w to worker i; what all workers have for this one, stacked."""
        return _axes.all_to_all(rows, self.axis_name)


def _pack(
    payloads: PyTree, of: PyTree, overflow: jax.Array | int, received: Stats | None = None
) -> jax.Array:
    finite = _finite.all_finite(of)
    if received is not None:
        overflow = _count.add(received.overflow, overflow)
        finite &= jnp.asarray(received.finite)
    return _wire.pack(Header(finite, overflow), _wire.without_gradient(payloads, of))


def _unpack(buffers: jax.Array, like: PyTree) -> tuple[Any, Stats]:
    headers, payloads = jax.vmap(lambda words: _wire.unpack(words, like))(buffers)
    return payloads, Stats(
        finite=jnp.all(jnp.asarray(headers.finite)),
        overflow=_count.total(jnp.asarray(headers.overflow)),
    )


def _sum(counts: list[jax.Array | int]) -> jax.Array:
    return jnp.asarray(functools.reduce(_count.add, counts, 0), jnp.int32)
