"""Checksums of arrays, to compare copies on devices and to verify restored arrays."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fftgrad._values import check
from fftgrad.ops import _random

CHUNK = 1 << 16
RULE = "be the same on all devices that hold it"
REMEDY = """shard the state by fg.state_specs, and wrap transformations before compressed_pmean in \
fg.training.local_state."""


def total(leaf: Any) -> int:
    """Return the checksum of an array: the uint32 sum of its words, each hashed with its position.

    The checksum detects flipped bits, which Orbax does not. Two different arrays have the same
    checksum with probability 2^-32. The sharding does not change the checksum.
    """
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        mesh = leaf.sharding.mesh if isinstance(leaf.sharding, NamedSharding) else None
        out = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        return int(jax.jit(_on_devices, out_shardings=out)(leaf))
    x = np.asarray(leaf)
    if _is_narrow(x.dtype):
        x = x.astype(np.float32)
    flat = np.ascontiguousarray(x).reshape(-1)
    words = flat.view(f"uint{8 * min(x.dtype.itemsize, 4)}")
    found = 0
    for start in range(0, words.size, CHUNK):
        part = words[start : start + CHUNK].astype(np.uint32)
        filled = np.pad(part, (0, CHUNK - part.size))
        found += int(_of_chunk(filled, np.uint32(start % (1 << 32)), part.size))
    return found % (1 << 32)


@jax.jit
def _of_chunk(words: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    mixed = _random.bits(start, words, words.size)
    return jnp.sum(jnp.where(jnp.arange(words.size) < count, mixed, 0), dtype="uint32")


def _on_devices(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if _is_narrow(x.dtype):
        x = x.astype(jnp.float32)
    width = 8 * min(x.dtype.itemsize, 4)
    words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{width}")).astype(jnp.uint32)
    # Compute positions axis by axis. To flatten x, XLA would have to gather the shards.
    places = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        places = places * jnp.uint32(size) + jax.lax.broadcasted_iota("uint32", words.shape, axis)
    return jnp.sum(_random._mix(_random._mix(places) ^ words), dtype="uint32")


def _is_narrow(dtype: np.dtype[Any]) -> bool:
    return dtype == np.bool_ or jax.dtypes.itemsize_bits(dtype) < 8


def check_copies(arrays: Mapping[str, object], owner: str) -> None:
    """Refuse an array if two devices, of any processes, have different copies of it."""
    groups: dict[tuple[Any, ...], dict[str, jax.Array]] = {}
    for name, array in arrays.items():
        if isinstance(array, jax.Array) and array.size:
            places = array.sharding.devices_indices_map(array.shape).values()
            if len({*map(str, places)}) == array.sharding.num_devices:
                continue  # no copies
            if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
                array = jax.random.key_data(array)
            devices = sorted(array.sharding.device_set, key=lambda device: device.id)
            groups.setdefault(tuple(devices), {})[name] = array
    for devices, group in groups.items():
        mesh = Mesh(np.array(devices), ("copy",))
        sums = np.asarray(_summed(mesh)(_stacked(group.values(), mesh)))
        for (name, array), column in zip(group.items(), sums.T, strict=True):
            places = array.sharding.devices_indices_map(array.shape)
            first: dict[str, tuple[Any, int]] = {}
            for device, own in zip(devices, column.tolist(), strict=True):
                other, expected = first.setdefault(str(places[device]), (device, own))
                got = f"different copies on {device} and {other}"
                check(own == expected, f"{owner}({name})", RULE, got, REMEDY)


def _stacked(arrays: Iterable[jax.Array], mesh: Mesh) -> list[jax.Array]:
    """View the local data of all devices as rows of one array, without moving data."""
    rows = NamedSharding(mesh, PartitionSpec("copy"))
    out: list[jax.Array] = []
    for array in arrays:
        own = array if array.ndim else jax.jit(jnp.atleast_1d)(array)
        one, *others = own.sharding.shard_shape(own.shape)
        parts = [shard.data for shard in own.addressable_shards]
        shape = (one * mesh.size, *others)
        out.append(jax.make_array_from_single_device_arrays(shape, rows, parts))
    return out


@functools.lru_cache(maxsize=8)
def _summed(mesh: Mesh) -> "jax.stages.Wrapped":
    """Make the program that computes the checksums of all rows, uint32[devices, arrays]."""

    def sums(arrays: list[jax.Array]) -> jax.Array:
        return jnp.stack([_on_devices(array) for array in arrays])[None]

    rows = PartitionSpec("copy")
    of_each = jax.shard_map(sums, mesh=mesh, in_specs=(rows,), out_specs=rows)
    return jax.jit(of_each, out_shardings=NamedSharding(mesh, PartitionSpec()))
