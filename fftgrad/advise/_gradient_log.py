"""What `record_gradients` has kept, on the host."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt
from jax.core import Tracer

from fftgrad._contracts import PyTree
from fftgrad.advise._record_gradients import NOTHING
from fftgrad.training import _find

Array = npt.NDArray[Any]


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
      TypeError: if the state is traced.

    Example:
      >>> import fftgrad as fg
      >>> import jax.numpy as jnp
      >>> tx = fg.advise.record_gradients(steps=(0, 7))
      >>> grads = {"w": jnp.array([1.0, -2.0])}
      >>> _, state = tx.update(grads, tx.init(grads))
      >>> fg.advise.recorded(state).gradients
      {0: {0: {'w': array([ 1., -2.], dtype=float32)}}}
    """
    found = [n for n in jax.tree.leaves(opt_state, is_leaf=_find.is_record) if _find.is_record(n)]
    if len(found) != 1:
        raise ValueError(
            "recorded(opt_state): must have the state of one record_gradients in it, got "
            f"{len(found)}; put "
            "fg.advise.record_gradients(steps=(10, 100)) before compressed_pmean, or pass the part "
            "of the state."
        )
    (state,) = found
    taken = [_number(leaf) for leaf in jax.tree.leaves(_field(state, "taken"))]
    slots = _values(_field(_field(state, "gradients"), "value"))
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
    for index, values in _pieces(leaf).items():
        workers = range(*index[0])
        for worker, piece in zip(workers, values, strict=True):
            row = rows.setdefault(worker, np.empty(leaf.shape[1:], leaf.dtype))
            row[tuple(slice(*span) for span in index[1:])] = piece
            missing[worker] = missing.get(worker, row.size) - piece.size
    if any(missing.values()):
        raise ValueError(
            f"recorded(opt_state): must have each worker's gradient on devices of one process, got "
            f"{name} on those of several; gather it by jax.experimental.multihost_utils."
            "process_allgather(opt_state, tiled=True) first."
        )
    return rows


def _pieces(leaf: jax.Array) -> dict[tuple[tuple[int, int], ...], Array]:
    """What is here of an array, each part once, by where it belongs."""
    return {
        tuple(
            part.indices(size)[:2] for part, size in zip(shard.index, leaf.shape, strict=True)
        ): np.asarray(shard.data)
        for shard in leaf.addressable_shards
    }


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
