"""An exchange on a row for each worker, sharded over a mesh, and the rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from fftgrad._contracts import AxisName, Exchange, PyTree, Reduced, State, Tally
from fftgrad.exchanges._shards import add_rows, drop_rows
from fftgrad.testing import _laws

USUAL = "related values"


def sharded_over(
    exchange: Exchange,
    one: Callable[..., Reduced],
    like: PyTree,
    mesh: Mesh,
    axis: AxisName,
) -> tuple[Callable[[], PyTree], Callable[..., Reduced]]:
    """`init` and one step under `shard_map`, on global arrays with a row a worker."""
    rows, shared = PartitionSpec(axis), PartitionSpec()
    specs = State(shared, rows, rows)
    out_specs: Any = (rows, rows, specs, rows)

    def row(x: PyTree, state: State, number: jax.Array) -> Any:
        own, state = jax.tree.map(lambda a: a[0], x), drop_rows(state)
        out = one(own, state, number)
        tally = Tally.of_all([out.tally])
        mean, error, tally = jax.tree.map(lambda a: a[None], (out.mean, out.error, tally))
        return mean, error, add_rows(out.state), tally

    init = jax.shard_map(
        lambda: add_rows(exchange.init(like)), mesh=mesh, in_specs=(), out_specs=specs
    )
    run = jax.shard_map(row, mesh=mesh, in_specs=(rows, specs, shared), out_specs=out_specs)
    return init, lambda *args: Reduced(*run(*args))


def inputs_of(like: PyTree, workers: int, step: int) -> dict[str, PyTree]:
    """Rows of values by what they are called in an error."""
    seeds = range(step * (workers + 1), (step + 1) * (workers + 1))
    trees = [_laws.tree_of(like, seed) for seed in seeds]
    own = jax.tree.map(lambda *rows: jnp.stack(rows), *trees[:workers])
    common = jax.tree.map(lambda a: a[None], trees[workers])
    related = jax.tree.map(lambda a, b: a + jnp.broadcast_to(b, a.shape), own, common)
    out = {"unrelated values": own, USUAL: related}
    for name, scale in {"zeros": 0.0, "huge values": 1e35, "tiny values": 1e-30}.items():
        out[name] = jax.tree.map(lambda a, s=scale: a / 10 * s, own)
    return out
