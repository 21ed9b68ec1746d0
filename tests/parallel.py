"""One function on every worker, in each way that JAX has of running it."""

import dataclasses
import functools

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import fftgrad as fg

AXIS = "data"

MODES = ["shard_map", "shard_map unchecked", "pmap", "vmap"]


def mesh_of(workers: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:workers]), (AXIS,), axis_types=(AxisType.Auto,))


def of_size(exchange, workers: int):
    """The exchange for that many workers, if it has to know."""
    if isinstance(exchange, fg.Eigenbasis):
        return dataclasses.replace(exchange, exchange=of_size(exchange.exchange, workers))
    if hasattr(exchange, "workers"):
        return dataclasses.replace(exchange, workers=workers)
    return exchange


def unshard(rows, n: int):
    """The n values of one row a worker, of which the first n % workers rows have one more."""
    longer = n % len(rows)
    whole = [row if i < longer or not longer else row[:-1] for i, row in enumerate(rows)]
    return np.concatenate(whole)


def everywhere(mode: str, function, workers: int):
    """The compiled function from stacked to stacked trees, one row a worker."""
    if mode == "vmap":
        return jax.jit(jax.vmap(function, axis_name=AXIS))
    if mode == "pmap":
        return jax.pmap(function, axis_name=AXIS, devices=jax.devices()[:workers])

    def row(*trees):
        out = function(*jax.tree.map(lambda a: a[0], trees))
        return jax.tree.map(lambda a: a[None], out)

    checked = mode == "shard_map"
    return jax.jit(
        jax.shard_map(
            row, mesh=mesh_of(workers), in_specs=P(AXIS), out_specs=P(AXIS), check_vma=checked
        )
    )


def train_step(tx, workers: int, *, check_vma: bool = True, like=None):
    """`init` and `update` of a transformation under shard_map, compiled, with the state sharded."""
    from fftgrad import state_specs

    mesh = mesh_of(workers)
    specs = state_specs(jax.eval_shape(tx.init, like), AXIS)
    wrap = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)

    def update(rows, state):
        return tx.update(jax.tree.map(lambda g: g[0], rows), state)

    init = jax.jit(wrap(lambda rows: tx.init(rows), in_specs=P(), out_specs=specs))
    return init, jax.jit(wrap(update, in_specs=(P(AXIS), specs), out_specs=(P(), specs)))
