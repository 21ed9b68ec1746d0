"""Gradients that JAX has yet to sum, under plain jit on an Explicit mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import fftgrad as fg

WORKERS, MICROBATCHES = 4, 3
REPLICATED = P()
TOP_K = fg.AllGather(fg.chain(fg.TopK(fraction=0.1), fg.LogQuantizer(bits=8)))


def mesh_of(*shape):
    names = ("data", "model")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Explicit,) * len(shape))


PARAMS = {
    "up": np.linspace(-1, 1, 160, dtype=np.float32).reshape(40, 4),
    "gate": np.cos(np.arange(160, dtype=np.float32)).reshape(40, 4),
}


def loss(params, x):
    return jnp.mean(jnp.sin(x @ params["up"]) * jnp.tanh(x @ params["gate"]))


def whole(x):
    """The gradient of the mean over all microbatches, by plain JAX."""
    mean = jax.jit(jax.grad(lambda p, x: jnp.mean(jnp.stack([loss(p, part) for part in x]))))
    return jax.device_get(mean(PARAMS, np.asarray(x)))


def accumulated(params, x, spec=REPLICATED):
    """The gradient as MaxText takes it: parameters typed as reduced, a scan over microbatches."""
    reduced = reshard(params, P(*spec, reduced={"data"}))

    def body(total, part):
        return jax.tree.map(jnp.add, total, grad(reduced, part)), None

    grad = jax.grad(lambda params, part: loss(params, part) / len(x))
    total, _ = jax.lax.scan(body, grad(reduced, x[0]), x[1:])
    return total


def made(tx, mesh, spec=REPLICATED):
    specs = jax.tree.map(lambda _: spec, PARAMS)
    params = PARAMS
    state = fg.init_state(tx, params, mesh, "data", specs)
    x = np.random.default_rng(0).normal(size=(MICROBATCHES, 32, 40)).astype(np.float32)
    params = jax.device_put(params, NamedSharding(mesh, spec))
    return params, state, jax.device_put(x, NamedSharding(mesh, P(None, "data")))


ROWS = {
    "dense": (fg.AllReduce(), (WORKERS,), P()),
    "top-k": (TOP_K, (WORKERS,), P()),
    "beside a model axis": (TOP_K, (WORKERS, 2), P(None, "model")),
}


@pytest.mark.parametrize(("exchange", "shape", "spec"), ROWS.values(), ids=ROWS)
def test_one_exchange_for_all_microbatches(exchange, shape, spec):
    """Of each shard of a parameter on its own; nothing is sent in the loop over microbatches."""
    mesh = mesh_of(*shape)
    tx = fg.compressed_pmean(exchange, fg.ErrorFeedback(), axis_name="data")
    with jax.set_mesh(mesh):
        params, state, x = made(tx, mesh, spec)
        step = jax.jit(lambda p, s, x: tx.update(accumulated(p, x, spec), s, p))
        compiled = step.lower(params, state, x).compile()
        mean, after = compiled(params, state, x)
        step(params, after, x)
    shard = {
        name: jax.ShapeDtypeStruct((40, 4 * WORKERS // mesh.size), "float32") for name in PARAMS
    }
    kinds = {"all-gather"} if len(shape) == 2 else {row.kind for row in fg.audit(compiled)}
    sent = sum(row.bytes for row in fg.audit(compiled) if row.kind in kinds)
    assert sent == fg.wire_bytes(exchange, shard)
    residual = after.memory.worker_rows.residual
    assert residual["up"].sharding.spec[0] == "data"
    for name, right in whole(x).items():
        assert mean[name].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
        told = np.asarray(residual[name]).mean(0) + np.asarray(mean[name])
        np.testing.assert_allclose(told, right, rtol=2e-5, atol=2e-7)


def test_a_weight_is_refused():
    """The loss is one over the whole batch, and has its weights in it."""
    mesh = mesh_of(WORKERS)
    tx = fg.compressed_pmean(fg.AllReduce(), axis_name="data")
    step = lambda p, s, x: tx.update(accumulated(p, x), s, p, weight=1.0)  # noqa: E731
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="in the loss"):
        jax.eval_shape(step, *made(tx, mesh))


def test_one_that_is_summed_already_is_refused():
    mesh = mesh_of(WORKERS)
    tx = fg.compressed_pmean(fg.AllReduce(), axis_name="data")

    def step(params, state, x):
        grads = accumulated(params, x) | {"up": reshard(accumulated(params, x)["up"], P())}
        return tx.update(grads, state, params)

    with jax.set_mesh(mesh):
        args = made(tx, mesh)
        with pytest.raises(ValueError, match=r"\['up'\].*summed already.*jax\.P\(reduced"):
            jax.eval_shape(step, *args)
