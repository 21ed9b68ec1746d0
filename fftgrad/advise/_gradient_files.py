"""Gradients by step and worker, and files of them."""

import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from fftgrad._contracts import PyTree
from fftgrad._values import check_choice, local_path
from fftgrad.ops._shapes import by_path

Array = npt.NDArray[Any]
Each = Literal["worker", "step"]

OURS = re.compile(r"step=(\d+)/worker=(\d+)/(.*)", re.DOTALL)
"""The name of an array: step, worker, and the path of the leaf."""

FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}
"""What .safetensors calls the dtypes of gradients."""


class GradientLog(NamedTuple):
    """Gradients of some steps, worker by worker.

    Attributes:
      gradients: for each step, by its number, the gradient of each worker, by its number: a tree of
        arrays.
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


def save_gradients(path: str | os.PathLike[str], log: GradientLog) -> None:
    """Function: gradients as a file for NumPy and `load_gradients`.

    It is a .npz: a zip archive of .npy files, one for each array, with a name such as
    step=100/worker=3/layers/0/w, with the keys, positions and fields of the leaf's path between
    slashes. bfloat16 is stored as float32, with the same values, because NumPy has no name for it.

    In several processes each saves its own workers to a file of its own.

    Args:
      path: the file, .npz; `~` is the home folder, and the suffix is added if there is none.
      log: the gradients, at least one.

    Raises:
      ValueError: if there is no gradient, or the file has another suffix.

    Example:
      >>> import tempfile
      >>> import numpy as np
      >>> file = tempfile.mkdtemp() + "/gradients.npz"
      >>> log = fg.advise.GradientLog({10: {0: {"w": np.ones(2, np.float32)}}})
      >>> fg.advise.save_gradients(file, log)
      >>> list(np.load(file))
      ['step=10/worker=0/w']
    """
    if not isinstance(log, GradientLog):
        raise TypeError(
            f"save_gradients(log): must be a GradientLog, got a {type(log).__name__}; pass "
            "fg.advise.GradientLog({step: {worker: tree}})."
        )
    file = local_path("save_gradients(path)", path)
    if file.suffix not in ("", ".npz"):
        raise ValueError(
            f"save_gradients(path): must end in .npz, or have no suffix, got {file.name!r}; use "
            f"{file.name + '.npz'!r}."
        )
    saved: dict[str, Array] = {}
    for step, workers in log.gradients.items():
        for worker, tree in workers.items():
            for name, leaf in by_path(tree).items():
                own = np.asarray(leaf)
                own = own.astype(np.float32) if own.dtype == jnp.bfloat16 else own
                saved[f"step={step}/worker={worker}/{name}"] = own
    if not saved:
        raise ValueError(
            "save_gradients(log): must hold a gradient, got none; pass "
            "fg.advise.GradientLog({step: {worker: tree}})."
        )
    with file.with_suffix(".npz").open("wb") as opened:
        write: Any = np.savez
        write(opened, **saved)


def load_gradients(*paths: str | os.PathLike[str], each: Each | None = None) -> GradientLog:
    """Function: gradients from files, for `fg.advise.analyze`.

    What may be in them:

        .npz of save_gradients    the steps and workers that were recorded
        .npz of other arrays      one tree, as of step 0 and worker 0
        .npy                      one array, the same
        .safetensors              one tree, the same

    Arrays of other than floating-point numbers are no gradients, and left out.

    Args:
      *paths: a file, or several, such as one of each process; together they must have each step of
        a worker once.
      each: what files are that do not say their step and worker: "worker" for those of worker 0, 1,
        2 and so on at one step, in the order in which they come, "step" for steps of one worker. It
        must be said for more than one of them.

    Returns:
      A `GradientLog`. Each tree is a dict from paths to arrays, whatever containers it had.

    Raises:
      ValueError: if a file cannot be read or has no floating-point value, or a gradient is there
        twice.

    Example:
      >>> import tempfile
      >>> import numpy as np
      >>> file = tempfile.mkdtemp() + "/gradients.npz"
      >>> fg.advise.save_gradients(file, fg.advise.GradientLog({10: {0: {"a": {"b": np.ones(2)}}}}))
      >>> fg.advise.load_gradients(file).gradients
      {10: {0: {'a/b': array([1., 1.])}}}
    """
    if not paths:
        raise ValueError("load_gradients(*paths): must be one file or more, got none; pass one.")
    if each is not None:
        check_choice("load_gradients(each)", each, get_args(Each))
    found: dict[int, dict[int, dict[str, Array]]] = {}
    plain = 0
    for path in [local_path("load_gradients(*paths)", path) for path in paths]:
        named = dict(arrays(path))
        ours = [name.groups() for name in map(OURS.fullmatch, named) if name]
        names, remedy = ours, "pass each file once."
        if len(ours) < len(named):
            place = (plain, 0) if each == "step" else (0, plain if each else 0)
            names, plain = [(*place, name) for name in named], plain + 1
            if not each:
                remedy = (
                    "its arrays do not say of which step and worker they are: say each='worker' "
                    "for files of a worker each, or each='step'."
                )
        known = {(step, worker) for step, workers in found.items() for worker in workers}
        for (step, worker, leaf), array in zip(names, named.values(), strict=True):
            if (key := (int(step), int(worker))) in known:
                raise ValueError(
                    f"load_gradients({path}): must have gradients that the files before it do not "
                    f"have, got step {key[0]} of workers [{key[1]}] again; {remedy}"
                )
            found.setdefault(key[0], {}).setdefault(key[1], {})[leaf] = array
    return GradientLog({step: dict(sorted(found[step].items())) for step in sorted(found)})


def arrays(path: pathlib.Path) -> Iterator[tuple[str, Array]]:
    """The floating-point arrays of a file and their names, one after the other."""
    path.open("rb").close()  # whose errors name the file
    values = 0
    try:
        for name, array in _safetensors(path) if path.suffix == ".safetensors" else _numpy(path):
            # NumPy saves bfloat16 as two bytes without a name.
            own = array.view(jnp.bfloat16) if array.dtype == np.dtype("V2") else array
            if jnp.issubdtype(own.dtype, jnp.floating):
                values += own.size
                yield name, own
    except Exception as error:  # what parsers raise for damaged files is not documented
        # NumPy takes whatever it does not know for pickled objects, and offers to load them.
        reason = "other content" if "pickle" in str(error) else f"{type(error).__name__}: {error}"
        raise ValueError(
            f"load_gradients({path}): must be a whole .npz, .npy or .safetensors file of arrays, "
            f"got {reason}; save it again by fg.advise.save_gradients or np.savez(file, **arrays)."
        ) from error
    if not values:
        raise ValueError(
            f"load_gradients({path}): must have floating-point values, got none; save "
            "gradients, or arrays by np.savez(file, **arrays)."
        )


def _numpy(path: pathlib.Path) -> Iterator[tuple[str, Array]]:
    with path.open("rb") as file:  # which NumPy leaves open where it cannot read it
        loaded: Any = np.load(file, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            yield "", loaded
        else:
            yield from loaded.items()


def _safetensors(path: pathlib.Path) -> Iterator[tuple[str, Array]]:
    """The format is a length, a header of JSON, and the bytes of all tensors without gaps."""
    whole = np.memmap(path, np.uint8, "r")
    start = 8 + int.from_bytes(whole[:8].tobytes(), "little")
    header = dict(json.loads(whole[8:start].tobytes()))
    header.pop("__metadata__", None)
    body, end = np.asarray(whole[start:]), 0
    for name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end, before = *tensor["data_offsets"], end
        if begin != before:
            raise ValueError(f"the bytes of {name} are not behind those of the tensor before")
        if tensor["dtype"] in FLOATS:
            yield name, body[begin:end].view(FLOATS[tensor["dtype"]]).reshape(tensor["shape"])
    if end != body.size:
        raise ValueError(f"{body.size - end} bytes behind the last tensor")
