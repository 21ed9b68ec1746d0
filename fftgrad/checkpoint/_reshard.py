"""A state as another number of workers, or another method, goes on with it."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from fftgrad._contracts import PyTree
from fftgrad._values import check_count
from fftgrad.advise._record_gradients import NOTHING
from fftgrad.checkpoint import _copies, _leaves
from fftgrad.checkpoint._lay_out import (
    Missing,
    Plan,
    Resharded,
    lay_out,
    numbers,
    shape_of_shards,
)
from fftgrad.checkpoint._leaves import Leaf


def reshard_state(
    state: PyTree, to: int | PyTree, *, lost: Iterable[int] = (), missing: Missing = "refuse"
) -> Resharded:
    """Function: a state for another number of workers, or for another method.

    What a worker has not sent yet is training state. With N workers before and M from now on, lay N
    and M equal intervals on [0, 1]; the new rows are

        r'_j = Σ_i M |I_j ∩ I_i| r_i,

    whose mean is that of the old ones, and the mean is what the parameters are still to be told:
    nothing is lost, and N to N is the identity.

        state = fg.checkpoint.reshard_state(state, fg.init_state(tx, params, mesh, "data")).state
        arrays = fg.checkpoint.reshard_state(state, 3).state  # of NumPy

    The first form puts the result where the fresh state is. It is for another method, too: a
    residual belongs to parameters, so it goes on behind another codec, exchange or layout.

    | of which there is a row for each worker | what becomes of it |
    |---|---|
    | residuals and velocities of a memory | spread by the rule above |
    | moments in `per_worker`, sums of `accumulate`, late gradients of `delay` | the same |
    | what you wrap in `fg.exchanges.PerWorker` | the same |
    | the workers' own parameters beside the state of `diloco`, known by its anchor | the same |
    | the owners' residuals in `TwoStage` | joined, and cut for the new owners |
    | the groups' residuals in `Hierarchical` | joined, spread over the groups, cut again |
    | counters, flags | from the first old interval that the new one meets |
    | typed PRNG keys | the same, folded with the number of the worker |
    | what a codec has learned, such as a threshold | spread; of shards it starts anew |
    | what `record_gradients` kept | starts anew: a mean of gradients is no worker's own |

    What all workers share stays as it is; what an exchange has learned, such as PowerSGD's factors,
    starts anew where it no longer fits. The work is done on the host, a leaf at a time: no device
    ever holds the rows of others.

    Args:
      state: any tree with what `fg.init_state` makes in it: an optimizer's state, a `TrainState`,
        a dict of parameters and state. Its arrays must be on devices of this process; of several
        processes, `fftgrad.checkpoint` saves it and restores it for another number.
      to: a fresh tree like it, of which the result has shapes, dtypes and shardings, or the number
        of workers.
      lost: workers that are gone with what they had. Their rows are left out, and the others
        spread; of shards and pieces theirs are zero.
      missing: what to do with a leaf that the old state lacks or has in another shape: "refuse" it,
        or "zero", to keep the fresh one, leave behind what has no place, and warn.

    Returns:
      A `Resharded`.

    Claims: the mean over the workers of what was not sent yet is kept up to one rounding of each
      value; to the bit if each new row is one old row.

    Raises:
      ValueError: if a leaf is missing, left over or of another shape, which is named; if a worker
        in `lost` is none, or all are; if the number of workers does not do for `Hierarchical`, or
        for codecs in `TwoStage` that remember: then pass a fresh state.

    Example:
      >>> tx = fg.compressed_pmean(fg.AllReduce(), fg.ErrorFeedback(), axis_name="data")
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> state = fg.init_state(tx, {"w": jnp.zeros(3)}, mesh, "data")
      >>> fg.checkpoint.reshard_state(state, 5).state.memory.worker_rows.residual["w"].shape
      (5, 3)
    """
    old = _leaves.with_rows(_leaves.describe(state, "reshard_state"))
    leaves = zip(old, jax.tree.leaves(state), strict=True)
    here = {n: a for n, a in leaves if getattr(a, "is_fully_addressable", False)}
    _copies.check_copies(here, "reshard_state")
    if isinstance(to, int | np.integer):
        to = _of_workers(state, old, check_count("reshard_state(to)", to, "use 4."))
    return lay_out(old, to, numbers(lost, "reshard_state"), missing, "reshard_state")


def _of_workers(state: PyTree, old: Mapping[str, Leaf], workers: int) -> PyTree:
    """A tree like the state, for another number of workers."""
    before = _leaves.workers_of(old)

    def like(name: str, leaf: Any, own: Leaf) -> Any:
        if own.kind in _leaves.ROWLESS or workers == before:
            return leaf
        if own.kind == "seen" and not own.shape:
            return np.full((), NOTHING, np.int32)
        shape = (own.shape[0] // before * workers, *own.shape[1:])
        if own.kind == "seen":
            return np.zeros(shape, leaf.dtype)
        if own.kind == "cut":
            return np.broadcast_to(own.on_host()[:1], shape)
        if own.pieces and workers % own.pieces:
            raise ValueError(
                f"reshard_state(to): must be a multiple of the {own.pieces} fast workers of "
                f"Hierarchical, got {workers}; pass a fresh state, fg.init_state(tx, params, mesh, "
                "axes)."
            )
        if own.kind in ("shard warm", "fixed"):
            raise ValueError(
                "reshard_state(to): must be a fresh state, fg.init_state(tx, params, mesh, "
                "axis_name), "
                f"because {name} is kept of each shard, got {workers}."
            )
        if own.kind == "shards":
            shape = shape_of_shards(own, own.pieces, Plan(before, workers, []))
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    leaves = [like(*row) for row in zip(old, jax.tree.leaves(state), old.values(), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(state), leaves)
