"""Communication of the workers of an exchange: all collectives, and the headers of buffers.

`gather` and `scatter` put a header before the payloads. Exchanges see it only as `Stats`.
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


class Step(NamedTuple):
    """Number and random keys of a step; `Step()` has no keys.

    Attributes:
      number: number of earlier steps, int32, equal on all workers. After 2^31 - 1 comes 2^30, so
        the keys of the last 2^30 steps repeat.
      shared: key equal on all workers, for random positions and signs. `decompress` may use it.
      local: key that differs between workers, for random rounding. `decompress` must not use it,
        because the receiver has another local key.
    """

    number: jax.Array | int = 0
    shared: jax.Array | None = None
    local: jax.Array | None = None

    @classmethod
    def of(cls, key: jax.Array | int, number: jax.Array | int = 0) -> "Step":
        """Make the step of a single worker from a seed or a key."""
        shared, local = jax.random.split(_random.as_key("Step.of(key)", key))
        return cls(number, shared, local)

    def fold(self, other: jax.Array | int) -> "Step":
        """Return the same step with other keys, for one of several uses within the step."""
        if self.shared is None:
            return self
        return self.fold_local(other)._replace(shared=jax.random.fold_in(self.shared, other))

    def fold_local(self, other: jax.Array | int) -> "Step":
        """Return the same step with another local key."""
        if self.local is None:
            return self
        return self._replace(local=jax.random.fold_in(self.local, other))


class Stats(NamedTuple):
    """Statistics of all workers from one exchange, equal on all workers.

    Attributes:
      finite: False if a header reported a value that is not finite, bool[]. An all-reduce has no
        header, because a non-finite value makes its result non-finite.
      overflow: number of values that the codecs could not represent, int32[].
    """

    finite: jax.Array | bool = True
    overflow: jax.Array | int = 0

    @property
    def poison(self) -> jax.Array:
        """0.0 if all values are finite, else NaN; add it to a mean."""
        return _finite.poison_unless(jnp.asarray(self.finite))

    @classmethod
    def of_all(cls, stats: "Sequence[Stats]") -> "Stats":
        """Combine the stats of several exchanges in one step."""
        every = [jnp.asarray(one.finite) for one in stats]
        overflow = functools.reduce(_count.add, [one.overflow for one in stats], 0)
        return cls(
            finite=jnp.all(jnp.stack(every)) if every else jnp.ones((), bool),
            overflow=jnp.asarray(overflow, jnp.int32),
        )


@dataclasses.dataclass(frozen=True)
class Comm:
    """Value: one worker's connection to the others along an axis, in one step.

    An exchange uses only the collectives of this class.

    Args:
      axis_name: axis, or axes, of the workers.
      step: number and keys of the step.

    Example:
      >>> mean = lambda x: fg.exchanges.Comm("data").mean([x])[0][0]
      >>> jax.vmap(mean, axis_name="data")(jnp.array([[1.0, 2.0], [3.0, 4.0]])).tolist()
      [[2.0, 3.0], [2.0, 3.0]]
    """

    axis_name: AxisName
    step: Step = Step()

    @classmethod
    def of(cls, axis_name: AxisName, key: jax.Array | int, number: jax.Array | int = 0) -> "Comm":
        """Make the comm of this worker from a seed or key that all workers share."""
        key = jax.random.fold_in(_random.as_key("Comm.of(key)", key), number)
        return cls(axis_name, Step.of(key, number).fold_local(lax.axis_index(axis_name)))

    @property
    def workers(self) -> int:
        """Number of workers along the axis."""
        return _axes.size(self.axis_name)

    @property
    def index(self) -> jax.Array:
        """Number of this worker along the axis."""
        return lax.axis_index(self.axis_name)

    def fold(self, number: int) -> "Comm":
        """Return a comm with other random keys, for one of several exchanges in a step."""
        return dataclasses.replace(self, step=self.step.fold(number))

    # Payloads in buffers.

    def gather(
        self,
        payloads: PyTree,
        *,
        of: PyTree,
        overflow: jax.Array | int = 0,
        received: Stats | None = None,
    ) -> tuple[Any, Stats]:
        """Gather the payloads of all workers by one all-gather, stacked in the workers' order.

        Args:
          payloads: payloads of this worker, a pytree of arrays.
          of: values that were compressed. The header says whether all of them are finite.
          overflow: number of these values that the codecs could not represent.
          received: stats of an earlier collective in this exchange, to add to the header.
        """
        buffer = _pack(payloads, of, overflow, received)
        return _unpack(_axes.all_gather(buffer, self.axis_name), spec(payloads))

    def scatter(
        self, payloads: PyTree, *, of: PyTree, overflow: jax.Array | int = 0
    ) -> tuple[Any, Stats]:
        """Send row i of the payloads to worker i by one all-to-all; stack the received rows."""
        counts = jnp.broadcast_to(jnp.asarray(overflow, jnp.int32), (self.workers,))
        buffers = jax.vmap(_pack)(payloads, of, counts)
        one = jax.eval_shape(lambda tree: jax.tree.map(lambda leaf: leaf[0], tree), payloads)
        return _unpack(lax.all_to_all(buffers, self.axis_name, 0, 0), spec(one))

    # Sums.

    def mean(
        self, arrays: Sequence[jax.Array], *, overflow: jax.Array | int | None = None
    ) -> tuple[list[jax.Array], Stats]:
        """Average real and complex arrays over all workers, by one all-reduce.

        Args:
          arrays: arrays of this worker.
          overflow: number of values that this worker could not represent. Pass None if no codec
            counts overflow; this saves 4 bytes.
        """
        if not arrays:
            return [], Stats()
        workers = self.workers
        extra = [] if overflow is None else [jnp.asarray(overflow, jnp.float32)[None] * workers]
        whole, restore = _shapes.as_one([*arrays, *extra])
        # Divide first, so that no sum of finite values overflows.
        found = restore(lax.psum(whole * (1.0 / workers), self.axis_name))
        if overflow is None:
            return found, Stats()
        *means, count = found
        return means, Stats(overflow=_count.rounded(count[0]))

    def sum(self, vector: jax.Array) -> jax.Array:
        """Sum a vector of any dtype over all workers, by one all-reduce."""
        return lax.psum(vector, self.axis_name)

    def broadcast(self, tree: PyTree, leads: jax.Array) -> PyTree:
        """Send the arrays of the worker with `leads` to all workers; they have one dtype."""
        leaves, structure = jax.tree.flatten(tree)
        if not leaves:
            return tree
        # A sum with zeros from the other workers, because XLA has no broadcast from a worker that
        # is chosen at run time.
        whole, restore = _shapes.as_one(leaves)
        whole = lax.psum(jnp.where(leads, whole, jnp.zeros((), whole.dtype)), self.axis_name)
        return jax.tree.unflatten(structure, restore(whole))

    def max(self, x: jax.Array) -> jax.Array:
        """Return the elementwise maximum over the workers. The values must not contain NaN."""
        return _wire.without_gradient(lax.pmax(lax.stop_gradient(x), self.axis_name), x)

    def relative_error(self, lost: PyTree, x: PyTree) -> jax.Array:
        """Return √(Σ ||lost_i||² / Σ ||x_i||²) over the workers i; 0 if all values are zero.

        Two all-reduces send 12 bytes per worker, over all axes of the mesh.
        """

        def everywhere(reduce: Any, values: jax.Array) -> jax.Array:
            return _axes.over_other_axes(reduce, reduce(values, self.axis_name))

        unit = _finite.unit_for(everywhere(lax.pmax, _finite.top(x)))
        squares = jnp.stack([_finite.square(lost, unit), _finite.square(x, unit)])
        lost_square, square = everywhere(lax.psum, squares)
        return jnp.sqrt(lost_square / jnp.where(square > 0, square, 1.0))


def _pack(
    payloads: PyTree, of: PyTree, overflow: jax.Array | int, received: Stats | None = None
) -> jax.Array:
    finite = _finite.all_finite(of)
    if received is not None:
        overflow = _count.add(received.overflow, overflow)
        finite &= jnp.asarray(received.finite)
    return _wire.pack(_wire.without_gradient(payloads, of), finite, overflow)


def _unpack(buffers: jax.Array, like: PyTree) -> tuple[Any, Stats]:
    payloads, finite, overflow = jax.vmap(lambda words: _wire.unpack(words, like))(buffers)
    return payloads, Stats(jnp.all(finite), _count.total(overflow))
