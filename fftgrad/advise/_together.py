"""Workers that time something together, as they compute in training: they may share processors."""

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fftgrad import _axes
from fftgrad._axes import AxisName
from fftgrad.advise._timing import Agree


def agreement(mesh: Mesh | None, axis_name: AxisName) -> Agree:
    """The agreement among the workers of a mesh; of one process alone, there is nobody to ask."""
    if mesh is None or jax.process_count() == 1:
        return float
    workers = _axes.mesh_size(mesh, axis_name)
    greatest = jax.shard_map(
        lambda x: lax.pmax(x, axis_name), mesh=mesh, in_specs=P(axis_name), out_specs=P(),
        check_vma=False,
    )  # fmt: skip
    program = jax.jit(greatest)

    def agree(value: float) -> float:
        return float(program(full(mesh, axis_name, workers, value)).addressable_shards[0].data[0])

    return agree


def full(mesh: Mesh, axis_name: AxisName, size: int, value: float) -> jax.Array:
    """A vector of one value, cut along the axis; each process makes its own part."""
    return jax.make_array_from_callback(
        (size,),
        NamedSharding(mesh, P(axis_name)),
        lambda index: np.full(size, value, np.float32)[index],
    )
