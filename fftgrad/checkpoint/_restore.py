"""Back to where a run was, with as many workers as there are now."""

import math
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from fftgrad._contracts import PyTree
from fftgrad._values import brief, local_path
from fftgrad.checkpoint import _folder, _lay_out
from fftgrad.checkpoint._lay_out import Missing
from fftgrad.checkpoint._leaves import TOLD, Leaf


class Restored(NamedTuple):
    """What `restore` returns.

    Attributes:
      tree: the tree, where `like` is.
      step: the number of the checkpoint.
      workers: the numbers of workers when it was saved and now.
      anew: the leaves that are those of `like`, because the checkpoint has none for them.
      left: the leaves of the checkpoint that `like` has no place for.
    """

    tree: Any
    step: int
    workers: tuple[int, int]
    anew: tuple[str, ...]
    left: tuple[str, ...]


class DamagedError(Exception):
    """A checkpoint cannot be read, or is not what was written."""


def restore(
    directory: str | os.PathLike[str],
    like: PyTree,
    *,
    step: int | None = None,
    missing: Missing = "refuse",
) -> Restored:
    """Function: the newest checkpoint of `checkpoint.save`, as a tree like a fresh one.

        fresh = {"params": params, "state": fg.init_state(tx, params, mesh, "data")}
        tree, step, *_ = checkpoint.restore("runs/lm", fresh)

    With as many workers as before, all bits are those that were saved: to stop and go on is never
    to have stopped. With fewer or more of them, or behind another method, what each worker had not
    sent yet is spread by the rules of `fg.checkpoint.reshard_state`, so that nothing is lost. What
    belongs together is found by its path, so the containers may differ, and a parameter of another
    name or shape is an error that names it.

    Every array is checked against the sum that was saved with it. A checkpoint that cannot be read,
    or does not agree with its sums, is passed over with a warning, and the one before it is taken.

    What keeps its rows is read straight to where `like` has it. What has to be spread is read
    to the host, an array at a time, and no device holds more than its own rows.

    Args:
      directory: the folder that `save` wrote to. `~` is the home folder.
      like: a fresh tree like the one that was saved: what has its shapes, dtypes and shardings.
      step: which checkpoint; the newest that is whole if left out.
      missing: "refuse" a checkpoint that lacks a leaf of `like`, or has other ones, or "zero", to
        keep those of `like`, leave the others behind, and warn.

    Returns:
      A `Restored`.

    Raises:
      FileNotFoundError: if there is no checkpoint, none of this step, or none that is whole.
      ValueError: if a leaf is missing, left over, or of another shape.

    Example:
      >>> import tempfile
      >>> tx = fg.compressed_pmean(fg.AllReduce(), fg.ErrorFeedback(), axis_name="data")
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> state = fg.init_state(tx, {"w": jnp.zeros(3)}, mesh, "data")
      >>> folder = tempfile.mkdtemp()
      >>> fg.checkpoint.save(folder, 100, state)
      >>> fg.checkpoint.restore(folder, state).step
      100
    """
    for leaf in jax.tree.leaves(like):
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if isinstance(mesh, jax.sharding.AbstractMesh):
            raise ValueError(
                "restore(like): must lie on devices, or say on which, got shardings over a mesh "
                "without any, as jax.eval_shape makes them; pass a fresh state of fg.init_state."
            )
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(
            f"restore(directory): must be a path, got {brief(directory)}; the folder comes first: "
            "restore(directory, like)."
        )
    folder = local_path("restore(directory)", directory)
    damaged: list[str] = []
    with _folder.manager(folder) as manager:
        steps = sorted(manager.all_steps(), reverse=True)
        for number in steps if step is None else [n for n in steps if n == step]:
            try:
                resharded = _read(manager, number, like, missing)
            except DamagedError as error:
                damaged.append(f"step {number}: {error}")
                warnings.warn(
                    f"restore({directory}): passes over step {number}, because it is damaged: "
                    f"{error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
                continue
            return Restored(resharded.state, number, *resharded[1:])
    found = f"damaged ones ({'; '.join(damaged)})" if damaged else f"steps {steps[::-1]}"
    wanted = "a checkpoint that is whole" if step is None else f"a whole checkpoint of step {step}"
    raise FileNotFoundError(
        f"restore(directory): must have {wanted}, got {found} in {directory}; pass the folder that "
        "checkpoint.save wrote to, or start anew."
    )


def _read(manager: Any, step: int, like: PyTree, missing: Missing) -> _lay_out.Resharded:
    about = _agreed(lambda: _about(manager, step))

    def reader(name: str, row: Mapping[str, Any]) -> Callable[[Any], Any]:
        def checked(sharding: Any) -> Any:
            if not math.prod(row["shape"]):
                return np.zeros(row["shape"], row["dtype"])
            value = _array(manager, step, name, sharding)
            if _folder.total(value) != row["sum"]:
                raise ValueError(f"{name} has other bits than were saved")
            return value

        return lambda sharding: _agreed(lambda: checked(sharding))

    old = {
        name: Leaf(
            read=reader(name, row),
            shape=tuple(row["shape"]),
            **{field: row[field] for field in TOLD},
        )
        for name, row in about["leaves"].items()
    }
    return _lay_out.lay_out(old, like, missing, "restore")


def _about(manager: Any, step: int) -> Any:
    about = _part(manager, step, _folder.ABOUT, _folder.orbax().args.JsonRestore())
    if about["format"] != _folder.FORMAT:
        raise ValueError(f"format {about['format']}, not {_folder.FORMAT}: of another fftgrad")
    if about != _folder.signed(about["leaves"]):
        raise ValueError("what it says of its leaves is not what was saved")
    return about


def _array(manager: Any, step: int, name: str, sharding: Any) -> Any:
    as_it_is = _folder.orbax().RestoreArgs(restore_type=np.ndarray)
    how = as_it_is if sharding is None else _folder.orbax().ArrayRestoreArgs(sharding=sharding)
    args = _folder.orbax().args.PyTreeRestore(
        item={name: 0}, restore_args={name: how}, partial_restore=True
    )
    return _part(manager, step, _folder.ARRAYS, args)[name]


def _part(manager: Any, step: int, part: str, args: Any) -> Any:
    return manager.restore(step, args=_folder.orbax().args.Composite(**{part: args}))[part]


def _agreed(read: Callable[[], Any]) -> Any:
    """What is read, if all processes can read it."""
    value, problem = None, ""
    try:
        value = read()
    # Whatever Orbax and what it stands on raise for a file that is not as it was.
    except Exception as error:
        said = next(iter(str(error).splitlines()), "")
        problem = f"{type(error).__name__}: {said[:200]}"
    fine = not problem
    if jax.process_count() > 1:
        fine = bool(np.all(multihost_utils.process_allgather(np.asarray(fine))))
    if not fine:
        raise DamagedError(problem or "another process cannot read it")
    return value
