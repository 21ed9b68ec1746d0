"""Arrays in files: .npz and .npy of NumPy, and .safetensors, which is a header and bytes."""

import json
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fftgrad.advise import load_gradients
from fftgrad.advise._gradient_log import GradientLog

SAFETENSORS = {
    "F64": np.dtype("float64"),
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(jnp.bfloat16),
}
"""Those that may be gradients."""


def shapes(argument: str, path: pathlib.Path) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of the floating-point arrays of a file, by name."""
    read = _safetensors_shapes if path.suffix == ".safetensors" else _arrays
    return _found(argument, path, read, _like)


def arrays(argument: str, path: pathlib.Path) -> dict[str, np.ndarray]:
    """The floating-point arrays of a file, by name; those of float64 as float32."""
    return _found(argument, path, _arrays, _values)


def gradients(argument: str, *paths: pathlib.Path) -> GradientLog:
    """The same of each step and worker of files of `save_gradients`, or of other arrays."""
    steps = {
        step: {worker: _floating(argument, paths, tree) for worker, tree in workers.items()}
        for step, workers in load_gradients(*paths).gradients.items()
    }
    return GradientLog(steps)


def _floating(argument: str, paths: tuple[pathlib.Path, ...], tree: Any) -> dict[str, np.ndarray]:
    named = {name: _named(x) for name, x in tree.items()}
    found = {n: _values(x) for n, x in named.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    if not sum(x.size for x in found.values()):
        raise ValueError(
            f"{argument}: must have floating-point values, got {', '.join(map(str, paths))} "
            "without any; np.savez(file, **arrays) writes some."
        )
    return found


def _values(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # what float32 cannot hold is not finite
        return np.asarray(x, _like(x).dtype)


def _found(
    argument: str,
    path: pathlib.Path,
    read: Callable[[pathlib.Path], Iterator[tuple[str, Any]]],
    make: Callable[[Any], Any],
) -> dict[str, Any]:
    """What is made of the floating-point arrays that are read, or what is wrong with the file."""
    try:
        found = {name: make(x) for name, x in read(path) if jnp.issubdtype(x.dtype, jnp.floating)}
    except Exception as error:  # what parsers raise for damaged files is not documented
        raise ValueError(
            f"{argument}: must be an .npz, .npy or .safetensors file of arrays, got {path}, which "
            f"cannot be read ({error}); np.savez(file, **arrays) writes one."
        ) from error
    if not sum(math.prod(one.shape) for one in found.values()):
        raise ValueError(
            f"{argument}: must have floating-point values, got {path} without any; "
            "np.savez(file, **arrays) writes one."
        )
    return found


def _like(x: Any) -> jax.ShapeDtypeStruct:
    """In float32 what no gradient is, such as float64."""
    kept = x.dtype in (jnp.bfloat16, jnp.float16)
    return jax.ShapeDtypeStruct(x.shape, x.dtype if kept else jnp.float32)


def _arrays(path: pathlib.Path) -> Iterator[tuple[str, np.ndarray]]:
    """One after the other, so that only one is in memory."""
    if path.suffix == ".safetensors":
        whole = np.fromfile(path, np.uint8)
        for name, like, start, end in _header(path):
            yield name, whole[start:end].view(like.dtype).reshape(like.shape)
        return
    with path.open("rb") as file:  # which NumPy leaves open where it cannot read it
        loaded: Any = np.load(file, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            yield path.stem, _named(loaded)
            return
        with loaded:
            for name in loaded.files:
                yield name, _named(loaded[name])


def _named(x: np.ndarray) -> np.ndarray:
    """NumPy saves bfloat16 as two bytes without a name."""
    return x.view(jnp.bfloat16) if x.dtype == np.dtype("V2") else x


def _safetensors_shapes(path: pathlib.Path) -> Iterator[tuple[str, jax.ShapeDtypeStruct]]:
    for name, like, _, _ in _header(path):
        yield name, like


def _header(path: pathlib.Path) -> Iterator[tuple[str, jax.ShapeDtypeStruct, int, int]]:
    """The floating-point tensors of a file: name, shape, and where their bytes are in it."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError("its header is longer than the file")
        header = dict(json.loads(file.read(length)))
    for name, tensor in header.items():
        if name != "__metadata__" and tensor["dtype"] in SAFETENSORS:
            like = jax.ShapeDtypeStruct(tuple(tensor["shape"]), SAFETENSORS[tensor["dtype"]])
            start, end = tensor["data_offsets"]
            yield name, like, 8 + length + start, 8 + length + end
