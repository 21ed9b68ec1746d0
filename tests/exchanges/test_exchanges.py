"""Laws of exchanges: updates, every way of running them, the oracle, and bytes in the program."""

import dataclasses
import functools
import itertools

import goldens
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import EXCHANGES, gradients, one_of_each, sample, values
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from parallel import AXIS, MODES, everywhere, of_size, train_step
from stepwise import once
from updates import collectives

import fftgrad as fg
from fftgrad.contrib import learned
from fftgrad.ops import _collectives

N = 150
LIKE = jax.ShapeDtypeStruct((N,), "float32")


def mean_and_sent(exchange):
    def one(x):
        out = once(exchange, x)
        return out.mean, jax.tree.map(jnp.subtract, x, out.error)

    return one


def program(mode, exchange, workers):
    return everywhere(mode, mean_and_sent(of_size(exchange, workers)), workers)


@functools.cache
def compiled(mode, exchange, workers):
    """Compiled once, for all the tests that run or audit it."""
    return program(mode, exchange, workers).lower(rows(workers)).compile()


def rows(workers, n=N):
    return values((workers, n))


@pytest.mark.parametrize("name", one_of_each(EXCHANGES))
def test_an_update(name):
    """Replicas are equal, feedback loses nothing, and a bad step of a worker leaves no trace.

    Its bytes, in each branch of the traced program, are those that are promised.
    """
    init, update = goldens.exchange(name)
    x = goldens.ROWS
    state, applied, wanted = init(x), np.zeros(x[0].size), np.zeros(x[0].size)
    for step in range(goldens.STEPS):
        grads = x * (1 + step)
        mean, state = update(grads, state, x)
        bits = np.asarray(mean).view(np.uint32)
        assert np.all(bits == bits[0])
        applied += np.asarray(mean[0], np.float64)
        wanted += grads.astype(np.float64).mean(0)
        left = np.asarray(state.memory.worker_rows.residual, np.float64).reshape(x.shape).mean(0)
        np.testing.assert_allclose(applied + left, wanted, atol=1e-4)
    check_traced_bytes(EXCHANGES[name])
    for bad in (np.nan, np.inf):
        spoiled = x.copy()
        spoiled[2, 30] = bad
        mean, after = update(spoiled, state, x)
        assert not np.any(np.all(np.isfinite(mean), axis=1))
        assert not isinstance(EXCHANGES[name], fg.AllGather) or np.all(np.isnan(mean))
        assert np.all(np.asarray(after.skipped) == 1)
        for kept in ("memory", "exchange"):
            pair = (jax.tree.leaves(getattr(one, kept)) for one in (state, after))
            assert all(map(np.array_equal, *pair)), kept


def check_traced_bytes(exchange):
    def mean(x, state):
        return exchange.mean(x, state, fg.exchanges.Comm(AXIS, fg.Step.of(5))).mean

    state = jax.eval_shape(exchange.init, LIKE)
    found = _collectives.collectives(mean, {AXIS: 4}, LIKE, state)
    if isinstance(exchange, fg.Scheduled | fg.exchanges.Ladder):
        promised = [fg.wire_bytes(part, LIKE) for part in exchange.exchanges]
    elif isinstance(exchange, learned.LearnedCodes):
        return  # a test of its own has the bytes of each phase
    else:
        promised = [fg.wire_bytes(exchange, LIKE)]
    branches = sorted({c.branch for c in found if c.branch}) or [()]
    always = sum(c.bytes for c in found if not c.branch)
    sent = [always + sum(c.bytes for c in found if c.branch == b != ()) for b in branches]
    assert sent == promised


# The ways differ in their collectives; codecs alone make no difference to them.
ONE_OF_EACH = {type(exchange): name for name, exchange in EXCHANGES.items()}.values()
COMPARED = ["dense", "gather blocked", "two stages", "shared support", "integer sum", "low rank"]
WAYS = sample(itertools.product(COMPARED, MODES[1:]), frozenset)


@pytest.mark.usefixtures("every_platform")
@pytest.mark.parametrize(("name", "mode"), WAYS)
def test_every_way_of_running_it_agrees(name, mode):
    x, exchange = rows(4), EXCHANGES[name]
    one, other = (compiled(way, exchange, 4)(x) for way in (MODES[0], mode))
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_the_bytes_of_the_compiled_program_are_those_that_are_promised(name):
    """Also those over a link, for eight workers; `check_exchange` has others for four."""
    exchange, workers = EXCHANGES[name], 8
    found = fg.audit(compiled("shard_map", exchange, workers))
    if isinstance(exchange, fg.Scheduled):
        for branch, step in enumerate(exchange.starts):
            here = [c for c in found if c.branch == (branch,)]
            assert sum(c.bytes for c in here) == fg.wire_bytes(exchange.at(step), LIKE)
            check_link_bytes(here, exchange.at(step), workers)
        assert len(found) == len(exchange.exchanges)
    elif isinstance(exchange, fg.exchanges.Ladder | learned.LearnedCodes):
        # It starts at the first rung, or in the first phase, which XLA knows.
        assert sum(c.bytes for c in found) == fg.wire_bytes(exchange.at(0), LIKE)
        assert len(found) == (1 if isinstance(exchange, fg.exchanges.Ladder) else 2)
        check_link_bytes(found, exchange.at(0), workers)
    else:
        sized = of_size(exchange, workers)
        assert sum(c.bytes for c in found) == fg.wire_bytes(sized, LIKE)
        check_link_bytes(found, sized, workers)
        if isinstance(exchange, fg.AllGather):
            assert [(c.kind, c.dtype) for c in found] == [("all-gather", "u32")]


def check_link_bytes(found, exchange, workers):
    over_a_ring = sum(c.link_bytes(workers) for c in found)
    assert fg.link_bytes(exchange, LIKE, workers) == pytest.approx(over_a_ring, rel=1e-12)


COLLECTIVES = {
    "dense": ["all-reduce"],
    "gather top-k": ["all-gather"],
    "two stages": ["all-gather", "all-to-all"],
    "shared support": ["all-reduce"] * 2,
    "integer sum": ["all-reduce"] * 2,
    "votes, noisy": ["all-gather"],
    "low rank": ["all-reduce"] * 2,
    "low rank in turns": ["all-reduce"],
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_all_parts_travel_together(name):
    """In as many collectives as the docstring of `compressed_pmean` says."""
    exchange = EXCHANGES[name]
    found = sorted(c.kind for c in collectives(exchange, bucketing=fg.Bucketing("leaf")))
    # XLA for a CPU makes an all-to-all of one array for each receiver.
    assert [k for i, k in enumerate(found) if k != "all-to-all" or i == len(found) - 1] == (
        COLLECTIVES[name]
    )


def test_dividing_first_keeps_a_large_mean_finite():
    kinds = (fg.AllReduce(), fg.AllGather(fg.codecs.Identity()), fg.AllGather(fg.TopK(k=3)))
    means = everywhere("vmap", lambda x: [once(kind, x).mean for kind in kinds], 4)
    for mean in means(np.full((4, 10), 3e38, np.float32)):
        np.testing.assert_allclose(np.max(mean), 3e38, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "transforms"),
    [
        ("gather blocked", {"dot_general": 2}),  # short blocks are products: there, and back
        ("gather paper", {"type = RFFT": 1, "type = IRFFT": 1}),
    ],
)
def test_any_number_of_workers_costs_one_inverse_transform(name, transforms):
    mean = everywhere("shard_map", lambda x: once(EXCHANGES[name], x).mean, 8)
    text = mean.lower(rows(8)).as_text()
    assert {what: text.count(what) for what in transforms} == transforms


@dataclasses.dataclass(frozen=True)
class Many(fg.codecs.Transform):
    """Counts 2^30 values, the most that a bucket has."""

    def compress(self, x, state, step):
        return fg.codecs.Compressed(fg.codecs.Payload(x), jnp.int32(1 << 30))

    def decompress(self, payload, like, step):
        return payload.main


@pytest.mark.parametrize(
    "exchange",
    [
        fg.AllGather(fg.chain(Many(), Many())),
        fg.AllReduce(Many()),
        fg.exchanges.LeaderTopK(fg.chain(Many(), Many(), fg.TopK(k=4))),
        fg.Scheduled({0: fg.TwoStage(fg.chain(Many(), Many()), workers=4)}),
    ],
    ids=repr,
)
def test_a_count_of_overflow_stays_at_the_largest_int32(exchange):
    """Over the stages of a chain, the workers, three parts of a bucket, and three buckets."""

    def counted(parts, bucket_bytes):
        bucketing = fg.Bucketing("leaf", bucket_bytes)
        tx = fg.compressed_pmean(exchange, axis_name=AXIS, bucketing=bucketing)
        return lambda x: tx.update([x] * parts, tx.init([x] * parts))[1].overflow

    def every(x):
        return counted(1, 1000)(x), counted(3, 1000)(x), counted(3, 40)(x)

    found = jax.jit(jax.vmap(every, axis_name=AXIS))(np.ones((4, 10), np.float32))
    assert np.unique(found).tolist() == [2**31 - 1]


@pytest.mark.parametrize(
    ("name", "check_vma"),
    sample(
        itertools.product(["gather blocked", "two stages, top-k", "shared support"], [True, False]),
        frozenset,
    ),
)
def test_several_axes_are_one(name, check_vma):
    exchange = of_size(EXCHANGES[name], 8)
    x = rows(8)

    def mean(row):
        return once(exchange, row[0], axis_name=("a", "b")).mean

    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    spread = P(("a", "b"))
    grid = jax.jit(
        jax.shard_map(mean, mesh=mesh, in_specs=spread, out_specs=P(), check_vma=check_vma)
    )(x)
    flat = np.asarray(program("vmap", exchange, 8)(x)[0])
    np.testing.assert_allclose(grid, flat[0], rtol=1e-5, atol=1e-6)


def test_low_rank_and_gathered_steps_are_branches_of_one_program():
    """What `PowerSgd` sends is equal on all workers, what the others send is each one's own."""
    like = {"w": jax.ShapeDtypeStruct((10, 12), "float32")}
    exchange = fg.Scheduled(
        {1: fg.AllGather(fg.TopK(k=9)), 0: fg.PowerSgd(rank=2), 2: fg.PowerSgd()}
    )
    assert exchange.starts == (0, 1, 2)
    bucketing = fg.Bucketing("leaf")
    tx = fg.compressed_pmean(exchange, fg.ErrorFeedback(), axis_name=AXIS, bucketing=bucketing)
    init, update = train_step(tx, 4, like=like)
    jax.eval_shape(update, gradients(like, 4), jax.eval_shape(init, like))


def test_what_stays_behind_is_counted_of_the_leader_alone():
    """All values of worker 0 pass its threshold, which is more than a message holds."""
    rows = values((4, 120))
    rows[0] = 1.0

    def counts(row):
        exchange = fg.exchanges.LeaderTopK(fg.Threshold(fraction=0.05))
        steps = [fg.Step.of(0, number) for number in (0, 3)]
        comms = [fg.exchanges.Comm(AXIS, step) for step in steps]
        start = exchange.init(row)
        return [exchange.mean(row, start, comm).stats.overflow for comm in comms]

    found = [count.tolist() for count in everywhere("vmap", counts, 4)(rows)]
    assert found == [[120 - 12] * 4, [0] * 4]
