"""Checkpoints in a folder, by Orbax, with a sum for each array."""

import json
import math
import os
import pathlib
import warnings
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from fftgrad._contracts import PyTree
from fftgrad._values import brief, check_count, local_path
from fftgrad.checkpoint import _reshard, _sums
from fftgrad.checkpoint._reshard import Leaf, Missing

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

FORMAT = 2
"""Of what `about` holds. Another meaning gets another number."""

ARRAYS, ABOUT = "arrays", "about"


def save(directory: str | os.PathLike[str], step: int, tree: PyTree, *, keep: int = 2) -> None:
    """Function: save a tree of arrays as a checkpoint, which `restore` reads back bit by bit.

        checkpoint.save("runs/lm", step, {"params": params, "state": state})

    Besides parameters and state, save what your loop needs to go on: keys, the place in the data.
    Orbax writes from all processes, which need a file system in common. The checkpoint has another
    name until it is whole. So a process that is killed, or a full disk, leaves the checkpoints
    before it as they were.

    Args:
      directory: a folder of a mounted file system, not a URL. `~` is the home folder.
      step: the number of the checkpoint, larger than that of any that is there.
      tree: arrays, typed PRNG keys and numbers, nested as you like.
      keep: how many of the newest checkpoints to keep; at least 2, so that a damaged one leaves one
        to go back to.

    Raises:
      TypeError: if Orbax cannot store a leaf, such as uint4, text or an int of more than 64 bits.
      ValueError: if a checkpoint of this step or a later one is there, or copies of an array differ
        between devices.

    Example:
      >>> import tempfile
      >>> folder = tempfile.mkdtemp()
      >>> fg.checkpoint.save(folder, 3, {"w": jnp.arange(2.0)})
      >>> fg.checkpoint.restore(folder, {"w": jnp.zeros(2)}).tree
      {'w': Array([0., 1.], dtype=float32)}
    """
    folder = local_path("save(directory)", directory)
    check_count("save(keep)", keep, "a damaged checkpoint leaves none else.", least=2)
    check_count("save(step)", step, "pass int(step).", least=0)
    _check_leaves(tree)
    leaves = _reshard.describe(tree, "save")
    _sums.check_copies(dict(zip(leaves, jax.tree.leaves(tree), strict=True)), "save")
    arrays: dict[str, Any] = {}
    about: dict[str, Any] = {}
    for (name, leaf), value in zip(leaves.items(), jax.tree.leaves(tree), strict=True):
        array = jax.random.key_data(value) if leaf.is_key else _as_array(value)
        if array.size:  # Orbax writes no array without a value
            arrays[name] = array
        told = {field: getattr(leaf, field) for field in _reshard.TOLD}
        about[name] = told | {"shape": list(leaf.shape), "sum": _sums.total(array)}
    if not arrays:
        raise ValueError(
            "save(tree): must have a value to save, got none; pass {'params': ..., 'state': ...}."
        )
    args = orbax().args
    parts = {ARRAYS: args.PyTreeSave(arrays), ABOUT: args.JsonSave(signed(about))}
    with opened(folder, keep) as manager:
        newest = manager.latest_step()
        if newest is not None and step <= newest:
            raise ValueError(
                f"save(step): must be later than the newest in {directory}, because that is what "
                f"restore takes, got {step} after {newest}; use another folder."
            )
        manager.save(step, args=args.Composite(**parts))


def _check_leaves(tree: PyTree) -> None:
    for path, leaf in jax.tree.leaves_with_path(tree):
        argument = f"save(tree{jax.tree_util.keystr(path)})"
        kinds = jax.Array | np.ndarray | np.generic | bool | int | float | complex
        if not isinstance(leaf, kinds) or isinstance(leaf, np.ma.MaskedArray):
            raise TypeError(
                f"{argument}: must be an array or a number, got {brief(leaf)}; leave it out, as by "
                "flax.nnx.split or equinox.partition."
            )
        dtype = _as_array(leaf).dtype
        if not (jnp.issubdtype(dtype, jax.dtypes.prng_key) or stores(dtype)):
            raise TypeError(
                f"{argument}: must have a dtype that Orbax stores, got {dtype} for {brief(leaf)}; "
                "convert it, such as uint4 by .astype('uint8')."
            )


def _as_array(value: Any) -> Any:
    return value if isinstance(value, jax.Array) else np.asarray(value)


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
    """Function: restore the newest checkpoint of `save`, as a tree like a fresh one.

        fresh = {"params": params, "state": fg.init_state(tx, params, mesh, "data")}
        tree, step, *_ = checkpoint.restore("runs/lm", fresh)

    With as many workers as before, all bits are those that were saved. With another number, or
    behind another method, residuals are spread by the rules of `reshard_state`. Leaves are found by
    their paths, so the containers may differ.

    Every array is checked against the sum that was saved with it. A damaged checkpoint is passed
    over with a warning, and the one before it is taken.

    Args:
      directory: the folder that `save` wrote to. `~` is the home folder.
      like: a fresh tree like the one that was saved, with its shapes, dtypes and shardings.
      step: which checkpoint; the newest that is whole if left out.
      missing: "refuse" a checkpoint that lacks a leaf of `like`, or has other ones, or "zero", to
        keep those of `like`, leave the others behind, and warn.

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
            f"restore(directory): must be a path, got {brief(directory)}; the folder comes first."
        )
    folder = local_path("restore(directory)", directory)
    with opened(folder) as manager:
        steps = sorted(manager.all_steps(), reverse=True)
        for number in steps if step is None else [n for n in steps if n == step]:
            try:
                resharded = _read(manager, number, like, missing)
            except DamagedError as error:
                text = f"restore({directory}): passes over step {number}, which is damaged: {error}"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
                continue
            return Restored(resharded.state, number, *resharded[1:])
    wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
    raise FileNotFoundError(
        f"restore(directory): must have {wanted} that is whole, got steps {steps[::-1]} in "
        f"{directory}; pass the folder that checkpoint.save wrote to, or start anew."
    )


def _read(manager: Any, step: int, like: PyTree, missing: Missing) -> _reshard.Resharded:
    about = _agreed(lambda: _about(manager, step))

    def reader(name: str, row: Mapping[str, Any]) -> Callable[[Any], Any]:
        def checked(sharding: Any) -> Any:
            if not math.prod(row["shape"]):
                return np.zeros(row["shape"], row["dtype"])
            value = _array(manager, step, name, sharding)
            if _sums.total(value) != row["sum"]:
                raise ValueError(f"{name} has other bits than were saved")
            return value

        return lambda sharding: _agreed(lambda: checked(sharding))

    old = {
        name: Leaf(
            read=reader(name, row),
            shape=tuple(row["shape"]),
            **{field: row[field] for field in _reshard.TOLD},
        )
        for name, row in about["leaves"].items()
    }
    return _reshard.lay_out(old, like, missing, "restore")


def _about(manager: Any, step: int) -> Any:
    about = _part(manager, step, ABOUT, orbax().args.JsonRestore())
    if about["format"] != FORMAT:
        raise ValueError(f"format {about['format']}, not {FORMAT}: of another fftgrad")
    if about != signed(about["leaves"]):
        raise ValueError("what it says of its leaves is not what was saved")
    return about


def _array(manager: Any, step: int, name: str, sharding: Any) -> Any:
    as_it_is = orbax().RestoreArgs(restore_type=np.ndarray)
    how = as_it_is if sharding is None else orbax().ArrayRestoreArgs(sharding=sharding)
    args = orbax().args.PyTreeRestore(
        item={name: 0}, restore_args={name: how}, partial_restore=True
    )
    return _part(manager, step, ARRAYS, args)[name]


def _part(manager: Any, step: int, part: str, args: Any) -> Any:
    return manager.restore(step, args=orbax().args.Composite(**{part: args}))[part]


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


def orbax() -> Any:
    """Orbax, which resharding does without."""
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError(
            "fftgrad.checkpoint: needs Orbax, got none; run pip install -e '.[checkpoint]' in the "
            "folder of the repository"
        ) from error
    return ocp


def stores(dtype: np.dtype[Any]) -> bool:
    """True if Orbax's arrays, which are those of TensorStore, may have the dtype."""
    orbax()
    import tensorstore

    try:
        tensorstore.dtype(dtype.name)
    except ValueError:
        return False
    return dtype.isnative


def opened(directory: pathlib.Path, keep: int | None = None) -> "ocp.CheckpointManager":
    """Orbax's manager of the folder; it writes a step aside and renames it when it is whole.

    Without `keep`, only restore from it. Orbax's option `read_only` is off, because it warns at
    every start.
    """
    ocp = orbax()
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        enable_async_checkpointing=False,
        create=keep is not None,
    )
    return ocp.CheckpointManager(directory.absolute(), options=options)


def signed(leaves: dict[str, Any]) -> dict[str, Any]:
    """What is said of the leaves, with a sum of its own."""
    text = json.dumps(leaves, sort_keys=True)
    return {"format": FORMAT, "leaves": leaves, "sum": zlib.crc32(text.encode())}
