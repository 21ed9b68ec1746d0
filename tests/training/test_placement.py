"""Where the compression stands in the chain, and what then differs between the workers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from parallel import AXIS, mesh_of

import fftgrad as fg

WORKERS = 4
SPARSE = fg.AllGather(fg.chain(fg.TopK(fraction=0.2), fg.RangeFloat(8)))
PLACEMENTS = {
    "before the optimizer": (fg.optimizers.feedback_adam(0.05, SPARSE), {"residual"}),
    "on the momentum: DeMo": (
        optax.chain(
            optax.chain(
                fg.compressed_pmean(fg.methods.demo(k=4, block=8, decay=0.9), axis_name=AXIS),
                optax.scale_by_sign(),
            ),
            optax.scale(-0.02),
        ),
        {"residual"},
    ),
    "on the momentum: 1-bit Adam": (
        optax.chain(fg.methods.scale_by_one_bit_adam(20, WORKERS), optax.scale(-0.02)),
        {"residual"},
    ),
    "on the local update": (
        optax.chain(
            fg.local_state(optax.scale_by_adam(b1=0.0, b2=0.99)),
            fg.compressed_pmean(SPARSE, fg.ErrorFeedback(0.9), axis_name=AXIS),
            optax.scale(-0.02),
        ),
        {"residual", "nu"},
    ),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_parameters_stay_equal_and_only_what_is_said_differs(placement):
    tx, differs = PLACEMENTS[placement]
    target = jnp.linspace(-1.0, 1.0, 40)
    params = {"w": jnp.zeros(40)}
    mesh = mesh_of(WORKERS)
    specs = fg.state_specs(jax.eval_shape(tx.init, params), AXIS)

    def step(rows, state, x):
        own = jax.tree.map(lambda p: p[0], rows)
        grad = jax.grad(lambda p: jnp.mean((x[0] @ (p["w"] - target)) ** 2))(own)
        updates, state = tx.update(grad, state)  # the parameters are copies, in rows
        return jax.tree.map(lambda p: p[None], optax.apply_updates(own, updates)), state

    wrap = functools.partial(jax.shard_map, mesh=mesh)
    state = jax.jit(wrap(tx.init, in_specs=P(), out_specs=specs))(params)
    run = jax.jit(wrap(step, in_specs=(P(AXIS), specs, P(AXIS)), out_specs=(P(AXIS), specs)))
    rows = NamedSharding(mesh, P(AXIS))
    params = jax.device_put({"w": jnp.zeros((WORKERS, 40))}, rows)
    rng = np.random.default_rng(0)
    for _ in range(60):
        x = jax.device_put(rng.standard_normal((WORKERS, 16, 40)).astype(np.float32), rows)
        params, state = run(params, state, x)
    bits = np.asarray(params["w"]).view(np.uint32)
    assert np.all(bits == bits[:1])
    assert float(jnp.max(jnp.abs(params["w"][0] - target))) < 0.5

    found = set()
    for path, spec in jax.tree.leaves_with_path(specs):
        if spec == P(AXIS):
            names = [getattr(entry, "name", "") for entry in path]
            found |= {name for name in names if name in ("residual", "shards", "nu")}
    assert found == differs
    for leaf, spec in zip(jax.tree.leaves(state), jax.tree.leaves(specs), strict=True):
        if spec == P():  # replicated, as typing by axes has proved
            shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
            assert all(shard.tobytes() == shards[0].tobytes() for shard in shards)
