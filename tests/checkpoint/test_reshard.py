"""A state goes on with another number of workers, and nothing that was not sent is lost."""

import dataclasses
import functools
import math
import tempfile

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import EXCHANGES, HIERARCHIES, MEMORIES, sample
from flax import nnx, serialization
from hypothesis import stateful
from hypothesis import strategies as st
from parallel import AXIS, flat, of_size, same, unshard, zeros

import fftgrad as fg
from fftgrad import checkpoint
from fftgrad.checkpoint import _reshard

LIKE = {"w": jax.ShapeDtypeStruct((19, 7), "float32"), "b": jax.ShapeDtypeStruct((20,), "float32")}
SIZE = 19 * 7 + 20
ZEROS = zeros(LIKE)


def grads(workers, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: rng.standard_t(3, (workers, *s.shape)).astype(np.float32), LIKE)


def is_own(node):
    return isinstance(node, fg.exchanges.PerWorker)


def to_rows(stacked):
    """What vmap has of each worker, [N, 1, ...] or [N, ...], as shard_map has it."""

    def of(node):
        if is_own(node):
            return jax.tree.map(lambda a: np.asarray(a).reshape(-1, *a.shape[2:]), node)
        return jax.tree.map(lambda a: np.asarray(a)[0], node)

    return jax.tree.map(of, stacked, is_leaf=is_own)


def to_stacked(rows, workers):
    def of(node):
        if is_own(node):
            return jax.tree.map(lambda a: np.asarray(a)[:, None], node)
        return jax.tree.map(lambda a: np.stack([np.asarray(a)] * workers), node)

    return jax.tree.map(of, rows, is_leaf=is_own)


@functools.cache
def feedback(exchange, memory=fg.ErrorFeedback(), **options):  # noqa: B008 (a value)
    """One transformation for all tests, which then share its programs."""
    return fg.compressed_pmean(exchange, memory, axis_name=AXIS, **options)


@functools.cache
def updating(tx):
    return jax.jit(jax.vmap(lambda g, s: tx.update(g, s, value=jnp.float32(1)), axis_name=AXIS))


@functools.cache
def fresh(tx, workers):
    return to_rows(jax.jit(jax.vmap(tx.init, axis_size=workers, in_axes=None))(ZEROS))


def waiting(state):
    """The mean of what was not sent yet."""
    held = flat(state.memory.worker_rows.residual, 1).mean(0)
    exchange = state.exchange[0]
    shards = exchange.own.worker_rows
    if hasattr(shards, "cut_rows"):
        (part,) = shards.cut_rows.residual
        held = held + unshard(np.asarray(part, np.float64), SIZE)
    return held


@pytest.mark.parametrize(
    ("before", "after"), [(1, 3), (3, 1), (3, 4), (4, 6), (7, 2), (8, 4), (4, 16), (8, 8)]
)
def test_rows_are_spread_by_the_intervals(before, after):
    rows = np.random.default_rng(before).standard_normal((before, 5)).astype(np.float32)
    new = _reshard.spread(rows, after)
    weights = np.zeros((after, before))
    for j in range(after):
        for i in range(before):
            low, high = max(j / after, i / before), min((j + 1) / after, (i + 1) / before)
            weights[j, i] = after * max(0.0, high - low)
    np.testing.assert_allclose(new, weights @ rows, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(new.mean(0, np.float64), rows.mean(0, np.float64), atol=1e-6)
    if before == after:
        np.testing.assert_array_equal(new, rows)


@pytest.mark.parametrize("n", [1, 5, 12, 13])
@pytest.mark.parametrize("shards", [1, 3, 4, 16])
def test_shards_are_cut_as_the_exchange_cuts_them(n, shards):
    from fftgrad.exchanges import _shards

    x = np.arange(1.0, n + 1, dtype=np.float32)
    wanted = np.asarray(_shards.to_shards(x, shards)[0])
    np.testing.assert_array_equal(_reshard.cut(x, shards), wanted)
    np.testing.assert_array_equal(_reshard.join(wanted, n), x)


def filled(tx, workers, seed=0):
    """A state of the shapes that it has, as rows."""
    init = jax.vmap(tx.init, axis_size=workers, in_axes=None)
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(init, ZEROS)
    state = jax.tree.map(lambda s: (9 * rng.standard_normal(s.shape)).astype(s.dtype), shapes)
    return to_rows(state)


@pytest.mark.parametrize("name", sample(EXCHANGES))
def test_every_exchange_goes_on_and_the_same_number_is_the_identity(name):
    tx = feedback(EXCHANGES[name])
    state = filled(tx, 4)
    out = fg.checkpoint.reshard_state(state, filled(tx, 4, seed=1))
    assert out.workers == (4, 4)
    assert same(state, out.state)
    assert jax.tree.structure(state) == jax.tree.structure(out.state)
    for after in (3, 8):
        other = filled(feedback(of_size(EXCHANGES[name], after)), after)
        out = fg.checkpoint.reshard_state(state, other)
        assert jax.tree.map(np.shape, out.state) == jax.tree.map(np.shape, other)
        # A framework may store named tuples as dicts.
        dicts = fg.checkpoint.reshard_state(*map(serialization.to_state_dict, (state, other)))
        assert same(dicts.state, serialization.to_state_dict(out.state))


@pytest.mark.parametrize("name", MEMORIES)
def test_every_memory_is_spread(name):
    tx = feedback(EXCHANGES["gather top-k"], MEMORIES[name])
    state = filled(tx, 4)
    out = fg.checkpoint.reshard_state(state, filled(tx, 6))
    for old, new in zip(
        jax.tree.leaves(state.memory), jax.tree.leaves(out.state.memory), strict=True
    ):
        if not jnp.issubdtype(old.dtype, jnp.inexact):  # that of the first interval
            continue
        old, new = (np.asarray(a).astype(np.float64) for a in (old, new))
        near = 5e-2 if name == "narrow feedback" else 1e-5
        np.testing.assert_allclose(new.mean(0), old.mean(0), rtol=near, atol=near)


@pytest.mark.parametrize("groups", [(2, 4), (3, 4), (1, 4), (4, 2), (2, 3)])
def test_groups_are_joined_and_cut_again(groups):
    def state_of(groups, fill):
        slow, fast = groups
        exchange = dataclasses.replace(HIERARCHIES["slow gather"], workers=fast)
        tx = fg.compressed_pmean(exchange, axis_name=("slow", "fast"))
        state = fresh(tx, slow * fast)
        if fill is None:
            return state
        pieces = np.concatenate([_reshard.cut(row, fast) for row in fill])
        memory = jax.tree.map(lambda _: pieces, state.exchange[0].own.worker_rows.cut_rows)
        shards = state.exchange[0].own.worker_rows._replace(cut_rows=memory)
        own = state.exchange[0]._replace(own=fg.exchanges.PerWorker(shards))
        return state._replace(exchange=(own,))

    x = np.random.default_rng(0).standard_normal((2, SIZE)).astype(np.float32)
    old = state_of((2, 4), x)
    out = fg.checkpoint.reshard_state(old, state_of(groups, None))
    (residual,) = jax.tree.leaves(out.state.exchange[0].own.worker_rows.cut_rows)
    slow, fast = groups
    rows = residual.reshape(slow, fast, -1)
    joined = np.stack([unshard(row, SIZE) for row in np.asarray(rows)])
    np.testing.assert_allclose(joined, _reshard.spread(x, slow), rtol=1e-6)
    dicts = map(serialization.to_state_dict, (old, state_of(groups, None)))
    assert same(fg.checkpoint.reshard_state(*dicts).state, serialization.to_state_dict(out.state))


def test_groups_inside_a_schedule_are_cut_again():
    def state_of(groups):
        slow, fast = groups
        group = dataclasses.replace(HIERARCHIES["slow gather"], workers=fast)
        later = fg.Scheduled({0: fg.AllReduce(), 5: group})
        return fresh(fg.compressed_pmean(later, axis_name=("slow", "fast")), slow * fast)

    for groups in ((2, 2), (2, 4)):
        out = fg.checkpoint.reshard_state(state_of((4, 2)), state_of(groups))
        assert out.workers == (8, math.prod(groups))


def test_names_alone_make_no_state():
    """A user's fields with the names of ours: rows are spread, and what is replicated is kept."""
    rows = fg.exchanges.PerWorker
    old = {"worker": rows(np.arange(4.0)), "memory": rows(np.arange(4))}
    new = {"worker": rows(np.zeros(2)), "memory": rows(np.zeros(2, int))}
    out = fg.checkpoint.reshard_state(old, new).state
    assert out["worker"].worker_rows.tolist() == [0.5, 2.5]
    assert out["memory"].worker_rows.tolist() == [0, 2]
    old, new = ({"exchange": [{"shared": np.ones(n)}]} for n in (3, 4))
    with pytest.raises(ValueError, match=r"exchange\.0\.shared must be"):
        fg.checkpoint.reshard_state(old, new)


def test_variables_of_nnx_are_marked_as_their_arrays_are():
    tx = feedback(fg.TwoStage(fg.Threshold(fraction=0.1), 4))
    made = nnx.eval_shape(lambda: nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    params = nnx.state(made, nnx.Param)
    state = jax.eval_shape(tx.init, nnx.to_pure_dict(params))
    plain = {name: leaf.mark for name, leaf in _reshard.describe(state).items()}
    variables = jax.tree.map(nnx.Variable, serialization.to_state_dict(state))
    found = {name: leaf.mark for name, leaf in _reshard.describe(variables).items()}
    assert {name.removesuffix(".value"): mark for name, mark in found.items()} == plain


OTHERS = {
    "codec": (fg.AllGather(fg.Sign()), {}),
    "bits": (fg.AllGather(fg.chain(fg.TopK(fraction=0.1), fg.LogQuantizer(bits=4))), {}),
    "exchange": (fg.exchanges.LeaderTopK(fg.TopK(fraction=0.2)), {}),
    "rank": (fg.PowerSgd(rank=3), {}),
    "turns": (fg.exchanges.AcpSgd(rank=2), {}),
    "scope": (fg.AllGather(fg.TopK(fraction=0.1)), {"bucketing": fg.Bucketing("leaf")}),
    "buckets": (fg.AllGather(fg.TopK(fraction=0.1)), {"bucketing": fg.Bucketing(bucket_bytes=300)}),
    "two stages": (fg.TwoStage(fg.Sign(), workers=4), {}),
}


@pytest.mark.parametrize("after", [4, 3])
@pytest.mark.parametrize("name", OTHERS)
def test_a_residual_goes_on_behind_another_method(name, after):
    state = filled(feedback(fg.PowerSgd(rank=2)), 4)
    exchange, more = OTHERS[name]
    tx = feedback(of_size(exchange, after), **more)
    new = fg.checkpoint.reshard_state(state, fresh(tx, after)).state
    np.testing.assert_allclose(waiting(new), waiting(state), rtol=1e-5, atol=1e-5)
    jax.eval_shape(updating(tx), grads(after, 0), to_stacked(new, after))


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_residual_goes_on_in_another_dtype(dtypes):
    old, new = (
        feedback(EXCHANGES["gather top-k"], fg.ErrorFeedback(dtype=dtype)) for dtype in dtypes
    )
    state = filled(old, 4)
    for after in (4, 3):
        out = fg.checkpoint.reshard_state(state, filled(new, after))
        assert out.state.memory.worker_rows.residual["w"].dtype == dtypes[1]
        held, wanted = waiting(out.state), waiting(state)
        np.testing.assert_allclose(held, wanted, rtol=5e-2, atol=5e-2)


def test_what_would_be_lost_is_refused():
    gather = feedback(EXCHANGES["gather top-k"])
    dgc = feedback(EXCHANGES["gather top-k"], fg.memories.MomentumCorrection(0.9))
    two_levels = fg.compressed_pmean(HIERARCHIES["slow gather"], axis_name=("slow", "fast"))
    state = filled(two_levels, 8)
    with pytest.raises(
        ValueError, match=r"exchange\.0\.own\.worker_rows\.cut_rows\.residual\.0\.value has no"
    ):
        fg.checkpoint.reshard_state(state, filled(gather, 8))
    with pytest.warns(RuntimeWarning, match="has no place"):
        fg.checkpoint.reshard_state(state, filled(gather, 8), missing="zero")

    state = filled(gather, 4)
    with pytest.raises(ValueError, match=r"velocity\.b must be float32\[4, 20\], got nothing"):
        fg.checkpoint.reshard_state(state, filled(dgc, 4))
    with pytest.warns(RuntimeWarning, match="velocity"):
        out = fg.checkpoint.reshard_state(state, filled(dgc, 4), missing="zero")
    assert same(out.state.memory.worker_rows.residual, state.memory.worker_rows.residual)


def test_keys_of_workers_stay_different():
    keys = fg.exchanges.PerWorker(jax.random.split(jax.random.key(0), 2))
    out = fg.checkpoint.reshard_state(
        {"rng": keys}, {"rng": fg.exchanges.PerWorker(jax.random.split(jax.random.key(1), 4))}
    )
    data = np.asarray(jax.random.key_data(out.state["rng"].worker_rows))
    assert len(np.unique(data, axis=0)) == 4


LIVES = {
    "top-k": lambda _: fg.AllGather(fg.chain(fg.TopK(0.1), fg.LogQuantizer(6))),
    "adaptive": lambda _: EXCHANGES["gather adaptive"],
    "low rank in turns": lambda _: fg.exchanges.AcpSgd(rank=1),
    "two stages": lambda workers: fg.TwoStage(fg.Sign(), workers=workers),
}


class Life(stateful.RuleBasedStateMachine):
    """What came is what was applied, and what waits: in memories, and in the owners' of shards."""

    @stateful.initialize(name=st.sampled_from(list(LIVES)), workers=st.sampled_from([1, 2, 3]))
    def begin(self, name, workers):
        self.folder = tempfile.TemporaryDirectory()
        self.name, self.workers = name, workers
        self.state = fresh(self.tx(), workers)
        self.came = self.gone = np.zeros(SIZE)
        self.saved, self.saves, self.skipped = None, 0, 0

    def teardown(self):
        if hasattr(self, "folder"):
            self.folder.cleanup()

    def tx(self):
        return feedback(LIVES[self.name](self.workers))

    def fresh(self, name, workers):
        return fresh(feedback(LIVES[name](workers)), workers)

    def update(self, g):
        mean, state = updating(self.tx())(g, to_stacked(self.state, self.workers))
        self.state = to_rows(state)
        rows = flat(mean, 1)
        np.testing.assert_array_equal(rows, rows[:1].repeat(self.workers, axis=0))
        return rows[0]

    @stateful.rule(seed=st.integers(0, 1000))
    def step(self, seed):
        g = grads(self.workers, seed)
        self.gone = self.gone + self.update(g)
        self.came = self.came + flat(g, 1).mean(0)

    @stateful.rule(seed=st.integers(0, 1000), bad=st.sampled_from([np.nan, np.inf, -np.inf]))
    def skip(self, seed, bad):
        g = grads(self.workers, seed)
        g["w"][seed % self.workers, seed % 9, seed % 7] = bad
        self.skipped += 1
        assert not np.all(np.isfinite(self.update(g)))

    @stateful.rule()
    def save(self):
        self.saves += 1
        checkpoint.save(self.folder.name, self.saves, self.state)
        self.saved = self.came, self.gone, self.skipped, self.name, self.workers

    @stateful.precondition(lambda self: self.saved is not None)
    @stateful.rule(workers=st.sampled_from([1, 2, 3]))
    def resume(self, workers):
        self.came, self.gone, self.skipped, self.name, before = self.saved
        found = checkpoint.restore(self.folder.name, self.fresh(self.name, workers))
        self.state, self.workers = found.tree, workers
        assert (found.step, found.workers) == (self.saves, (before, workers))

    @stateful.rule(workers=st.sampled_from([1, 2, 3]))
    def reshard(self, workers):
        out = checkpoint.reshard_state(self.state, self.fresh(self.name, workers))
        self.state, self.workers = out.state, workers

    @stateful.rule(name=st.sampled_from(list(LIVES)))
    def change_method(self, name):
        fresh = self.fresh(name, self.workers)
        self.state = checkpoint.reshard_state(self.state, fresh).state
        self.name = name

    @stateful.invariant()
    def nothing_is_lost(self):
        if not hasattr(self, "state"):
            return
        held = waiting(self.state)
        np.testing.assert_allclose(self.gone + held, self.came, rtol=1e-3, atol=1e-3)
        assert int(self.state.skipped) == self.skipped


# A step that fails tells of all that went before it; more steps find more than more lives.
Life.TestCase.settings = hypothesis.settings(
    max_examples=8, stateful_step_count=14, deadline=None, derandomize=True
)
test_life = pytest.mark.full(Life.TestCase)
