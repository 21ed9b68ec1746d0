"""Gradients of a few steps: kept as they came, and read as NumPy arrays."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from jax import lax
from jax.core import Tracer

from fftgrad import _axes
from fftgrad._contracts import PyTree
from fftgrad._values import check_choice, check_count
from fftgrad.exchanges._per_worker import PerWorker, add_worker_axis, drop_worker_axis
from fftgrad.ops import _count

Array = npt.NDArray[Any]
Dtype = Literal["float32", "bfloat16"]

NOTHING = -1
"""In place of the number of a step where a slot is empty."""


class RecordState(NamedTuple):
    """State of `record_gradients`.

    Attributes:
      step: how many gradients there were, int32, equal on all workers.
      taken: for each slot the number of the step whose gradient is in it, int32; -1 until then.
      gradients: the slots: of each worker its own gradients, zeros until then.
    """

    step: jax.Array
    taken: tuple[jax.Array, ...]
    gradients: PerWorker


def record_gradients(
    steps: Iterable[int], *, dtype: Dtype = "float32"
) -> optax.GradientTransformation:
    """Transformation: the same gradients, of which those of a few steps are kept.

    In front of `compressed_pmean` it sees what a worker would send before anything is lost, which
    `fg.advise.analyze` looks into:

        tx = optax.chain(
            fg.advise.record_gradients(steps=(10, 100, 1000)),
            fg.compressed_pmean(exchange, memory, axis_name="data"),
            optax.adamw(3e-4),
        )
        ...
        fg.advise.save_gradients("gradients.npz", fg.advise.recorded(opt_state))

    What is kept is data in the optimizer's state, with a row for each worker: nothing waits for the
    host, and a checkpoint has it too. Each step has a slot of its own, written in that step alone.
    In the others a slot is neither read nor written if the state is donated, as by
    `fg.data_parallel(..., donate_argnums=1)`; if not, it is copied with the rest of the state. It
    takes as much memory as there are steps in `steps`, times a gradient.

    With another number of workers (`fg.checkpoint.reshard_state`, `fftgrad.checkpoint`) the slots
    start anew, because a mean of two workers' gradients is the gradient of neither; save before
    what is in them. Under a `jax.vmap` that maps the whole state, step number included, each step
    writes all slots, because there both sides of a condition are computed.

    Args:
      steps: the numbers of the steps, that of the first one 0.
      dtype: in what to keep them: "float32", or "bfloat16" in half of the memory, rounded.

    Returns:
      An `optax.GradientTransformation` whose state is a `RecordState`.

    Claims: in float32, what is kept is the worker's gradient to the bit.

    Example:
      >>> tx = fg.advise.record_gradients(steps=(1,))
      >>> state = tx.init(jnp.zeros(2))
      >>> for value in (3.0, 4.0, 5.0):
      ...     same, state = tx.update(jnp.full(2, value), state)
      >>> same.tolist(), fg.advise.recorded(state).gradients[1][0].tolist()
      ([5.0, 5.0], [4.0, 4.0])
    """
    numbers = _checked(steps)
    check_choice("record_gradients(dtype)", dtype, get_args(Dtype))

    def init(params: optax.Params) -> RecordState:
        zeros = jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), dtype), params)
        return RecordState(
            step=jnp.zeros((), jnp.int32),
            taken=tuple(jnp.full((), NOTHING, jnp.int32) for _ in numbers),
            gradients=add_worker_axis((zeros,) * len(numbers)),
        )

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, RecordState]:
        del params
        slots = drop_worker_axis(state.gradients)
        # One condition for each slot: where all are under one, or under a switch, XLA copies those
        # that are not written.
        kept = [
            _kept(state.step == number, updates, slot)
            for number, slot in zip(numbers, slots, strict=True)
        ]
        taken = tuple(
            jnp.where(state.step == number, state.step, before)
            for number, before in zip(numbers, state.taken, strict=True)
        )
        return updates, RecordState(
            _count.next_step(state.step), taken, add_worker_axis(type(slots)(kept))
        )

    return optax.GradientTransformation(init, update)


def _kept(due: jax.Array, updates: PyTree, slot: PyTree) -> PyTree:
    """The gradient if it is due, else what is in the slot."""

    def take(slot: PyTree) -> PyTree:
        return jax.tree.map(lambda g, old: _axes.vary_like(g.astype(old.dtype), old), updates, slot)

    def leave(slot: PyTree) -> PyTree:
        return jax.tree.map(_axes.vary_like, slot, updates)

    return lax.cond(due, take, leave, slot)


def _checked(steps: Iterable[int]) -> tuple[int, ...]:
    if not isinstance(steps, Iterable) or isinstance(steps, str):
        raise TypeError(
            f"record_gradients(steps): must be numbers of steps, got {steps!r}; use (10, 100)."
        )
    owner, remedy = "record_gradients(steps)", "use (10, 100, 1000)."
    numbers = tuple(check_count(owner, step, remedy, least=0) for step in steps)
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"{owner}: must be one step or more, each once, got {numbers}; {remedy}")
    return numbers


class GradientLog(NamedTuple):
    """Gradients of some steps, worker by worker.

    Attributes:
      gradients: for each step, by its number, the gradient of each worker, by its number: a tree of
        NumPy arrays.
    """

    gradients: Mapping[int, Mapping[int, PyTree]]

    @property
    def steps(self) -> tuple[int, ...]:
        """The numbers of the steps, ascending."""
        return tuple(self.gradients)

    @property
    def trees(self) -> list[PyTree]:
        """The gradients of all steps and workers."""
        return [tree for workers in self.gradients.values() for tree in workers.values()]


def recorded(opt_state: PyTree) -> GradientLog:
    """Function: what `fg.advise.record_gradients` has kept so far, as NumPy arrays.

    Call it outside of `jax.jit`, with the state of all workers, as `fg.init_state` or
    `fg.data_parallel` has it, or as `jax.pmap` and `jax.vmap` stack it. It copies, so the state
    may be donated after.

    In several processes each returns the workers whose rows are on its own devices, under their
    numbers among all workers; no process waits for another. Let each save a file of its own, and
    read all of them at once by `fg.advise.load_gradients(*paths)`.

    Args:
      opt_state: any optax state, nested as it may be, with one `record_gradients` in it.

    Returns:
      A `GradientLog`, of the steps that have passed: none at first.

    Raises:
      ValueError: if there is no `record_gradients` in it, or several; if a worker's gradient is
        spread over devices of several processes, because the parameters are.

    Example:
      >>> tx = fg.advise.record_gradients(steps=(0, 7))
      >>> grads = {"w": jnp.array([1.0, -2.0])}
      >>> _, state = tx.update(grads, tx.init(grads))
      >>> fg.advise.recorded(state).gradients
      {0: {0: {'w': array([ 1., -2.], dtype=float32)}}}
    """
    found = [n for n in jax.tree.leaves(opt_state, is_leaf=_is_record) if _is_record(n)]
    if len(found) != 1:
        raise ValueError(
            "recorded(opt_state): must have the state of one record_gradients in it, got "
            f"{len(found)}; put fg.advise.record_gradients(steps=(10, 100)) before "
            "compressed_pmean, or pass the part of the state."
        )
    (state,) = found
    taken = [_number(leaf) for leaf in jax.tree.leaves(_field(state, "taken"))]
    slots = _values(_field(_field(state, "gradients"), "worker_rows"))
    rows = {
        int(number.flat[0]): _by_worker(slot, stacked=number.ndim > 0)
        for number, slot in zip(taken, slots, strict=True)
        if number.flat[0] != NOTHING
    }
    return GradientLog({step: rows[step] for step in sorted(rows)})


def _by_worker(slot: PyTree, *, stacked: bool) -> dict[int, PyTree]:
    """The tree of each worker. Stacked by pmap or vmap, its row has an axis of length 1 in it."""
    paths, structure = jax.tree.flatten_with_path(slot)
    leaves = [_rows(jax.tree_util.keystr(path), leaf) for path, leaf in paths]
    workers = sorted(leaves[0]) if leaves else []
    return {
        worker: jax.tree.unflatten(
            structure, [np.array(rows[worker][0] if stacked else rows[worker]) for rows in leaves]
        )
        for worker in workers
    }


def _rows(name: str, leaf: Any) -> dict[int, Array]:
    """The rows of a leaf that are here."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return dict(enumerate(np.asarray(leaf)))
    rows: dict[int, Array] = {}
    missing: dict[int, int] = {}
    pieces = {
        tuple(part.indices(n)[:2] for part, n in zip(shard.index, leaf.shape, strict=True)): shard
        for shard in leaf.addressable_shards
    }  # each once, also where several devices have it
    for (here, *where), shard in pieces.items():
        for worker, piece in zip(range(*here), np.asarray(shard.data), strict=True):
            row = rows.setdefault(worker, np.empty(leaf.shape[1:], leaf.dtype))
            row[tuple(slice(*span) for span in where)] = piece
            missing[worker] = missing.get(worker, row.size) - piece.size
    if any(missing.values()):
        raise ValueError(
            f"recorded(opt_state): must have each worker's gradient on devices of one process, got "
            f"{name} on those of several; gather it by jax.experimental.multihost_utils."
            "process_allgather(opt_state, tiled=True) first."
        )
    return rows


def _number(leaf: Any) -> Array:
    """What is here of the number of a step, which all workers share."""
    if isinstance(leaf, Tracer):
        raise TypeError(
            "recorded(opt_state): must be a concrete state, got a traced one; call it outside of "
            "jax.jit, between two steps."
        )
    return np.asarray(leaf.addressable_shards[0].data if isinstance(leaf, jax.Array) else leaf)


def _field(node: Any, name: str) -> Any:
    return node[name] if isinstance(node, Mapping) else getattr(node, name)


def _values(node: Any) -> list[Any]:
    """What is in a tuple, or in a dict that was one."""
    return [node[key] for key in sorted(node)] if isinstance(node, Mapping) else list(node)


def _is_record(node: Any) -> bool:
    keys: Any = node if isinstance(node, Mapping) else getattr(node, "_fields", ())
    return set(keys) == set(RecordState._fields)
