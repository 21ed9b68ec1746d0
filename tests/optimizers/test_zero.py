"""A sharded optimizer beside other axes, and with odd leaves and states."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import gradients, values
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from parallel import AXIS, mesh_of, same

import fftgrad as fg

LOSSLESS = {"gradients": fg.codecs.Identity(), "parameters": fg.codecs.Identity()}
EIGHT = fg.UniformQuantizer(bits=8, bucket=256, norm="max")
ODD = {
    "w": values((5, 3)),
    "scalar": np.float32(2.0),
    "none": np.zeros((0, 4), np.float32),
    "narrow": values((9,), seed=1).astype("bfloat16"),
}


def trained(tx, params, mesh, axes=AXIS, steps=4, state=None, **options):
    """Parameters and state after some steps on gradients that differ by worker."""

    def step(params, state, rows):
        return apply(tx, jax.tree.map(lambda r: r[0], rows), params, state)

    program = fg.data_parallel(step, mesh, axes, **options)
    state = fg.init_state(tx, params, mesh, axes) if state is None else state
    for i in range(steps):
        params, state = program(params, state, of_step(params, mesh.size, i))
    return params, state


def of_step(params, workers, number):
    rows = gradients(params, workers, seed=number)
    return jax.tree.map(lambda g, p: np.asarray(g).astype(p.dtype), rows, params)


def apply(tx, grads, params, state):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


INNER = optax.sgd(optax.constant_schedule(0.01), 0.9)
alone = jax.jit(functools.partial(apply, INNER))
"""A step of the inner optimizer on whole gradients."""


# Leaves, workers and ways to run it


@pytest.mark.parametrize(
    ("shape", "axes", "options"),
    [
        ((8,), AXIS, {"donate_argnums": (0, 1)}),
        ((2, 4), ("slow", "fast"), {"check_vma": False}),
        ((1,), AXIS, {}),
    ],
    ids=["donated", "two axes, unchecked", "one worker"],
)
def test_leaves_of_any_size_are_updated_as_by_the_inner_optimizer(shape, axes, options):
    names = (axes,) if isinstance(axes, str) else axes
    workers = int(np.prod(shape))
    devices = np.array(jax.devices()[:workers]).reshape(shape)
    mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
    tx = fg.optimizers.sharded(INNER, workers, axis_name=axes, **LOSSLESS)
    got, state = trained(tx, ODD, mesh, axes, **options)
    wanted, own = ODD, jax.jit(INNER.init)(ODD)
    for i in range(4):
        rows = of_step(ODD, workers, i)
        mean = {k: g.astype(np.float32).mean(0).astype(g.dtype) for k, g in rows.items()}
        wanted, own = alone(mean, wanted, own)
    assert jax.tree.structure(got) == jax.tree.structure(ODD)
    for name, leaf in got.items():
        assert (leaf.shape, leaf.dtype) == (ODD[name].shape, ODD[name].dtype)
        assert len({np.asarray(s.data).tobytes() for s in leaf.addressable_shards}) == 1
        tolerance = 1e-5 if leaf.dtype == jnp.float32 else 0.02
        one, other = (np.asarray(a).astype(np.float32) for a in (leaf, wanted[name]))
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
    assert int(state.skipped) == 0


@pytest.mark.parametrize("parameters", [None, EIGHT])
def test_arrays_without_a_value_are_gathered_and_scattered(parameters):
    gather = functools.partial(
        fg.optimizers.gather_parameters, parameters=parameters, dimension=1, step=0
    )

    def run(shard):
        whole, back = jax.vjp(lambda x: gather(x, AXIS), shard)
        return whole, *back(whole)

    whole, shard = jax.jit(jax.vmap(run, axis_name=AXIS))(np.zeros((4, 0, 2)))
    assert (whole.shape, shard.shape) == ((4, 0, 8), (4, 0, 2))


# The state


@pytest.mark.full
def test_with_other_workers_only_the_shards_start_anew():
    tx = {
        n: fg.optimizers.sharded(optax.sgd(0.01, 0.9), n, memory=fg.ErrorFeedback()) for n in (4, 2)
    }
    params, state = trained(tx[4], ODD, mesh_of(4), steps=2)
    fresh = fg.init_state(tx[2], params, mesh_of(2), AXIS)
    with pytest.raises(ValueError, match="must have the leaves of the new state"):
        fg.checkpoint.reshard_state(state, fresh)
    with pytest.warns(RuntimeWarning, match="missing='zero'"):
        new = fg.checkpoint.reshard_state(state, fresh, missing="zero").state
    assert same((new.inner, new.ahead), (fresh.inner, fresh.ahead))
    old, kept = (np.asarray(s.memory.worker_rows.residual["w"]) for s in (state, new))
    np.testing.assert_allclose(kept.mean(0), old.mean(0), rtol=1e-5, atol=1e-6)
    _, state = trained(tx[2], ODD, mesh_of(2), steps=1, state=new)
    assert int(state.skipped) == 0


# Beside a model axis

SHARDED = {"up": P(None, "model"), "down": P("model")}


WIDE = {"up": values((6, 8)), "down": values((8, 5), seed=1)}
X = values((16, 6), seed=2)


def model_loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)


def shards_loss(params, x):
    out = jnp.tanh(x @ params["up"]) @ params["down"]
    return jnp.mean(jax.lax.psum(out, "model") ** 2)


@pytest.mark.parametrize("manual", [("data", "model"), ("data",)], ids=["both", "data alone"])
def test_beside_a_model_axis_it_is_the_inner_optimizer(manual):
    """On 4 x 2 workers; what is not finite in one shard is skipped by all."""
    mesh = Mesh(
        np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2
    )
    tx = fg.optimizers.sharded(INNER, 4, **LOSSLESS)
    loss = shards_loss if "model" in manual else model_loss

    def step(params, state, x):
        _, grads = fg.value_and_grad(loss, "data")(params, x)
        return apply(tx, grads, params, state)

    def placed(params):
        return jax.device_put(params, {k: NamedSharding(mesh, s) for k, s in SHARDED.items()})

    params = placed(WIDE)
    state = fg.init_state(tx, params, mesh, "data", SHARDED if "model" in manual else None)
    if "model" in manual:
        run = fg.data_parallel(step, mesh, "data", param_specs=SHARDED)
    else:
        specs = fg.state_specs(state, "data")
        run = jax.jit(jax.shard_map(
            step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs),
            axis_names=set(manual),
        ))  # fmt: skip
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    exact, own = WIDE, jax.jit(INNER.init)(WIDE)
    by_hand = jax.jit(lambda p, s: apply(INNER, jax.grad(model_loss)(p, X), p, s))
    for i in range(6):
        if i == 3:
            bad = {**WIDE, "up": WIDE["up"].copy()}
            bad["up"][0, 7] = np.nan
            _, state = run(placed(bad), state, x)
        params, state = run(params, state, x)
        exact, own = by_hand(exact, own)
    for name, leaf in params.items():
        np.testing.assert_allclose(leaf, exact[name], rtol=1e-4, atol=1e-5)
    assert (int(state.step), int(state.skipped)) == (7, 1)
    assert set(np.asarray(state.inner.worker_rows.reset_rows[1].count).tolist()) == {6}
