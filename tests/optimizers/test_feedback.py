"""Momentum and error feedback: how far a late gradient may be trusted, and how fast feedback is."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from parallel import AXIS, everywhere
from stepwise import run

import fftgrad as fg

DENSE = fg.AllReduce()


def of_workers(transformation):
    """The update of one worker of two that are alike."""
    return jax.vmap(transformation.update, axis_name=AXIS, axis_size=2)


def started(transformation, like):
    return jax.jit(jax.vmap(transformation.init))(both(like))


def both(tree):
    return jax.tree.map(lambda a: np.stack([a, a]), tree)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def zeros(shapes):
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


# Muon


def test_a_muon_that_leads_is_muon_and_a_normalized_gradient():
    """Without compression, on matrices, a vector, a stack, and heads of attention."""
    shapes = {"w": (6, 4), "b": (4,), "c": (2, 3, 4), "query": (6, 2, 3), "out": (2, 3, 6)}
    axes = optax.contrib.MuonDimensionNumbers
    numbers = {"w": axes(), "b": None, "c": axes(1, 2), "query": axes(0, (1, 2))}
    numbers["out"] = axes((0, 1), 2)
    own = {"beta": 0.8, "eps": 1e-2, "muon_weight_dimension_numbers": numbers}
    plain = optax.contrib.muon(
        0.1, **own, nesterov=False, adam_b1=0.7, adam_b2=0.95, consistent_rms=0.2
    )
    tx = fg.optimizers.feedback_muon(0.1, DENSE, lead=0.3, b1=0.7, b2=0.95, **own, axis_name=AXIS)
    like = zeros(shapes)
    alone, square, exact = jax.jit(plain.init)(like), like, jax.jit(plain.update)
    grads = {n: np.stack([normal(count, *s) for count in (1, 2, 3)]) for n, s in shapes.items()}
    moves, _ = run(tx, jax.tree.map(lambda g: np.stack([g, g], axis=1), grads))
    for count in range(1, 4):
        g = {n: leaf[count - 1] for n, leaf in grads.items()}
        expected, alone = exact(g, alone, like)
        square = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, square, g)
        for name, move in expected.items():
            root = np.sqrt(square[name] / (1 - 0.95**count)) + 1e-2
            wanted = np.asarray(move) - 0.03 * g[name] / root
            np.testing.assert_allclose(moves[name][count - 1, 0], wanted, rtol=2e-4)


def test_muon_takes_narrow_and_empty_leaves_and_keeps_their_types():
    shapes = {"a": ((6, 4), "float32"), "b": ((4, 6), "bfloat16"), "c": ((0, 5), "float32")}
    like = {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}
    tx = fg.optimizers.feedback_muon(0.1, DENSE, memory=fg.NoMemory(), axis_name=AXIS)
    rows = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype), like)
    run = jax.vmap(lambda g: optax.apply_updates(g, tx.update(g, tx.init(g), g)[0]), axis_name=AXIS)
    assert jax.eval_shape(run, rows) == rows
    moves = jax.vmap(lambda g: tx.update(g, tx.init(g), g)[0], axis_name=AXIS)
    assert jax.eval_shape(moves, rows)["b"].dtype == jnp.bfloat16


def test_muon_has_what_only_sounds_like_a_position_or_a_head():
    matrices = ("positionwise_feed_forward/w1", "position_wise_ffn", "multi_head/proj")
    others = ("lm_head", "decoder/position", "abs_pos", "head_0")
    params = {name: {"kernel": np.ones((4, 4))} for name in (*matrices, *others)}
    found = fg.optimizers.muon_dimensions(params)
    assert {name for name in params if found[name]["kernel"] is not None} == set(matrices)


WHOLE = {"feedback_adam": fg.optimizers.feedback_adam, "feedback_muon": fg.optimizers.feedback_muon}


@pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE)
def test_weights_decay_as_those_of_adamw(make):
    """By the rate of each step, and only where they are to."""
    like = {"w": np.full((3, 2), 2.0, np.float32), "b": np.full(3, 2.0, np.float32)}
    rate = optax.linear_schedule(0.1, 0.3, 2)
    mask = {"w": True, "b": False}
    plain, decaying = (
        make(rate, DENSE, axis_name=AXIS, **options)
        for options in ({}, {"weight_decay": 0.5, "mask": mask})
    )
    g = jax.tree.map(lambda a: np.ones((2, *a.shape), np.float32), like)
    one, other = started(plain, like), started(decaying, like)
    updates = [jax.jit(of_workers(tx)) for tx in (plain, decaying)]
    for lr in (0.1, 0.2, 0.3):
        expected, one = updates[0](g, one, both(like))
        moves, other = updates[1](g, other, both(like))
        wanted = np.asarray(expected["w"]) - lr * 0.5 * 2.0
        np.testing.assert_allclose(moves["w"], wanted, rtol=1e-5)
        np.testing.assert_array_equal(moves["b"], expected["b"])


def test_workers_that_share_the_matrices_move_as_those_that_make_all():
    shapes = {"a": (4, 6), "b": (6, 4), "c": (4, 6), "heads": (4, 2, 3), "stack": (3, 4, 8)}
    own = optax.contrib.MuonDimensionNumbers
    shapes |= {"turned": (3, 2, 4), "wide": (4, 8)}  # after the stack, which has three of its shape
    shapes |= {"one": (1, 1), "prime": (7, 5)}
    numbers = {"a": own(), "b": own(), "c": own(), "heads": own(0, (1, 2)), "stack": own(1, 2)}
    numbers |= {"turned": own(2, (0, 1)), "wide": own(), "one": own(), "prime": own()}
    mean = {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    mean |= {"embed": normal(7, 4, 6), "bias": normal(8, 3)}
    numbers |= {"embed": None, "bias": None}

    def moves(**share):
        tx = fg.optimizers.feedback_muon(
            0.1, DENSE, muon_weight_dimension_numbers=numbers, axis_name=AXIS, **share
        )
        update = lambda g: tx.update(g, tx.init(mean), mean)[0]  # noqa: E731
        return jax.tree.map(np.asarray, everywhere("shard_map", update, 2)(both(mean)))

    whole, shared = moves(), moves(share_axis=AXIS)
    for name in mean:  # bfloat16 has 8 bits
        np.testing.assert_array_equal(shared[name][0], shared[name][1])
        longest = np.abs(whole[name]).max()
        np.testing.assert_allclose(shared[name], whole[name], rtol=0, atol=2**-8 * longest)
    np.testing.assert_array_equal(shared["embed"], whole["embed"])


@pytest.mark.parametrize("name", WHOLE)
def test_numbers_may_be_injected(name):
    """As into optax's own optimizers, and so may the decay of weights, which begins at zero."""
    make, like = WHOLE[name], np.ones((3, 2), np.float32)
    plain = make(0.1, exchange=DENSE, axis_name=AXIS)
    tx = optax.inject_hyperparams(make)(0.1, exchange=DENSE, axis_name=AXIS)
    one, other, params = started(plain, like), started(tx, like), both(like)
    update, injected = jax.jit(of_workers(plain)), jax.jit(of_workers(tx))
    g = both(normal(0, 3, 2))
    expected, one = update(g, one, params)
    moves, other = injected(g, other, params)
    np.testing.assert_allclose(moves, expected, rtol=1e-5)
    if "weight_decay" in other.hyperparams:
        other.hyperparams["weight_decay"] = np.float32([0.5, 0.5])
        expected, _ = update(g, one, params)
        moves, _ = injected(g, other, params)
        np.testing.assert_allclose(moves, np.asarray(expected) - 0.1 * 0.5, rtol=1e-4)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.tokens = nnx.Embed(9, 4, rngs=rngs)
        self.position = nnx.Param(jnp.ones((5, 4)))
        self.layers = nnx.List([nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)])
        self.norm, self.up = nnx.LayerNorm(4, rngs=rngs), nnx.Linear(4, 6, rngs=rngs)
        self.lm_head = nnx.Linear(6, 9, rngs=rngs)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        position = self.param("pos_embedding", nn.initializers.ones, (5, 4))
        x = nn.MultiHeadDotProductAttention(2)(nn.Embed(9, 4)(tokens) + position[None])
        return nn.Dense(9, name="head")(nn.Dense(6)(nn.LayerNorm()(x)))


class Equinox(eqx.Module):
    tokens: eqx.nn.Embedding
    wpe: jax.Array
    attention: eqx.nn.MultiheadAttention
    mlp: list[eqx.nn.Linear]
    head: eqx.nn.Linear

    def __init__(self, key):
        self.tokens, self.wpe = eqx.nn.Embedding(9, 4, key=key), jnp.ones((5, 4))
        self.attention = eqx.nn.MultiheadAttention(2, 4, key=key)
        self.mlp = [eqx.nn.Linear(4, 6, key=key)]
        self.head = eqx.nn.Linear(6, 9, key=key)


HEADS = dict.fromkeys(("query", "key", "value"), ((0,), (1, 2))) | {"out": ((0, 1), (2,))}
TRANSFORMERS = {
    "nnx": (
        lambda: nnx.state(Nnx(nnx.Rngs(0)), nnx.Param),
        {f"layers/0/{name}/kernel/value": axes for name, axes in HEADS.items()}
        | {"up/kernel/value": (0, 1)},
    ),
    "linen": (
        lambda: Linen().init(jax.random.key(0), jnp.zeros((1, 5), int)),
        {f"params/MultiHeadDotProductAttention_0/{n}/kernel": axes for n, axes in HEADS.items()}
        | {"params/Dense_0/kernel": (0, 1)},
    ),
    "equinox": (
        lambda: eqx.filter(Equinox(jax.random.key(0)), eqx.is_inexact_array),
        {f"attention/{name}_proj/weight": (0, 1) for name in ("query", "key", "value", "output")}
        | {"mlp/0/weight": (0, 1)},
    ),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_muon_has_the_matrices_of_a_transformer(name):
    make, matrices = TRANSFORMERS[name]
    params = jax.eval_shape(make)
    found = jax.tree.leaves_with_path(
        fg.optimizers.muon_dimensions(params),
        is_leaf=lambda node: isinstance(node, optax.contrib.MuonDimensionNumbers),
    )
    path = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    assert {path(place): tuple(axes) for place, axes in found} == matrices


def test_a_step_that_is_skipped_leaves_everything_as_it_was():
    tx = fg.optimizers.feedback_muon(0.1, DENSE, fg.NoMemory(), axis_name=AXIS)
    good = np.stack([both(normal(0, 3, 2))] * 4)
    bad = good.copy()
    bad[1, 0, 0, 0], bad[2, 0, 0, 0] = np.nan, np.inf
    (moves, states), (skipping, skipped) = (run(tx, rows) for rows in (good, bad))
    assert not np.any(skipping[1:3])
    np.testing.assert_array_equal(skipping[3], moves[1])
    for one, other in zip(*map(jax.tree.leaves, (states.inner, skipped.inner)), strict=True):
        np.testing.assert_array_equal(other[3], one[1])


def test_a_piece_of_a_matrix_is_refused():
    tx = fg.optimizers.feedback_muon(0.1, DENSE, axis_name=AXIS)
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), (AXIS, "model"), auto, devices=jax.devices()[:4])
    spec = jax.P(AXIS, "model")

    def step(g):
        return tx.update(g, tx.init(g))[0]

    with pytest.raises(
        ValueError, match=r"whole on each worker, got a gradient  ?that varies over"
    ):
        jax.eval_shape(
            jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec), np.ones((4, 4))
        )


def test_an_exchange_with_a_memory_of_its_own_gets_no_other():
    """What it keeps would be kept twice."""
    codec = fg.AllGather(fg.TopK(0.1))
    within = fg.Hierarchical("fast", 2, slow=codec, memory=fg.ErrorFeedback())
    tx = fg.optimizers.feedback_adam(0.1, within, axis_name=("slow", "fast"))
    state = jax.eval_shape(tx.init, np.zeros(8))
    assert not jax.tree.leaves(state.pmean.memory)


@pytest.mark.parametrize("name", WHOLE)
def test_zeros_single_values_and_prime_lengths_at_the_defaults(name):
    """Zeros move nothing; ones move what is sent of them downwards, and nothing upwards."""
    tx = WHOLE[name](0.1)
    like = zeros({"one": (1,), "dot": (1, 1), "prime": (7,)})
    moves, _ = run(tx, jax.tree.map(lambda a: np.stack([both(a), both(a + 1)]), like))
    for move in jax.tree.leaves(moves):
        assert np.isfinite(move).all()
        assert (move <= 0).all()
        assert not move[0].any()
    assert any(move[1].any() for move in jax.tree.leaves(moves))
