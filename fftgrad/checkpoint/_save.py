"""Everything that a training run needs to go on."""

import os
from typing import Any

import jax
import numpy as np

from fftgrad._contracts import PyTree
from fftgrad.checkpoint import _folder
from fftgrad.checkpoint._folder import ocp
from fftgrad.training import _leaves


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
      directory: a folder, or a URL that Orbax knows, such as gs://bucket/run.
      step: the number of the checkpoint, not one that is there already.
      tree: arrays, typed PRNG keys and numbers, nested as you like.
      keep: how many of the newest checkpoints to keep; at least 2, so that there is one to go back
        to if a file is found to be damaged.

    Raises:
      ValueError: if a checkpoint of this step is there, if two leaves have one path, or if `keep`
        is less than 2.
      OSError: or what Orbax raises if it cannot write.

    Example:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> from fftgrad import checkpoint
      >>> folder = tempfile.mkdtemp()
      >>> checkpoint.save(folder, 3, {"w": jnp.arange(2.0)})
      >>> checkpoint.restore(folder, {"w": jnp.zeros(2)}).tree
      {'w': Array([0., 1.], dtype=float32)}
    """
    if keep < 2:
        raise ValueError(
            f"save(keep): must be at least 2, got {keep}; a damaged checkpoint leaves none else."
        )
    leaves = _leaves.describe(tree, "save")
    arrays: dict[str, Any] = {}
    about: dict[str, Any] = {}
    for (name, leaf), value in zip(leaves.items(), jax.tree.leaves(tree), strict=True):
        arrays[name] = jax.random.key_data(value) if leaf.is_key else _as_array(value)
        about[name] = {
            "kind": leaf.kind,
            "shape": list(leaf.shape),
            "dtype": leaf.dtype,
            "size": leaf.size,
            "pieces": leaf.pieces,
            "sum": _folder.total(arrays[name]),
        }
    with _folder.manager(directory, keep) as manager:
        if step in manager.all_steps():
            raise ValueError(
                f"save(step): must be new in {directory}, got {step}; use another folder, or save "
                "the next step."
            )
        manager.save(
            step,
            args=ocp.args.Composite(
                **{
                    _folder.ARRAYS: ocp.args.PyTreeSave(arrays),
                    _folder.ABOUT: ocp.args.JsonSave(_folder.signed(about)),
                }
            ),
        )


def _as_array(value: Any) -> Any:
    return value if isinstance(value, jax.Array) else np.asarray(value)
