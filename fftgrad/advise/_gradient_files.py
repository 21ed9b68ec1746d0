"""Gradients in files: what `recorded` returns as .npz, and the files of others."""

import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from fftgrad._contracts import PyTree
from fftgrad.advise._gradient_log import GradientLog

Array = npt.NDArray[Any]

OURS = re.compile(r"(\d+)/(\d+)/(.*)", re.DOTALL)
"""The name of an array: step, worker, and the path of the leaf."""


def save_gradients(path: str | os.PathLike[str], log: GradientLog) -> None:
    """Function: what `fg.advise.recorded` returned, as a file for NumPy and `load_gradients`.

    It is a .npz: a zip archive of .npy files, one for each array, called step/worker/leaf, such as
    100/3/layers/0/w, with the keys, positions and fields of the leaf's path between slashes.
    bfloat16 is stored as float32, with the same values, because NumPy has no name for it.

    In several processes each saves the workers that it has, to a file of its own.

    Args:
      path: the file; the suffix .npz is added if it has none.
      log: what `fg.advise.recorded` returned.

    Raises:
      TypeError: if it is no `GradientLog`.
      ValueError: if nothing is recorded yet, or two leaves have one path.
      OSError: if it cannot be written.

    Example:
      >>> import tempfile
      >>> import fftgrad as fg
      >>> import numpy as np
      >>> file = tempfile.mkdtemp() + "/gradients.npz"
      >>> log = fg.advise.GradientLog({10: {0: {"w": np.ones(2, np.float32)}}})
      >>> fg.advise.save_gradients(file, log)
      >>> list(np.load(file))
      ['10/0/w']
    """
    if not isinstance(log, GradientLog):
        raise TypeError(
            f"save_gradients(log): must be a GradientLog, got a {type(log).__name__}; pass "
            "fg.advise.recorded(opt_state)."
        )
    arrays: dict[str, Array] = {}
    for step, workers in log.gradients.items():
        for worker, tree in workers.items():
            for name, leaf in named_leaves(tree):
                key = f"{step}/{worker}/{name}"
                if key in arrays:
                    raise ValueError(
                        "save_gradients(log): must have one leaf at a path, got two at "
                        f"{name!r}; rename a key."
                    )
                arrays[key] = leaf.astype(np.float32) if leaf.dtype == jnp.bfloat16 else leaf
    if not arrays:
        raise ValueError(
            "save_gradients(log): must hold a gradient, got none; wait until a step of "
            "record_gradients(steps) has passed."
        )
    with pathlib.Path(path).with_suffix(pathlib.Path(path).suffix or ".npz").open("wb") as file:
        write: Any = np.savez
        write(file, **arrays)


def load_gradients(*paths: str | os.PathLike[str]) -> GradientLog:
    """Function: gradients from files, for `fg.advise.analyze`.

    What may be in them:

        .npz of save_gradients    the steps and workers that were recorded
        .npz of other arrays      one tree, as of step 0 and worker 0
        .npy                      one array, the same
        .safetensors              one tree, the same; needs the package safetensors

    Args:
      *paths: a file, or several, such as one of each process; together they must have each step of
        a worker once.

    Returns:
      A `GradientLog`. Each tree is a dict from paths to arrays, whatever containers it had.

    Raises:
      ValueError: if there is no file, one that cannot be read, no array in it, or a gradient twice.
      FileNotFoundError: if a file is not there.
      ImportError: for .safetensors, if that package is not installed.

    Example:
      >>> import tempfile
      >>> import fftgrad as fg
      >>> import numpy as np
      >>> file = tempfile.mkdtemp() + "/gradients.npz"
      >>> fg.advise.save_gradients(file, fg.advise.GradientLog({10: {0: {"a": {"b": np.ones(2)}}}}))
      >>> fg.advise.load_gradients(file).gradients
      {10: {0: {'a/b': array([1., 1.])}}}
    """
    if not paths:
        raise ValueError("load_gradients(*paths): must be one file or more, got none; pass one.")
    found: dict[int, dict[int, dict[str, Array]]] = {}
    for path in map(pathlib.Path, paths):
        arrays = _read(path)
        names = {key: OURS.fullmatch(key) for key in arrays}
        ours = bool(arrays) and all(names.values())
        own: dict[int, dict[int, dict[str, Array]]] = {}
        for key, array in arrays.items():
            step, worker, leaf = _split(names[key]) if ours else (0, 0, key)
            own.setdefault(step, {}).setdefault(worker, {})[leaf] = array
        for step, workers in own.items():
            known = found.setdefault(step, {})
            if twice := known.keys() & workers.keys():
                raise ValueError(
                    f"load_gradients({path}): must have gradients that the files before it do not "
                    f"have, got step {step} of workers {sorted(twice)} again; pass each file once."
                )
            known |= workers
    return GradientLog({step: dict(sorted(found[step].items())) for step in sorted(found)})


def named_leaves(tree: PyTree) -> list[tuple[str, Array]]:
    """The leaves of a tree as NumPy arrays, by their paths as text."""
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), np.asarray(leaf))
        for path, leaf in jax.tree.leaves_with_path(tree)
    ]


def _split(name: Any) -> tuple[int, int, str]:
    step, worker, leaf = name.groups()
    return int(step), int(worker), leaf


def _read(path: pathlib.Path) -> Mapping[str, Array]:
    """The arrays of a file, by their names."""
    path.open("rb").close()  # whose errors name the file
    try:
        arrays = _safetensors(path) if path.suffix == ".safetensors" else _numpy(path)
    except ImportError:
        raise
    except Exception as error:  # what parsers raise for damaged files is not documented
        # NumPy takes whatever it does not know for pickled objects, and offers to load them.
        reason = "other content" if "pickle" in str(error) else f"{type(error).__name__}: {error}"
        raise ValueError(
            f"load_gradients({path}): must be a whole .npz, .npy or .safetensors file of arrays, "
            f"got {reason}; save it again by fg.advise.save_gradients."
        ) from error
    if not arrays:
        raise ValueError(
            f"load_gradients({path}): must have an array in it, got none; save what "
            "fg.advise.recorded(opt_state) returns after a step of record_gradients(steps) has "
            "passed."
        )
    return arrays


def _numpy(path: pathlib.Path) -> dict[str, Array]:
    with path.open("rb") as file:
        loaded = np.load(file, allow_pickle=False)
        return {"": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)


def _safetensors(path: pathlib.Path) -> dict[str, Array]:
    try:
        from safetensors.numpy import load_file
    except ImportError as error:
        raise ImportError(
            f"load_gradients({path}): needs the package safetensors, got {error}; install it by "
            "pip install safetensors, or save the arrays by numpy.savez."
        ) from error
    return load_file(path)
