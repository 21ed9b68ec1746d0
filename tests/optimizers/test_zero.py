"""A sharded optimizer beside other axes, with odd leaves and states, and of a language model."""

import functools
import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import gradients, values
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from parallel import AXIS, mesh_of

import fftgrad as fg

LOSSLESS = {"gradients": fg.Identity(), "parameters": fg.Identity()}
EIGHT = fg.UniformQuantizer(bits=8, bucket=256, norm="max")
FOUR = fg.chain(fg.Hadamard(block=256), fg.UniformQuantizer(bits=4, bucket=256, norm="max"))
ODD = {
    "w": jnp.asarray(values((5, 3))),
    "scalar": jnp.float32(2.0),
    "none": jnp.zeros((0, 4)),
    "narrow": jnp.asarray(values((9,), seed=1)).astype("bfloat16"),
}


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@functools.cache
def compiled(tx, mesh, axes, options):
    """A step of all workers on their gradients."""

    def step(params, state, rows):
        return apply(tx, jax.tree.map(lambda r: r[0], rows), params, state)

    return fg.data_parallel(step, mesh, axes, **dict(options))


def trained(tx, params, mesh, axes=AXIS, steps=4, change=None, **options):
    """Parameters and state after some steps on gradients that differ by worker."""
    program = compiled(tx, mesh, axes, tuple(sorted(options.items())))
    params = jax.tree.map(jnp.copy, params)
    state = fg.init_state(tx, params, mesh, axes)
    for i in range(steps):
        if i == 2 and change is not None:
            state = change(state)
        rows = gradients(params, mesh.size, seed=i)
        rows = jax.tree.map(lambda g, p: g.astype(p.dtype), rows, params)
        params, state = program(params, state, rows)
    return params, state


def apply(tx, grads, params, state):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


# Leaves, workers and ways to run it


@pytest.mark.parametrize(
    ("shape", "axes", "options"),
    [
        ((8,), AXIS, {}),
        ((8,), AXIS, {"check_vma": False}),
        ((8,), AXIS, {"donate_argnums": (0, 1)}),
        ((2, 4), ("slow", "fast"), {}),
        ((1,), AXIS, {}),
    ],
    ids=["checked", "unchecked", "donated", "two axes", "one worker"],
)
def test_leaves_of_any_size_are_updated_as_by_the_inner_optimizer(shape, axes, options):
    names = (axes,) if isinstance(axes, str) else axes
    workers = int(np.prod(shape))
    devices = np.array(jax.devices()[:workers]).reshape(shape)
    mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
    inner = optax.adamw(0.01)
    tx = fg.optimizers.sharded(inner, workers, axis_name=axes, **LOSSLESS)
    got, state = trained(tx, ODD, mesh, axes, **options)
    dense = optax.chain(fg.compressed_pmean(fg.AllReduce(), axis_name=axes), inner)
    wanted, _ = trained(dense, ODD, mesh, axes)
    assert jax.tree.structure(got) == jax.tree.structure(ODD)
    for name, leaf in got.items():
        assert (leaf.shape, leaf.dtype) == (ODD[name].shape, ODD[name].dtype)
        assert len({np.asarray(s.data).tobytes() for s in leaf.addressable_shards}) == 1
        tolerance = 1e-5 if leaf.dtype == jnp.float32 else 0.02
        np.testing.assert_allclose(
            leaf.astype("float32"), wanted[name].astype("float32"), rtol=tolerance, atol=tolerance
        )
    assert int(state.skipped) == 0


def test_arrays_without_a_value_go_through_the_collectives():
    x = jnp.zeros((4, 0, 3))
    scatter = jax.vmap(lambda x: fg.optimizers.compressed_psum_scatter(x, AXIS), axis_name=AXIS)
    gather = jax.vmap(lambda x: fg.optimizers.compressed_all_gather(x, AXIS), axis_name=AXIS)
    out = scatter(x)
    assert out.shard.shape == out.sent.shape == gather(x).shape == (4, 0, 3)
    scatter = fg.optimizers.compressed_psum_scatter
    whole = jax.vmap(lambda x: scatter(x, AXIS, scatter_dimension=1).shard,
                     axis_name=AXIS)(jnp.zeros((4, 0, 8)))  # fmt: skip
    assert whole.shape == (4, 0, 2)


# The state


def test_with_other_workers_only_the_shards_start_anew():
    tx = {n: fg.optimizers.sharded(optax.adam(0.01), n, memory=fg.ErrorFeedback()) for n in (4, 2)}
    params, state = trained(tx[4], ODD, mesh_of(4))
    fresh = fg.init_state(tx[2], params, mesh_of(2), AXIS)
    with pytest.raises(ValueError, match="must have the leaves of the new state"):
        fg.checkpoint.reshard_state(state, fresh)
    with pytest.warns(RuntimeWarning, match="missing='zero'"):
        new = fg.checkpoint.reshard_state(state, fresh, missing="zero").state
    assert bits((new.inner, new.ahead)) == bits((fresh.inner, fresh.ahead))
    old, kept = (np.asarray(s.memory.worker_rows.residual["w"]) for s in (state, new))
    np.testing.assert_allclose(kept.mean(0), old.mean(0), rtol=1e-5, atol=1e-6)
    _, state = trained(tx[2], ODD, mesh_of(2), change=lambda _: new)
    assert int(state.skipped) == 0


# Beside a model axis

SHARDED = {"up": P(None, "model"), "down": P("model")}


def wide():
    return {"up": jnp.asarray(values((6, 8))), "down": jnp.asarray(values((8, 5), seed=1))}


def model_loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)


def shards_loss(params, x):
    out = jnp.tanh(x @ params["up"]) @ params["down"]
    return jnp.mean(jax.lax.psum(out, "model") ** 2)


def on_a_model_axis(tx, manual=("data", "model"), spoil=None):
    """Parameters and state after six steps of the same batch on 4 × 2 workers."""
    mesh = Mesh(
        np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2
    )
    loss = shards_loss if "model" in manual else model_loss

    def step(params, state, x):
        _, grads = fg.value_and_grad(loss, "data")(params, x)
        return apply(tx, grads, params, state)

    place = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SHARDED)
    params = jax.device_put(wide(), place)
    state = fg.init_state(tx, params, mesh, "data", SHARDED if "model" in manual else None)
    if "model" in manual:
        run = fg.data_parallel(step, mesh, "data", param_specs=SHARDED)
    else:
        specs = fg.state_specs(state, "data")
        run = jax.jit(jax.shard_map(
            step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs),
            axis_names=set(manual),
        ))  # fmt: skip
    x = jax.device_put(jnp.asarray(values((16, 6), seed=2)), NamedSharding(mesh, P("data")))
    for i in range(6):
        if i == spoil:
            bad = {**params, "up": params["up"].at[0, 7].set(jnp.nan)}
            _, state = run(jax.device_put(bad, place), state, x)
            continue
        params, state = run(params, state, x)
    return params, state


@pytest.mark.parametrize("manual", [("data", "model"), ("data",)], ids=["both", "data alone"])
def test_beside_a_model_axis_it_is_the_inner_optimizer(manual):
    inner = optax.adam(0.01)
    got, state = on_a_model_axis(fg.optimizers.sharded(inner, 4, **LOSSLESS), manual)
    params, x = wide(), jnp.asarray(values((16, 6), seed=2))
    own = inner.init(params)
    for _ in range(6):
        params, own = apply(inner, jax.grad(model_loss)(params, x), params, own)
    for name, leaf in got.items():
        np.testing.assert_allclose(leaf, params[name], rtol=1e-4, atol=1e-5)
    assert int(state.skipped) == 0


def test_what_is_not_finite_in_one_shard_is_skipped_by_all():
    tx = fg.optimizers.sharded(optax.adam(0.01), 4)
    params, state = on_a_model_axis(tx, spoil=3)
    assert (int(state.step), int(state.skipped)) == (6, 1)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    counts = np.asarray(state.inner.value.worker_rows[0].count)
    assert counts.tolist() == [5] * 8


# Bytes

LIKE = {
    "embed": jax.ShapeDtypeStruct((128, 64), jnp.float32),
    "mlp": jax.ShapeDtypeStruct((64, 256), jnp.float32),
    "norm": jax.ShapeDtypeStruct((64,), jnp.float32),
}


def predicted(gradients, parameters, workers, like):
    """Bytes of w buffers of the one codec and one of the other, as the docstring has it."""
    both = (
        fg.wire_bytes(fg.TwoStage(codec, workers), like, fg.Bucketing("leaf"))
        for codec in (gradients, parameters)
    )
    one, other = both
    return (workers * one + other) // (workers + 1)


@pytest.mark.parametrize(
    ("codecs", "ratio"),
    [((FOUR, EIGHT), 5.0), ((EIGHT, EIGHT), 3.5), ((FOUR, FOUR), 6.0)],
    ids=["default", "8 bits", "4 bits"],
)
def test_the_compiled_program_sends_what_is_predicted(codecs, ratio):
    workers, (there, back) = 8, codecs
    tx = fg.optimizers.sharded(optax.adam(0.01), workers, gradients=there, parameters=back)
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), LIKE)
    state = fg.init_state(tx, params, mesh_of(workers), AXIS)

    def step(params, state, rows):
        return apply(tx, jax.tree.map(lambda r: r[0], rows), params, state)

    program = fg.data_parallel(step, mesh_of(workers), AXIS)
    found = fg.audit(program.lower(params, state, gradients(LIKE, workers)).compile())
    assert sum(c.bytes for c in found) == predicted(there, back, workers, LIKE)
    exact = fg.link_bytes(fg.AllReduce(), LIKE, workers)
    assert exact > ratio * sum(c.link_bytes(workers) for c in found)


# A language model on eight workers


@functools.cache
def job():
    return runpy.run_path(str(pathlib.Path(__file__).parent.parent.parent / "examples/train_lm.py"))


@functools.cache
def language_model(sharded, steps, width, layers, context):
    """The loss on held-out text, after steps on the same batches."""
    model, (text, held_out) = job()["ByteLM"](width, layers), job()["corpus"]()
    params = model.init(jax.random.key(0), jnp.zeros((1, context), jnp.int32))
    mesh, inner = mesh_of(8), optax.adam(4e-3, b2=0.99)

    def loss(params, batch):
        logits = model.apply(params, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    def whole(shards, count):
        leaves, structure = jax.tree.flatten(shards)
        gathered = [
            fg.optimizers.gather_parameters(leaf, AXIS, parameters=EIGHT, step=count, key=i)
            for i, leaf in enumerate(leaves)
        ]
        return jax.tree.unflatten(structure, gathered)

    def of_shards(shards, state, batch):
        count = state[0].count
        grads = jax.grad(lambda s: loss(whole(s, count), batch) / 8)(shards)
        return apply(inner, grads, shards, state)

    def of_copies(params, state, batch):
        _, grads = fg.value_and_grad(loss, AXIS)(params, batch)
        return apply(tx, grads, params, state)

    if sharded == "parameters":
        state = inner.init(params)
        specs = P(AXIS), (optax.ScaleByAdamState(P(), P(AXIS), P(AXIS)), P())
        train = jax.jit(jax.shard_map(
            of_shards, mesh=mesh, in_specs=(*specs, P(AXIS)), out_specs=specs
        ))  # fmt: skip
    else:
        dense = optax.chain(fg.compressed_pmean(fg.AllReduce(), axis_name=AXIS), inner)
        tx = fg.optimizers.sharded(inner, 8) if sharded else dense
        state = fg.init_state(tx, params, mesh, AXIS)
        train = fg.data_parallel(of_copies, mesh, AXIS)
    rng = np.random.default_rng(0)
    for _ in range(steps):
        params, state = train(params, state, job()["sample"](rng, text, 32, context))
    batch = job()["sample"](np.random.default_rng(1), held_out, 512, context)
    return float(jax.jit(loss)(jax.device_get(params), batch))


SMALL = {"steps": 60, "width": 32, "layers": 1, "context": 32}


@pytest.mark.slow
@pytest.mark.parametrize("sharded", ["parameters", "optimizer"])
@pytest.mark.parametrize(
    "sizes",
    [SMALL, {"steps": 200, "width": 64, "layers": 2, "context": 64}],
    ids=["small", "as in the docs"],
)
def test_a_sharded_language_model_trains_as_the_replicated_one(sharded, sizes):
    replicated, found = language_model(None, **sizes), language_model(sharded, **sizes)
    print(f"replicated {replicated:.4f}, sharded {sharded} {found:.4f}")
    assert replicated < 2.8
    assert abs(found / replicated - 1) < 0.02
