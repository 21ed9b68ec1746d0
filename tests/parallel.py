"""One function on every worker, in each way that JAX has of running it."""

import dataclasses
import functools

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import fftgrad as fg

AXIS, AXES = "data", ("slow", "fast")

MODES = ["shard_map", "shard_map unchecked", "pmap", "vmap"]


def mesh_of(workers: int, kind=AxisType.Auto) -> Mesh:
    return Mesh(np.array(jax.devices()[:workers]), (AXIS,), axis_types=(kind,))


def grid(slow: int, fast: int, names=AXES, kinds=(AxisType.Auto,) * 2) -> Mesh:
    """A mesh of two axes."""
    devices = np.array(jax.devices()[: slow * fast]).reshape(slow, fast)
    return Mesh(devices, names, axis_types=kinds)


def with_model(kinds=(AxisType.Auto,) * 2) -> Mesh:
    """Four workers, each of two devices along a model axis."""
    return grid(4, 2, (AXIS, "model"), kinds)


def two_axes(function):
    """The compiled function of stacked trees, `[slow, fast, ...]`."""
    return jax.jit(jax.vmap(jax.vmap(function, axis_name="fast"), axis_name="slow"))


def zeros(like):
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)


def same(a, b) -> bool:
    """Whether all leaves have the same bits."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def assert_close(a, b) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def flat(tree, axes: int = 0):
    """All values as one vector of float64, behind these axes."""
    leaves = [np.asarray(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([a.reshape(*a.shape[:axes], -1) for a in leaves], axis=axes)


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
    mesh = mesh_of(workers)
    specs = fg.state_specs(jax.eval_shape(tx.init, like), AXIS)
    wrap = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)

    def update(rows, state):
        return tx.update(jax.tree.map(lambda g: g[0], rows), state)

    init = jax.jit(wrap(lambda rows: tx.init(rows), in_specs=P(), out_specs=specs))
    return init, jax.jit(wrap(update, in_specs=(P(AXIS), specs), out_specs=(P(), specs)))
