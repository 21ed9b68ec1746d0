"""Gossip with neighbors: the papers, the mean, what goes wrong, and the bytes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_gossip as oracles
from cases import values
from jax.sharding import PartitionSpec as P
from parallel import AXIS, everywhere, mesh_of

import fftgrad as fg
from fftgrad.contrib import _links
from fftgrad.exchanges._bucketing import Bucketing

WORKERS, N = 8, 24
K = 5
TOP = fg.TopK(k=K)
RING = fg.contrib.gossip.ring(WORKERS)


def least_squares(seed=0, workers=WORKERS, n=N, rows=40):
    """H_i and c_i of f_i(x) = x'H_i x / 2 - c_i'x: another optimum on each worker, float64."""
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((workers, rows, n))
    target = rng.standard_normal(n) + rng.standard_normal((workers, n))
    b = np.einsum("wri,wi->wr", a, target)
    h = np.einsum("wri,wrj->wij", a, a) / rows
    return h, np.einsum("wri,wr->wi", a, b) / rows


H, C = least_squares()


def gradient(x, h=H, c=C):
    return np.einsum("wij,wj->wi", h, x) - c


def loss_gradient(x, h, c):
    return jnp.dot(h, x, precision="highest") - c


@functools.cache
def stepping(tx, gradient):
    """The first state and a step of all workers."""

    def one(x, state, *own):
        moves, state = tx.update(gradient(x, *own), state, x)
        return x + moves, state

    return jax.jit(jax.vmap(tx.init)), jax.jit(jax.vmap(one, axis_name=AXIS))


def simulated(tx, x, gradient, inputs, watch=None):
    """The parameters of all workers, in rows, after one step for each of the inputs; the state."""
    init, run = stepping(tx, gradient)
    state = init(np.zeros_like(x))
    for t, own in enumerate(inputs):
        x, state = run(x, state, *own)
        if watch is not None:
            watch(t, np.asarray(x), jax.device_get(state))
    return jax.device_get((x, state))


def trained(tx, steps, h=H, c=C, watch=None):
    own = h.astype(np.float32), c.astype(np.float32)
    return simulated(tx, np.zeros(c.shape, np.float32), loss_gradient, [own] * steps, watch)


MATRICES = {
    "ring": (RING, oracles.ring(WORKERS)),
    "torus": (fg.contrib.gossip.torus(2, 4), oracles.torus(2, 4)),
    "a matrix": (oracles.exponential(WORKERS),) * 2,
}
COMPRESS = {
    "top-k": (TOP, lambda x: oracles.top_k(x, K)),
    "sign": (fg.Sign(), oracles.sign),
}


# Graphs


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8, 16])
def test_weights_are_those_of_the_definition(workers):
    np.testing.assert_allclose(fg.contrib.gossip.ring(workers), oracles.ring(workers))
    for rows in (r for r in range(1, workers + 1) if workers % r == 0):
        found = fg.contrib.gossip.torus(rows, workers // rows)
        np.testing.assert_allclose(found, oracles.torus(rows, workers // rows), atol=1e-12)


PATH = np.diag([2 / 3, 1 / 3, 1 / 3, 2 / 3]) + np.eye(4, k=1) / 3 + np.eye(4, k=-1) / 3
UNEQUAL = np.array([[0.5, 0.3, 0.2], [0.3, 0.6, 0.1], [0.2, 0.1, 0.7]])


@pytest.mark.parametrize(
    ("weights", "buffers"),
    [
        *((fg.contrib.gossip.ring(w), n) for w, n in ((1, 0), (2, 1), (3, 2), (64, 2))),
        *((oracles.exponential(w), n) for w, n in ((8, 5), (16, 7), (64, 11))),
        *((fg.contrib.gossip.torus(*grid), n) for grid, n in (((2, 4), 3), ((3, 3), 4))),
        (PATH, 2),
        (UNEQUAL, 2),
    ],
)
def test_weights_are_sums_of_few_permutations(weights, buffers):
    graph = _links.graph_of("choco_sgd", weights)
    workers = len(weights)
    assert len(graph.sources) == buffers
    found = np.zeros((workers, workers))
    for heard, shares in zip(graph.sources, graph.shares, strict=True):
        assert sorted(heard) == list(range(workers))
        found[np.arange(workers), list(heard)] += shares * graph.largest
    np.testing.assert_allclose(found, weights * (1 - np.eye(workers)), atol=1e-7)


def test_weights_that_would_lose_the_mean_are_refused():
    rotated, short, negative = np.eye(3)[[1, 2, 0]], np.full((3, 3), 0.3), np.eye(2) * 2 - 0.5
    for weights in (rotated, short, negative, np.full((2, 3), 0.5), np.zeros((0, 0))):
        with pytest.raises(ValueError, match=r"\(weights\): .*symmetric.*use gossip\.ring"):
            fg.contrib.gossip.choco_sgd(optax.sgd(0.1), TOP, weights, gamma=0.5)


# The papers


@pytest.mark.parametrize("make", ["choco_sgd", "beer"])
@pytest.mark.parametrize(
    ("graph", "codec"), [("ring", "sign"), ("torus", "top-k"), ("a matrix", "top-k")]
)
def test_thirty_steps_are_the_papers(make, graph, codec):
    (mine, w), (compressor, compress) = MATRICES[graph], COMPRESS[codec]
    oracle, momentum = (oracles.Beer, {}) if make == "beer" else (oracles.Choco, {"momentum": 0.5})
    oracle = oracle(np.zeros((WORKERS, N)), w, 0.3, 0.05, compress)
    inner = optax.sgd(0.05, **momentum)
    tx = getattr(fg.contrib.gossip, make)(inner, compressor, mine, gamma=0.3)
    x, state = trained(tx, 30)
    for _ in range(30):
        oracle.step(gradient, **momentum)
    trees = state.neighbors.worker_rows.reset_rows.trees
    found = [x, *(tree.copy[:, 0] for tree in trees)]
    if make == "beer":
        wanted = [oracle.x, oracle.g, oracle.h, oracle.v]
        found.append(state.estimate.worker_rows.of_all[:, 0])
    else:
        own = np.stack([oracle.copies[i][i] for i in range(WORKERS)])
        wanted = [oracle.x, own, w @ own - own]
        found.append(trees[0].pull[:, 0] * mine[0].max())
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


# Gossip


ROWS = values((WORKERS, 30), seed=4)


def alone(codec, graph, rounds, x, gamma):
    """Gossip without gradients."""
    tx = fg.contrib.gossip.choco_sgd(optax.sgd(0.0), codec, graph, gamma=gamma)
    return simulated(tx, x, jnp.zeros_like, [()] * rounds)[0]


@pytest.mark.parametrize(
    ("w", "gamma"),
    [(RING, 1.0), (PATH, 1.0), (UNEQUAL, 0.4), (fg.contrib.gossip.ring(1), 1.0)],
)
def test_without_loss_it_is_exact_gossip(w, gamma):
    rows = ROWS[: len(w)]
    mixing = np.eye(len(w)) + gamma * (w - np.eye(len(w)))
    expected = np.linalg.matrix_power(mixing, 3) @ rows.astype(np.float64)
    np.testing.assert_allclose(alone(fg.codecs.Identity(), w, 3, rows, gamma), expected, atol=1e-5)


def heard(codec, weights, x, mode="vmap", bucketing=Bucketing("model")):
    """The copy and the pull of each worker after the first exchange."""

    def one(x):
        links = _links.Gossip("choco_sgd", (codec,), weights, 0.5, 3, AXIS, bucketing)
        zeros = {"w": jnp.zeros_like(x)}
        (tree,), state = links.tell(({"w": x},), links.init((zeros,), zeros), jnp.int32(0))
        return tree.copy["w"], tree.pull["w"], state.worker_rows.reset_rows.skipped

    return map(np.asarray, everywhere(mode, one, x.shape[0])(x))


@pytest.mark.parametrize("mode", ["vmap", "shard_map"])
@pytest.mark.parametrize(
    "codec", [fg.chain(TOP, fg.LogQuantizer(4)), fg.Sign(), fg.UniformQuantizer(bits=3)], ids=repr
)
def test_a_neighbor_hears_the_bits_that_the_sender_adds(codec, mode):
    """Of two workers each has the difference to the other, rounded once."""
    sent, pull, _ = heard(codec, fg.contrib.gossip.ring(2), ROWS[:2], mode)
    assert sent.any()
    np.testing.assert_array_equal(pull, sent[::-1] - sent)


def test_several_buckets_are_one_after_another_and_ways_to_run_it_agree():
    _, whole, _ = heard(fg.codecs.Identity(), RING, ROWS, "shard_map")
    _, cut, skipped = heard(
        fg.codecs.Identity(), RING, ROWS, bucketing=Bucketing("model", bucket_bytes=28)
    )
    np.testing.assert_array_equal(whole, cut)
    assert not skipped.any()


# What goes wrong


@functools.cache
def gossiping(codec, make, guard):
    inner = optax.sgd(0.05)
    return make(optax.apply_if_finite(inner, 1000) if guard else inner, codec, RING, gamma=0.3)


def spoiled(x, h, c, bad):
    return jnp.where(bad, jnp.nan, loss_gradient(x, h, c))


def gossip_of(bad_from=None, codec=TOP, make=fg.contrib.gossip.choco_sgd, steps=60, guard=False):
    """Steps in one of which the gradient of worker 2 is NaN."""
    h, c = H.astype(np.float32), C.astype(np.float32)
    bad = [np.arange(WORKERS) == (2 if t == bad_from else -1) for t in range(steps)]
    start = np.zeros((WORKERS, N), np.float32)
    return simulated(gossiping(codec, make, guard), start, spoiled, [(h, c, one) for one in bad])


def links_of(state):
    return jax.tree.map(lambda a: np.asarray(a)[:, 0], state.neighbors.worker_rows.reset_rows)


def agrees(state, w):
    """Whether every worker's pull is that of the copies that all workers have of themselves."""
    for tree in links_of(state).trees:
        copy = tree.copy.astype(np.float64)
        np.testing.assert_allclose(tree.pull / 3, w @ copy - copy, atol=2e-5)


@pytest.mark.parametrize("make", [fg.contrib.gossip.choco_sgd, fg.contrib.gossip.beer])
@pytest.mark.parametrize("codec", [TOP, fg.codecs.DynamicSign(2.0, 0.995)], ids=repr)
def test_a_worker_that_is_lost_stays_seen_and_spoils_no_other(make, codec):
    x, state = gossip_of(10, make=make, codec=codec)
    assert np.isnan(x[2]).all()
    assert np.isfinite(np.delete(x, 2, axis=0)).all()
    links = links_of(state)
    assert links.skipped.tolist() == [0, 50, 50, 50, 0, 0, 0, 0]
    agrees(state, oracles.ring(WORKERS))


def test_a_codec_forgets_what_was_not_said():
    codec = fg.Threshold(fraction=K / N, search="binary", reuse=4)
    before, after = (
        links_of(gossip_of(10, codec=codec, steps=steps)[1]).codecs for steps in (10, 13)
    )
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(new[2], old[2])
        assert not np.array_equal(new, old)


@pytest.mark.parametrize("make", [fg.contrib.gossip.choco_sgd, fg.contrib.gossip.beer])
def test_a_bad_gradient_that_the_inner_optimizer_leaves_out_leaves_no_trace(make):
    x, state = gossip_of(10, make=make, guard=True)
    fine, other = gossip_of(None, make=make, guard=True)
    assert np.isfinite(x).all()
    assert max(links_of(state).skipped) <= 1  # beer's estimate is not told then
    agrees(state, oracles.ring(WORKERS))
    assert max(links_of(other).skipped) == 0
    if make is fg.contrib.gossip.beer:  # the sum of estimates is still that of the gradients
        rows = state.estimate.worker_rows
        estimate = jax.tree.map(lambda a: np.asarray(a, np.float64).sum(0), rows)
        np.testing.assert_allclose(estimate.of_all, estimate.own, atol=1e-4)
    # The same in the end, but for what one gradient of one worker does.
    assert np.linalg.norm(x - fine) < 0.1 * np.linalg.norm(fine)


# The one-bit quantizer


@pytest.mark.parametrize("number", [0, 1, 37])
def test_what_is_within_the_scale_is_halved(number):
    codec = fg.codecs.DynamicSign(scale=3.0, decay=0.9)
    step, scale = fg.Step(number=number), 3.0 * 0.9**number
    x = np.linspace(-scale, scale, 101).astype(np.float32) * np.float32(1 - 1e-6)
    x[[3, 50]] = [0.0, -0.0]
    compress = jax.jit(lambda x: codec.compress(x, (), step))
    out = compress(x)
    y = np.asarray(jax.jit(lambda p: codec.decompress(p, x, step))(out.payload))
    np.testing.assert_allclose(y, np.where(x < 0, -scale / 2, scale / 2), rtol=1e-5)
    assert np.abs(x - y).max() <= scale / 2 * (1 + 1e-5)
    assert int(out.overflow) == 0
    beyond = int(np.sum(np.abs(2 * x) > scale))
    assert int(compress(2 * x).overflow) == beyond == 49
    x[1:] = 0
    x[0] = np.nan
    assert int(compress(x).overflow) == 1
    assert fg.wire_bytes(codec, x) == 4 + 4 * 4


# Linear convergence


@pytest.mark.parametrize("name", MATRICES)
def test_up_to_its_largest_gamma_a_graph_does_not_overshoot(name):
    graph, w = MATRICES[name]
    largest = fg.contrib.gossip.largest_gamma(graph)
    smallest = np.linalg.eigvalsh(np.eye(WORKERS) + largest * (w - np.eye(WORKERS))).min()
    np.testing.assert_allclose(smallest, 0, atol=1e-9)
    assert fg.contrib.gossip.largest_gamma(fg.contrib.gossip.ring(3)) == 1.0


@pytest.mark.parametrize("codec", [fg.codecs.Identity(), fg.LogQuantizer(bits=4)], ids=repr)
@pytest.mark.parametrize("graph", ["torus", "a matrix"])
def test_what_neighbors_draw_sums_to_nothing(graph, codec):
    """Or the estimates of the gradient would drift, all in one direction, and for good."""
    tx = fg.contrib.gossip.beer(optax.sgd(0.1), codec, MATRICES[graph][0], gamma=0.5)
    totals = []

    def watch(_, __, state):
        links, estimate = links_of(state), state.estimate.worker_rows
        for tree in links.trees:
            drawn = tree.pull.astype(np.float64) + tree.rest
            assert np.abs(drawn.sum(0)).max() < 1e-10
        apart = np.asarray(estimate.of_all, np.float64) - np.asarray(estimate.own, np.float64)
        totals.append(np.abs(apart.sum((0, 1))).max())

    trained(tx, 150, watch=watch)
    assert max(totals) < 2e-5


# Bytes

COMPRESS_MORE = fg.chain(TOP, fg.LogQuantizer(4))


@pytest.mark.parametrize("name", MATRICES)
def test_what_is_sent_is_one_buffer_to_each_neighbor(name):
    graph, codec = MATRICES[name][0], fg.Sign() if name == "ring" else COMPRESS_MORE
    degree = np.count_nonzero(graph[0]) - 1
    like = {"w": np.zeros((10, 11), np.float32), "b": np.zeros(7, np.float32)}
    sent = fg.wire_bytes(codec, like)
    for make, size in ((fg.contrib.gossip.choco_sgd, sent), (fg.contrib.gossip.beer, 2 * sent - 4)):
        tx = make(optax.sgd(0.1), codec, graph, gamma=0.3)
        rows = jax.tree.map(lambda a: np.stack([a] * WORKERS), like)
        run = everywhere("shard_map", lambda g, s, tx=tx: tx.update(g, s, g), WORKERS)
        program = run.lower(rows, jax.eval_shape(jax.vmap(tx.init), rows)).compile()
        found = fg.audit(program)
        assert [c.kind for c in found] == ["collective-permute"] * degree
        assert {(c.dtype, c.bytes, c.branch) for c in found} == {("u32", size, ())}
        assert sum(c.link_bytes(WORKERS) for c in found) == degree * size


# States


def test_another_number_of_workers_is_refused():
    tx = fg.contrib.gossip.choco_sgd(optax.sgd(0.05), TOP, RING, gamma=0.3)
    state = fg.init_state(tx, np.zeros(N, np.float32), mesh_of(8), AXIS)
    with pytest.raises(ValueError, match=r"neighbors.*missing='zero'"):
        fg.checkpoint.reshard_state(
            state, fg.init_state(tx, np.zeros(N, np.float32), mesh_of(4), AXIS)
        )


# Bad input


@pytest.mark.parametrize("make", [fg.contrib.gossip.choco_sgd, fg.contrib.gossip.beer])
def test_mistakes_are_answered_with_the_remedy(make):
    tx = make(optax.sgd(0.1), TOP, fg.contrib.gossip.torus(2, 2), gamma=0.5)

    def call(params, rows):
        run = jax.vmap(lambda g, s: tx.update(g, s, params), axis_name=AXIS)
        jax.eval_shape(run, rows, jax.eval_shape(jax.vmap(tx.init), rows))

    with pytest.raises(ValueError, match=r"tx\.update\(grads, state, params\)"):
        call(None, ROWS[:4])
    with pytest.raises(ValueError, match="must have a row for each of 8 workers"):
        call(ROWS[0], ROWS)
    specs = fg.state_specs(jax.eval_shape(tx.init, ROWS[0]), AXIS)
    run = jax.shard_map(
        lambda g, s, p: tx.update(g[0], s, p),
        mesh=mesh_of(4),
        in_specs=(P(AXIS), specs, P()),
        out_specs=(P(AXIS), specs),
    )
    with pytest.raises(ValueError, match="leading axis of workers"):
        jax.eval_shape(run, ROWS[:4], fg.init_state(tx, ROWS[0], mesh_of(4), AXIS), ROWS[0])
