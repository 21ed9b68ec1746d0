"""Everything that a training run needs to go on."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fftgrad._contracts import PyTree
from fftgrad._values import brief, check_count, local_path
from fftgrad.checkpoint import _copies, _folder, _leaves


def save(directory: str | os.PathLike[str], step: int, tree: PyTree, *, keep: int = 2) -> None:
    """Function: a tree of arrays as a checkpoint, which `checkpoint.restore` gets back bit by bit.

        checkpoint.save("runs/lm", step, {"params": params, "state": state})

    The residuals of error feedback are sharded arrays like any others, with a row for each worker,
    and so are counters, the memories of servers, and the anchor of `diloco`. All of it is saved.
    Besides parameters and state, save what your loop needs to go on: keys, the place in the data.

    It is written by Orbax, in parallel from all processes that have shards of it, which need a file
    system in common, and returns when the checkpoint is whole. Until then it has another name: a
    process that is killed, or a disk that is full, leaves the checkpoints before it as they were.
    No file is a pickle.

    Args:
      directory: a folder of a mounted file system, not a URL. `~` is the home folder.
      step: the number of the checkpoint, larger than that of any that is there.
      tree: arrays, typed PRNG keys and numbers, nested as you like. An error names a leaf that
        Orbax cannot store, such as uint4, an object, or an int of more than 64 bits: convert it.
      keep: how many of the newest checkpoints to keep; at least 2, so that there is one to go back
        to if a file is found to be damaged.

    Raises:
      ValueError: if a checkpoint of this step or a later one is there, two leaves have one path, or
        copies of an array differ between devices.

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
    leaves = _leaves.describe(tree, "save")
    _copies.check_copies(dict(zip(leaves, jax.tree.leaves(tree), strict=True)), "save")
    arrays: dict[str, Any] = {}
    about: dict[str, Any] = {}
    for (name, leaf), value in zip(leaves.items(), jax.tree.leaves(tree), strict=True):
        array = jax.random.key_data(value) if leaf.is_key else _as_array(value)
        if array.size:  # Orbax writes no array without a value
            arrays[name] = array
        told = {field: getattr(leaf, field) for field in _leaves.TOLD}
        about[name] = told | {"shape": list(leaf.shape), "sum": _folder.total(array)}
    if not arrays:
        raise ValueError(
            "save(tree): must have a value to save, got none; pass {'params': ..., 'state': ...}."
        )
    with _folder.manager(folder, keep) as manager:
        newest = manager.latest_step()
        if newest is not None and step <= newest:
            raise ValueError(
                f"save(step): must be later than the newest in {directory}, because that is what "
                f"restore takes, got {step} after {newest}; use another folder."
            )
        manager.save(
            step,
            args=_folder.orbax().args.Composite(
                **{
                    _folder.ARRAYS: _folder.orbax().args.PyTreeSave(arrays),
                    _folder.ABOUT: _folder.orbax().args.JsonSave(_folder.signed(about)),
                }
            ),
        )


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
        if not (jnp.issubdtype(dtype, jax.dtypes.prng_key) or _folder.stores(dtype)):
            raise TypeError(
                f"{argument}: must have a dtype that Orbax stores, got {dtype} for {brief(leaf)}; "
                "convert it, such as uint4 by .astype('uint8'), or an int of more than 64 bits by "
                "np.frombuffer(x.to_bytes(16, 'little'), np.uint8)."
            )


def _as_array(value: Any) -> Any:
    return value if isinstance(value, jax.Array) else np.asarray(value)
