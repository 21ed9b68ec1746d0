"""Whether what counts as the same on several devices is so, by a sum that each takes of its own."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fftgrad.ops import _hash


def check_copies(arrays: Mapping[str, object], owner: str) -> None:
    """Refuses an array of which a device has another copy, on this process or another.

    Only the sums travel. Copies that differ have the same sum with a chance of 2^-32.
    """
    groups: dict[tuple[Any, ...], dict[str, jax.Array]] = {}
    for name, array in arrays.items():
        if isinstance(array, jax.Array) and array.size and _has_copies(array):
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
            for device, total in zip(devices, column.tolist(), strict=True):
                other, expected = first.setdefault(str(places[device]), (device, total))
                if total != expected:
                    raise ValueError(
                        f"{owner}({name}): must be the same on all devices that hold it, got "
                        f"another copy on {device} than on {other}: each worker has its own, "
                        "which shard_map with check_vma=False does not see; make the state by "
                        "fg.init_state, shard it by fg.state_specs, and put what comes before "
                        "compressed_pmean in fg.per_worker."
                    )


def _has_copies(array: jax.Array) -> bool:
    whole = array.sharding.num_devices
    places = {str(place) for place in array.sharding.devices_indices_map(array.shape).values()}
    return len(places) < whole and array.sharding.memory_kind in (None, _memory_kind(array))


def _memory_kind(array: jax.Array) -> str:
    """Where a device computes; what waits elsewhere has a row for each worker."""
    return next(iter(array.sharding.device_set)).default_memory().kind


def _stacked(arrays: Iterable[jax.Array], mesh: Mesh) -> list[jax.Array]:
    """What each device holds, as its rows of one array, which moves nothing."""
    rows = NamedSharding(mesh, PartitionSpec("copy"))
    out: list[jax.Array] = []
    for array in arrays:
        own = array if array.ndim else _as_row(array)
        one, *others = own.sharding.shard_shape(own.shape)
        parts = [shard.data for shard in own.addressable_shards]
        shape = (one * mesh.size, *others)
        out.append(jax.make_array_from_single_device_arrays(shape, rows, parts))
    return out


@jax.jit
def _as_row(scalar: jax.Array) -> jax.Array:
    return scalar.reshape(1)


@functools.lru_cache(maxsize=8)
def _summed(mesh: Mesh) -> "jax.stages.Wrapped":
    """A program from stacked arrays to sums of each, uint32[devices, arrays], on all devices."""

    def sums(arrays: list[jax.Array]) -> jax.Array:
        return jnp.stack([_total(array) for array in arrays])[None]

    rows = PartitionSpec("copy")
    of_each = jax.shard_map(sums, mesh=mesh, in_specs=(rows,), out_specs=rows)
    return jax.jit(of_each, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _total(x: jax.Array) -> jax.Array:
    """A sum of the bits of an array, each word through a bijection of its place, uint32[].

    A product with the place in its stead would lose two signs that change together.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype == jnp.bool_ or jax.dtypes.itemsize_bits(x.dtype) < 8:  # no whole bytes
        x = x.astype(jnp.float32)
    width = min(x.dtype.itemsize, 4)
    words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * width}")).ravel()
    return jnp.sum(_hash.bits(jnp.uint32(0), words.astype(jnp.uint32), words.size), dtype="uint32")
