"""A folder of checkpoints: what Orbax is asked for, and the sum by which each array is known."""

import functools
import json
import pathlib
import zlib
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fftgrad.checkpoint._rows import Array

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

FORMAT = 1
"""Of what `about` holds. Another meaning gets another number."""

ARRAYS, ABOUT = "arrays", "about"


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


def manager(directory: pathlib.Path, keep: int | None = None) -> "ocp.CheckpointManager":
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


def total(leaf: Any) -> int:
    """A sum of the bits of an array, in which each place has its own odd factor.

    Any change of one value of at most 32 bits is seen; two different arrays have the same sum with
    a chance of 2^-32. It is the same for each way of sharding the array.
    """
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        mesh = leaf.sharding.mesh if isinstance(leaf.sharding, NamedSharding) else None
        out = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        return int(jax.jit(_total_on_devices, out_shardings=out)(leaf))
    return _total_on_host(np.asarray(leaf))


def _total_on_host(x: Array, chunk: int = 1 << 20) -> int:
    bits = _bits(x).ravel()
    start = total = 0
    while start < bits.size:
        part = bits[start : start + chunk].astype(np.uint32)
        places = np.arange(start, start + part.size, dtype=np.uint64).astype(np.uint32)
        total += int(np.sum(part * (2 * places + 1), dtype=np.uint32))
        start += chunk
    return total % (1 << 32)


def _bits(x: Array) -> Array:
    if x.dtype == np.bool_:
        return x.astype(np.uint8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        parts = np.stack([x.real, x.imag], axis=-1)
        return _bits(np.ascontiguousarray(parts))
    width = min(x.dtype.itemsize, 4)
    return np.ascontiguousarray(x).reshape(-1).view(f"uint{8 * width}")


def _total_on_devices(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    width = min(jax.dtypes.itemsize_bits(x.dtype), 32)
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{width}")).astype(jnp.uint32)
    places = functools.reduce(
        lambda flat, axis: (
            flat * jnp.uint32(bits.shape[axis] % (1 << 32))
            + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        ),
        range(bits.ndim),
        jnp.zeros(bits.shape, jnp.uint32),
    )
    return jnp.sum(bits * (2 * places + 1), dtype=jnp.uint32)
