"""Checkpoints in a folder, written by Orbax, with a checksum for each array."""

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
from fftgrad._values import check, check_count, check_type, local_path, missing_extra
from fftgrad.checkpoint import _reshard, _sums
from fftgrad.checkpoint._reshard import Leaf, Mark, Missing

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

FORMAT = 2
"""Version of the metadata in `about`. Raise the version if their meaning changes."""

ARRAYS, ABOUT = "arrays", "about"


def save(directory: str | os.PathLike[str], step: int, tree: PyTree, *, keep: int = 2) -> None:
    """Function: save a tree of arrays as a checkpoint, from which `restore` reads the same bits.

        checkpoint.save("runs/lm", step, {"params": params, "state": state})

    Also save your PRNG keys and the position in the data. Orbax writes from all processes, which
    need a common file system. Until a checkpoint is complete, it has a temporary name. So a killed
    process or a full disk leaves earlier checkpoints intact.

    Args:
      directory: a folder of a mounted file system, not a URL. `~` is the home folder.
      step: the number of the checkpoint, larger than all numbers in the folder.
      tree: any pytree of arrays, typed PRNG keys and numbers.
      keep: number of checkpoints to keep, at least 2, because the newest may become damaged.

    Raises:
      TypeError: if Orbax cannot store a leaf, such as uint4, text or an int of more than 64 bits.
      ValueError: if the folder has a checkpoint of this step or a later one, or if copies of an
        array differ between devices.

    Example:
      >>> import tempfile
      >>> folder = tempfile.mkdtemp()
      >>> fg.checkpoint.save(folder, 3, {"w": jnp.arange(2.0)})
      >>> fg.checkpoint.restore(folder, {"w": jnp.zeros(2)}).tree
      {'w': Array([0., 1.], dtype=float32)}
    """
    folder = local_path("save(directory)", directory)
    check_count("save(keep)", keep, "use 2, in case the newest is damaged.", least=2)
    check_count("save(step)", step, "pass int(step).", least=0)
    _check_leaves(tree)
    leaves = _reshard.describe(tree)
    _sums.check_copies(dict(zip(leaves, jax.tree.leaves(tree), strict=True)), "save")
    arrays: dict[str, Any] = {}
    about: dict[str, Any] = {}
    for (name, leaf), value in zip(leaves.items(), jax.tree.leaves(tree), strict=True):
        array = jax.random.key_data(value) if leaf.is_key else _as_array(value)
        if array.size:  # Orbax cannot write an empty array
            arrays[name] = array
        told = {"dtype": leaf.dtype, "shape": list(leaf.shape), "sum": _sums.total(array)}
        about[name] = leaf.mark._asdict() | told
    args = orbax().args
    parts = {ARRAYS: args.PyTreeSave(arrays), ABOUT: args.JsonSave(signed(about))}
    with opened(folder, keep) as manager:
        newest = manager.latest_step()
        fine, rule = newest is None or step > newest, f"be later than the newest step, {newest}"
        check(fine, "save(step)", rule, step, "use another folder.")
        manager.save(step, args=args.Composite(**parts))


def _check_leaves(tree: PyTree) -> None:
    for path, leaf in jax.tree.leaves_with_path(tree):
        argument = f"save(tree{jax.tree_util.keystr(path)})"
        kinds = jax.Array | np.ndarray | np.generic | bool | int | float | complex
        is_array = isinstance(leaf, kinds) and not isinstance(leaf, np.ma.MaskedArray)
        fine, remedy = is_array and stores(_as_array(leaf).dtype), "convert it, or leave it out."
        check_type(fine, argument, "be an array of a dtype that Orbax stores", leaf, remedy)


def _as_array(value: Any) -> Any:
    return value if isinstance(value, jax.Array) else np.asarray(value)


class Restored(NamedTuple):
    """Result of `restore`.

    Attributes:
      tree: the restored tree, with the shardings of `like`.
      step: the number of the checkpoint.
      workers: the numbers of workers in the checkpoint and in `like`.
    """

    tree: Any
    step: int
    workers: tuple[int, int]


class DamagedError(Exception):
    """Raised for a checkpoint that cannot be read or differs from the saved data."""


def restore(
    directory: str | os.PathLike[str],
    like: PyTree,
    *,
    step: int | None = None,
    missing: Missing = "refuse",
) -> Restored:
    """Function: restore the newest checkpoint of `save` into the structure of a fresh tree.

        fresh = {"params": params, "state": fg.init_state(tx, params, mesh, "data")}
        tree, step, *_ = checkpoint.restore("runs/lm", fresh)

    With the same number of workers, the result has the saved bits. For another number of workers or
    another method, `restore` converts the state as `reshard_state` does, or refuses like it. It
    finds leaves by path, so containers may differ.

    A checksum of each array detects damage. If a checkpoint is damaged, `restore` warns and reads
    the checkpoint before it.

    Args:
      directory: the folder that `save` wrote to. `~` is the home folder.
      like: a fresh tree with the structure, shapes, dtypes and shardings of the result.
      step: the number of a checkpoint. By default, the newest intact checkpoint.
      missing: "refuse" raises an error if a leaf is missing, left over or of another shape. "zero"
        warns, uses the leaf of `like` (zero in a fresh state), and drops leaves that `like` lacks.

    Raises:
      FileNotFoundError: if the folder has no intact checkpoint, or no intact one of `step`.
      ValueError: with "refuse", if a leaf is missing, left over, or of another shape.

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
        fine, rule = not isinstance(mesh, jax.sharding.AbstractMesh), "have shardings over devices"
        check(fine, "restore(like)", rule, mesh, "pass a fresh state of fg.init_state.")
    folder = local_path("restore(directory)", directory)
    with opened(folder) as manager:
        steps = sorted(manager.all_steps(), reverse=True)
        for number in steps if step is None else [n for n in steps if n == step]:
            try:
                resharded = _read(manager, number, like, missing)
            except DamagedError as error:
                text = f"restore({directory}): skips step {number}, which is damaged: {error}"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
                continue
            return Restored(resharded.state, number, *resharded[1:])
    wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
    raise FileNotFoundError(
        f"restore(directory): must have {wanted} that is intact, got steps {steps[::-1]} in "
        f"{directory}; pass the folder of checkpoint.save."
    )


def _read(manager: Any, step: int, like: PyTree, missing: Missing) -> _reshard.Resharded:
    ocp = orbax()

    def part(name: str, args: Any) -> Any:
        return manager.restore(step, args=ocp.args.Composite(**{name: args}))[name]

    def about() -> dict[str, Any]:
        found = part(ABOUT, ocp.args.JsonRestore())
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']}, but this fftgrad reads {FORMAT}")
        if found != signed(found["leaves"]):
            raise ValueError("the metadata of its leaves differ from the saved ones")
        return found["leaves"]

    def array(name: str, row: Mapping[str, Any], sharding: Any) -> Any:
        if not math.prod(row["shape"]):
            return np.zeros(row["shape"], row["dtype"])
        as_it_is = ocp.RestoreArgs(restore_type=np.ndarray)
        how = {name: as_it_is if sharding is None else ocp.ArrayRestoreArgs(sharding=sharding)}
        args = ocp.args.PyTreeRestore(item={name: 0}, restore_args=how, partial_restore=True)
        value = part(ARRAYS, args)[name]
        if _sums.total(value) != row["sum"]:
            raise ValueError(f"{name} has other bits than the saved ones")
        return value

    old = {
        name: Leaf(
            Mark(*(row[field] for field in Mark._fields)),
            tuple(row["shape"]),
            row["dtype"],
            lambda sharding, name=name, row=row: _agreed(lambda: array(name, row, sharding)),
        )
        for name, row in _agreed(about).items()
    }
    return _reshard.lay_out(old, like, missing, "restore")


def _agreed(read: Callable[[], Any]) -> Any:
    """Read on all processes. If one process fails, raise `DamagedError` on all processes."""
    value, problem = None, ""
    try:
        value = read()
    except Exception as error:  # Orbax and TensorStore raise many types for a damaged file
        said = next(iter(str(error).splitlines()), "")
        problem = f"{type(error).__name__}: {said[:200]}"
    fine = not problem
    if jax.process_count() > 1:
        fine = bool(np.all(multihost_utils.process_allgather(np.asarray(fine))))
    if not fine:
        raise DamagedError(problem or "another process cannot read it")
    return value


def orbax() -> Any:
    """Import Orbax when it is needed. `reshard_state` works without it."""
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise missing_extra("fftgrad.checkpoint", "Orbax", "checkpoint") from error
    return ocp


def stores(dtype: np.dtype[Any]) -> bool:
    """True if Orbax can store this dtype. Orbax writes through TensorStore."""
    orbax()
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):  # saved as the data of the keys
        return True
    import tensorstore

    try:
        tensorstore.dtype(dtype.name)
    except ValueError:
        return False
    return dtype.isnative


def opened(directory: pathlib.Path, keep: int | None = None) -> "ocp.CheckpointManager":
    """Open Orbax's manager of a folder. Pass `keep` to write checkpoints.

    Orbax writes a step under a temporary name, and renames the step when it is complete. Readers do
    not set the option `read_only`, because Orbax then warns at every start.
    """
    ocp = orbax()
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        enable_async_checkpointing=False,
        create=keep is not None,
    )
    return ocp.CheckpointManager(directory.absolute(), options=options)


def signed(leaves: dict[str, Any]) -> dict[str, Any]:
    """Add a format and a checksum to the metadata of the leaves."""
    text = json.dumps(leaves, sort_keys=True)
    return {"format": FORMAT, "leaves": leaves, "sum": zlib.crc32(text.encode())}
