"""What is done with a gradient that is not finite: seen, skipped, or left out of the mean."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import CODECS, EXCHANGES, HIERARCHIES, MEMORIES, SLOW, gradients, sample, values
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from parallel import AXIS, train_step
from updates import BUCKETS, PAIR, WORKERS, collectives, mapped, sharded

import fftgrad as fg
from fftgrad.training import _non_finite

ALL = pytest.mark.parametrize("name", sample(EXCHANGES))


@dataclasses.dataclass(frozen=True)
class Signs(fg.Codec):
    """Summable, and yet it makes something of zeros."""

    summable = True

    def compress(self, x, state, step):
        return fg.Compressed(fg.Payload(jnp.where(x < 0, -1.0, 1.0)))

    def decompress(self, payload, like, step):
        return payload.main


@dataclasses.dataclass(frozen=True)
class Plain(fg.Exchange):
    """An exchange of one's own, which knows nothing of workers that do not count."""

    def mean(self, x, state, channel):
        return fg.Reduced(jax.lax.pmean(x, channel.axis_name), x, state)

    def wire_bytes(self, like):
        return sum(4 * leaf.size for leaf in jax.tree.leaves(like))


def grads(seed=0, tree=PAIR, workers=WORKERS):
    return gradients(tree, workers, seed=seed)


def spoiled(tree, workers, bad=np.nan, leaf="b"):
    """The gradients, those of some workers with one bad value."""
    for worker in workers:
        tree = {**tree, leaf: tree[leaf].at[(worker, *[3] * (tree[leaf].ndim - 1))].set(bad)}
    return tree


def row(tree, worker):
    return jax.tree.map(lambda a: np.asarray(a[worker]), tree)


def same(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def is_zero(tree):
    return all(not np.any(leaf) for leaf in jax.tree.leaves(tree))


def counters(state):
    """Skipped and dropped, on all workers."""
    return np.asarray(state.skipped).tolist(), np.asarray(state.dropped).tolist()


def per_worker(state):
    """What of a state is kept of each worker, a row each."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, fg.exchanges.PerWorker))
    return [node for node in nodes if isinstance(node, fg.exchanges.PerWorker)]


# Nobody bad, somebody bad, everybody bad: every exchange


@ALL
def test_where_all_is_finite_the_policies_agree_to_the_bit(name):
    found = []
    for policy in ("propagate", "skip", "drop_worker"):
        init, update = mapped(EXCHANGES[name], policy)
        state = init(grads())
        for seed in range(2):
            mean, state = update(grads(seed), state)
        found.append((mean, state))
    assert same(found[0], found[1])
    assert same(found[0], found[2])
    assert counters(state) == ([0] * WORKERS, [0] * WORKERS)


@ALL
def test_a_skipped_step_is_zero_and_leaves_no_trace(name):
    init, update = mapped(EXCHANGES[name], "skip")
    _, before = update(grads(), init(grads()))
    mean, after = update(spoiled(grads(1), [2]), before)
    assert is_zero(mean)
    assert same((before.memory, before.exchange), (after.memory, after.exchange))
    assert same(before.overflow, after.overflow)
    assert counters(after) == ([1] * WORKERS, [0] * WORKERS)


def check_dropped(exchange, leaf, bad, **options):
    """The mean is what zeros of that worker give, over those that are left."""
    init, update = mapped(exchange, "drop_worker", **options)
    _, before = update(grads(), init(grads()))
    mean, after = update(spoiled(grads(1), [2], bad, leaf), before)
    assert all(same(row(mean, 0), row(mean, i)) for i in range(WORKERS))
    assert same(row(before.memory, 2), row(after.memory, 2))
    for i in (0, 1, 3):
        kept = row(after.memory, i)
        assert is_zero(kept) or not same(row(before.memory, i), kept)
    assert counters(after) == ([0] * WORKERS, [1] * WORKERS)

    _, as_usual = mapped(exchange, "propagate", **options)
    empty = jax.tree.map(lambda a: a.at[2].set(0), (grads(1), before.memory))
    of_zeros, _ = as_usual(empty[0], before._replace(memory=empty[1]))
    for a, b in zip(jax.tree.leaves(mean), jax.tree.leaves(of_zeros), strict=True):
        np.testing.assert_allclose(a, b * np.float32(4 / 3), rtol=1e-6, atol=1e-6)


@ALL
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_dropped_worker_adds_nothing_and_forgets_nothing(name, bad):
    check_dropped(EXCHANGES[name], "b", bad)


IN_BUCKETS = [
    "dense",
    "gather top-k",
    "shared by the mean",
    "two stages",
    "low rank",
    "low rank in turns",
    "warm-up",
]


@pytest.mark.parametrize("leaf", PAIR)
@pytest.mark.parametrize("name", IN_BUCKETS)
def test_a_worker_is_dropped_from_all_buckets(name, leaf):
    """Whichever of them is bad, the first that travels or the last."""
    check_dropped(EXCHANGES[name], leaf, np.nan, layout=BUCKETS)


# Whose parts are shards, and whose state is of them, depends on the number of workers; so does what
# share of the noise each one has, which it adds even if its votes are left out.
OF_ANY_SIZE = [
    name
    for name, exchange in EXCHANGES.items()
    if not isinstance(exchange, fg.TwoStage) and name != "votes, noise of each"
]


# Codecs for which zero is as good as another value: what they make of it must not count either.
ONE_BIT = fg.codecs.DynamicSign(scale=4.0, decay=0.9)
NO_ZERO = fg.codecs.FixedRangeFloat(bits=6, maximum=8.0, eps=0.1, zero=False)
ZERO_LESS = {
    "one bit": fg.AllGather(ONE_BIT),
    "one bit of few": fg.AllGather(fg.chain(fg.TopK(k=20), ONE_BIT)),
    "no zero, rotated": fg.AllGather(fg.chain(fg.Hadamard(block=16), NO_ZERO)),
    "no zero, clipped": fg.AllGather(NO_ZERO, fg.exchanges.MedianNormClip()),
    "sum of signs": fg.AllReduce(Signs()),
    "few of the signs": fg.SharedSupport(
        fg.chain(Signs(), fg.TopK(k=20)), fg.exchanges.LeaderSupport(worker=0)
    ),
}


@pytest.mark.parametrize("name", [*sample(OF_ANY_SIZE), *ZERO_LESS])
def test_the_others_have_the_mean_that_they_would_have_on_their_own(name):
    """Over three steps, the last worker being bad in all of them."""
    exchange = {**EXCHANGES, **ZERO_LESS}[name]
    init, update = mapped(exchange, "drop_worker")
    init_alone, alone = mapped(exchange, "propagate", WORKERS - 1)
    three = jax.tree.map(lambda a: a[:3], grads())
    state, state_alone = init(grads()), init_alone(three)
    # Leaders take turns, among three otherwise than among four.
    for seed in range(3):
        mean, state = update(spoiled(grads(seed), [3]), state)
        rows = jax.tree.map(lambda a: a[:3], grads(seed))
        mean_alone, state_alone = alone(rows, state_alone)
        for a, b in zip(jax.tree.leaves(mean), jax.tree.leaves(mean_alone), strict=True):
            np.testing.assert_allclose(a[:3], b, rtol=1e-4, atol=1e-5)
    kept = zip(jax.tree.leaves(state.memory), jax.tree.leaves(state_alone.memory), strict=True)
    for a, b in kept:
        np.testing.assert_allclose(a[:3], b, rtol=1e-4, atol=2e-5)
    assert counters(state) == ([0] * WORKERS, [3] * WORKERS)


@pytest.mark.parametrize("exchange", [fg.AllReduce(), fg.AllGather(fg.Identity()), Plain()])
@pytest.mark.parametrize("bad", [[0], [1, 3], [0, 1, 2]])
def test_without_compression_it_is_the_mean_of_the_finite_rows(exchange, bad):
    init, update = mapped(exchange, "drop_worker", memory=fg.NoMemory())
    mean, state = update(spoiled(grads(), bad, np.inf), init(grads()))
    good = [i for i in range(WORKERS) if i not in bad]
    for leaf in PAIR:
        wanted = np.asarray(grads()[leaf], np.float64)[good].mean(0)
        np.testing.assert_allclose(mean[leaf][0], wanted, rtol=1e-5, atol=1e-6)
    assert counters(state) == ([0] * WORKERS, [len(bad)] * WORKERS)


@ALL
def test_a_step_without_a_finite_worker_is_skipped(name):
    init, update = mapped(EXCHANGES[name], "drop_worker")
    _, before = update(grads(), init(grads()))
    everyone = spoiled(spoiled(grads(1), [0, 2], leaf="a"), [1, 3])
    mean, after = update(everyone, before)
    assert is_zero(mean)
    assert same((before.memory, before.exchange), (after.memory, after.exchange))
    assert counters(after) == ([1] * WORKERS, [0] * WORKERS)


@pytest.mark.parametrize("name", HIERARCHIES)
def test_a_hierarchy_goes_without_a_worker_too(name):
    exchange = dataclasses.replace(HIERARCHIES[name], memory=fg.NoMemory())
    axes = ("slow", "fast")

    def step(policy):
        tx = fg.compressed_pmean(exchange, axis_name=axes, non_finite=policy)
        one = jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name="fast")
        return jax.jit(jax.vmap(one, axis_name="slow"))

    rows = jnp.asarray(values((2, 4, 60)))
    mean, state = step("drop_worker")(rows.at[1, 2, 7].set(np.nan))
    of_zeros, _ = step("propagate")(rows.at[1, 2].set(0))
    np.testing.assert_allclose(mean, of_zeros * np.float32(8 / 7), rtol=1e-6, atol=1e-6)
    assert np.all(np.asarray(state.dropped) == 1)
    assert np.all(np.asarray(state.skipped) == 0)
    zero, state = step("skip")(rows.at[1, 2, 7].set(np.nan))
    assert is_zero(zero)
    assert np.all(np.asarray(state.skipped) == 1)


BY_GROUPS = {
    "top-k": fg.AllGather(CODECS["top-k 6 bits"]),
    "one bit": fg.AllGather(ONE_BIT),
    "two stages": fg.TwoStage(fg.Sign(), workers=2),
    "dense": fg.AllReduce(),
}


@functools.cache
def in_groups(name, policy="drop_worker", memory=fg.ErrorFeedback()):  # noqa: B008 (a value)
    exchange = fg.Hierarchical("fast", 4, BY_GROUPS[name], memory)
    tx = fg.compressed_pmean(exchange, axis_name=("slow", "fast"), non_finite=policy)
    return [
        jax.jit(jax.vmap(jax.vmap(function, axis_name="fast"), axis_name="slow"))
        for function in (tx.init, tx.update)
    ]


@pytest.mark.parametrize(
    "name", ["top-k", "one bit", *(pytest.param(n, marks=SLOW) for n in ("two stages", "dense"))]
)
def test_a_group_of_which_no_worker_counts_does_not_count(name):
    """The mean is that of the other group, and what the group had to send waits."""
    rows = jnp.asarray(values((2, 4, 60)))
    bad = rows.at[1, :, 7].set(np.nan)
    init, update = in_groups(name)
    _, before = update(rows, init(rows))
    _, after = update(bad, before)
    old, new = (row(state.exchange[0].shards.worker_rows.memory, 1) for state in (before, after))
    assert same(old, new)
    assert name == "dense" or np.any(jax.tree.leaves(old)[0])
    assert np.asarray(after.dropped).tolist() == [[4] * 4] * 2

    _, update = in_groups(name, memory=fg.NoMemory())
    _, as_usual = in_groups(name, "propagate", memory=fg.NoMemory())
    start = in_groups(name, memory=fg.NoMemory())[0](rows)
    mean, _ = update(bad, start)
    of_the_other, _ = as_usual(jnp.stack([rows[0], rows[0]]), start)
    np.testing.assert_allclose(mean, of_the_other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["top-k", "one bit"])
def test_what_groups_had_to_send_is_applied_or_held(name):
    """Σ g · mean + Σ over the workers of their group's residual = Σ of the finite gradients."""
    init, update = in_groups(name)
    state = init(jnp.zeros((2, 4, 60)))
    applied, wanted = np.zeros(60), np.zeros(60)
    everyone = [(i, j) for i in range(2) for j in range(4)]
    for seed, bad in enumerate([[], everyone[4:], everyone, everyone[2:5], everyone[:4], []]):
        rows = values((2, 4, 60), seed)
        good = [worker for worker in everyone if worker not in bad]
        spoil = jnp.asarray(rows).at[tuple(zip(*bad, strict=True))].set(np.inf) if bad else rows
        mean, state = update(jnp.asarray(spoil), state)
        applied += len(good) * np.asarray(mean[1, 2], np.float64)
        wanted += np.sum([np.asarray(rows[worker], np.float64) for worker in good], axis=0)
    (held,) = jax.tree.leaves(state.exchange[0].shards.worker_rows.memory)
    held = np.asarray(held, np.float64).reshape(2, 60)
    np.testing.assert_allclose(applied + 4 * held.sum(0), wanted, atol=1e-5 * abs(wanted).max())


# What holds over many steps: Σ g · mean + what is held = Σ of the finite gradients

LAW = {
    "gather": fg.AllGather(fg.chain(fg.TopK(fraction=0.1), fg.LogLevels(bits=5))),
    "signs": fg.AllGather(fg.Sign()),
    "random sum": fg.AllReduce(fg.RandomK(fraction=0.25)),
    "leaders": fg.SharedSupport(fg.chain(fg.Fft(block=8), fg.TopK(fraction=0.1))),
    "drift": fg.SharedSupport(fg.TopK(fraction=0.1), fg.exchanges.PredictedSupport()),
    "two stages": fg.TwoStage(fg.Sign(), workers=WORKERS),
    "two stages of few": fg.TwoStage(fg.TopK(k=20), workers=WORKERS),
    "one bit": ZERO_LESS["one bit"],
    "one bit of few": ZERO_LESS["one bit of few"],
    "sum of signs": ZERO_LESS["sum of signs"],
    "two stages of one bit": fg.TwoStage(ONE_BIT, workers=WORKERS),
    "two stages without zero": fg.TwoStage(NO_ZERO, workers=WORKERS),
    "low rank": fg.PowerSgd(rank=2),
    "low rank in turns": fg.AcpSgd(rank=2),
    "integers": fg.IntegerSum(workers=WORKERS, levels=7),
    "warm-up": fg.Scheduled({0: fg.PowerSgd(rank=2), 3: fg.AllGather(fg.TopK(k=9))}),
}
NARROW = ["gather", "two stages", "low rank", "low rank in turns"]
WHO_IS_BAD = [[], [2], [0, 1], [0, 1, 2, 3], [3], [0], [1, 2, 3], []]


@pytest.mark.parametrize(
    ("exchange", "dtype"),
    [
        *(pytest.param(exchange, "float32", id=name) for name, exchange in LAW.items()),
        *(pytest.param(LAW[name], "bfloat16", id=f"{name}, narrow") for name in NARROW),
    ],
)
def test_what_finite_workers_had_to_send_is_applied_or_held(exchange, dtype):
    """Σ_t g_t · mean_t + Σ_i e_i + w · s = Σ_t Σ over the g_t finite workers of grad_i.

    e_i is the residual of worker i, and s what the owners of shards hold.
    """
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), PAIR)
    init, update = mapped(exchange, "drop_worker", layout=BUCKETS)
    state = init(grads(tree=like))
    applied = wanted = 0.0
    for seed, bad in enumerate(WHO_IS_BAD):
        rows = grads(seed, like)
        good = [i for i in range(WORKERS) if i not in bad]
        mean, state = update(spoiled(rows, bad, leaf="ab"[seed % 2]), state)
        applied += len(good) * np.concatenate([np.asarray(mean[k][0], float) for k in PAIR])
        wanted += sum(np.concatenate([np.asarray(rows[k][i], float) for k in PAIR]) for i in good)
    residual = state.memory.worker_rows.residual
    held = np.concatenate([np.asarray(residual[k], float)[:, 0].sum(0) for k in PAIR])
    if isinstance(exchange, fg.TwoStage):  # buckets run from the last leaf to the first
        shards = [
            np.asarray(jax.tree.leaves(s.shards.worker_rows.memory)[0])
            for s in reversed(state.exchange)
        ]
        assert min(np.abs(s).max() for s in shards) > 0
        held = held + WORKERS * np.concatenate([s.reshape(8, 8) for s in shards])
    np.testing.assert_allclose(applied + held, wanted, atol=1e-4 * np.abs(wanted).max())
    assert counters(state) == ([1] * WORKERS, [8] * WORKERS)


def mixed(rng):
    """A gradient of each worker: leaves and workers of other scales, some of them zero."""
    scales = 10.0 ** rng.uniform(-4, 4, (2, WORKERS)) * rng.choice([0, 1, 1, 1], (2, WORKERS))
    return {
        leaf: (rng.standard_t(3, (WORKERS, 8, 8)) * own[:, None, None]).astype(np.float32)
        for leaf, own in zip(PAIR, scales, strict=True)
    }


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=SLOW) for i in range(1, 8))])
@ALL
def test_the_law_holds_for_gradients_of_any_scales(name, seed):
    """To float32 rounding of what there was in all, whoever is bad, for every exchange."""
    rng = np.random.default_rng(seed)
    init, update = mapped(EXCHANGES[name], "drop_worker")
    state, applied, wanted, whole, missing = init(grads()), 0.0, 0.0, 0.0, 0
    for _ in range(6):
        rows = mixed(rng)
        bad = [i for i in range(WORKERS) if rng.random() < 0.2]
        if name == "votes, noise of each":  # of a worker that is left out there is noise
            bad = []
        mean, state = update(spoiled(jax.tree.map(jnp.asarray, rows), bad), state)
        good = [i for i in range(WORKERS) if i not in bad]
        flat = np.concatenate([rows[leaf].reshape(WORKERS, -1) for leaf in PAIR], axis=1)
        moved = np.concatenate([np.asarray(mean[leaf][0], float).ravel() for leaf in PAIR])
        applied += len(good) * moved
        wanted += flat[good].astype(float).sum(0)
        whole += np.linalg.norm(flat[good].astype(float)) + len(good) * np.linalg.norm(moved)
        missing += len(bad) % WORKERS  # without anybody it is skipped
    residual = state.memory.worker_rows.residual
    held = np.concatenate([np.asarray(residual[leaf], float).sum(0).ravel() for leaf in PAIR])
    if isinstance(EXCHANGES[name], fg.TwoStage):
        (shards,) = jax.tree.leaves(state.exchange[0].shards.worker_rows.memory)
        held = held + WORKERS * np.asarray(shards, float).ravel()
    gap = np.linalg.norm(applied + held - wanted) / whole
    assert gap < 2.0**-23
    assert int(state.dropped[0]) == missing


def test_an_owner_that_is_dropped_still_keeps_its_shard_for_all():
    exchange = fg.TwoStage(
        fg.chain(fg.codecs.AlternatingSign(), fg.codecs.AdaComp(bin_size=4)), workers=WORKERS
    )
    init, update = mapped(exchange, "drop_worker")
    _, before = update(grads(), init(grads()))
    _, after = update(spoiled(grads(1), [2]), before)
    for old, new in zip(before.exchange, after.exchange, strict=True):
        assert same(row(old.own, 2), row(new.own, 2))
        for kept in ("memory", "learned"):
            was, became = (getattr(state.shards.worker_rows, kept) for state in (old, new))
            assert not same(row(was, 2), row(became, 2)), kept
        assert not same(row(old.own, 1), row(new.own, 1))


STATEFUL = {
    "adacomp": fg.AllGather(fg.codecs.AdaComp(bin_size=20)),
    "reused threshold": fg.AllGather(fg.Threshold(fraction=0.1, reuse=3)),
    "leader's threshold": fg.SharedSupport(fg.Threshold(fraction=0.1, reuse=3)),
    "warm-up": fg.Scheduled({0: fg.AllGather(fg.codecs.AdaComp(bin_size=20)), 9: fg.AllReduce()}),
}


@pytest.mark.parametrize("exchange", STATEFUL.values(), ids=STATEFUL)
def test_what_codecs_keep_of_a_dropped_worker_stays(exchange):
    init, update = mapped(exchange, "drop_worker")
    _, before = update(grads(), init(grads()))
    _, after = update(spoiled(grads(5), [2]), before)
    old, new = per_worker(before.exchange), per_worker(after.exchange)
    assert same(row(old, 2), row(new, 2))
    assert not same(row(old, 1), row(new, 1))


@pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)
def test_any_memory_of_a_dropped_worker_stays(memory):
    init, update = mapped(fg.AllGather(fg.TopK(k=9)), "drop_worker", memory=memory)
    _, before = update(grads(), init(grads()))
    mean, after = update(spoiled(grads(1), [2]), before)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((mean, after)))
    assert same(row(before.memory, 2), row(after.memory, 2))
    if memory != fg.NoMemory():
        assert not same(row(before.memory, 1), row(after.memory, 1))


def test_a_dropped_leader_chooses_where_and_the_others_what():
    """The positions are those of zeros; the values there are the mean of the others."""
    exchange = fg.SharedSupport(fg.TopK(k=10), fg.exchanges.LeaderSupport(worker=0))
    init, update = mapped(exchange, "drop_worker", memory=fg.NoMemory())
    rows = grads()
    mean, _ = update(spoiled(rows, [0]), init(rows))
    found = np.concatenate([np.asarray(mean[leaf][3]) for leaf in PAIR])
    others = np.concatenate([np.asarray(rows[leaf])[1:].mean(0) for leaf in PAIR])
    chosen = found != 0
    assert chosen.sum() == 10
    np.testing.assert_allclose(found[chosen], others[chosen], rtol=1e-5)


def test_what_a_group_keeps_is_not_that_of_a_worker():
    """The codec of a hierarchy sees the mean of four workers, of which three may count."""
    exchange = fg.Hierarchical("fast", 4, fg.AllGather(fg.codecs.AdaComp(bin_size=4)))
    tx = fg.compressed_pmean(exchange, axis_name=("slow", "fast"), non_finite="drop_worker")

    def twice(function):
        return jax.jit(jax.vmap(jax.vmap(function, axis_name="fast"), axis_name="slow"))

    rows, update = jnp.asarray(values((2, 4, 60))), twice(tx.update)
    _, before = update(rows, twice(tx.init)(rows))
    _, after = update(rows.at[1, 2, 7].set(np.nan), before)
    old, new = (state.exchange[0].shards.worker_rows for state in (before, after))
    for was, became in ((old.memory, new.memory), (old.learned, new.learned)):
        assert jax.tree.leaves(was)
        assert not same(row(row(was, 1), 2), row(row(became, 1), 2))


def test_a_drift_knows_the_mean_of_those_that_count():
    """What it keeps of a value that was sent is its mean, or one step would outweigh others."""
    exchange = fg.SharedSupport(fg.TopK(k=10), fg.exchanges.PredictedSupport())
    init, update = mapped(exchange, "drop_worker", memory=fg.NoMemory())
    mean, state = update(spoiled(grads(), [1, 2]), init(grads()))
    mean = np.abs(np.concatenate([np.asarray(mean[leaf][0]).ravel() for leaf in PAIR]))
    rate = np.asarray(state.exchange[0].shared.support[0].rate[0])
    assert np.count_nonzero(mean) == 10
    np.testing.assert_allclose(rate[mean > 0], mean[mean > 0], rtol=1e-6)


# In what runs on devices

MAPPED = [
    "dense",
    "counted sum",
    "gather top-k",
    "shared support",
    "shared by the mean",
    "two stages",
    "integer sum",
    "votes",
    "votes, summed",
    "votes, noise of each",
    "low rank",
    "low rank in turns",
    "warm-up",
    "recovery",
]


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=SLOW)])
@pytest.mark.parametrize("name", sample(MAPPED))
def test_under_shard_map_it_is_the_same(name, check_vma):
    exchange = EXCHANGES[name]
    init, update = sharded(exchange, "drop_worker", check_vma=check_vma, layout=BUCKETS)
    init_other, other = mapped(exchange, "drop_worker", layout=BUCKETS)
    state, state_other = init(jax.tree.map(jnp.zeros_like, row(grads(), 0))), init_other(grads())
    for seed, bad in enumerate([[], [1], [0, 1, 2, 3], [0, 3]]):
        mean, state = update(spoiled(grads(seed), bad), state)
        mean_other, state_other = other(spoiled(grads(seed), bad), state_other)
        for leaf in PAIR:
            shards = [np.asarray(s.data).tobytes() for s in mean[leaf].addressable_shards]
            assert len(set(shards)) == 1
            np.testing.assert_allclose(mean[leaf], mean_other[leaf][0], rtol=1e-4, atol=1e-5)
    assert (int(state.skipped), int(state.dropped)) == (1, 3)


COSTS = {  # bytes in a sum that is made anyway
    "gather top-k": 0,
    "two stages": 0,
    "dense": 4,
    "counted sum": 4,
    "shared support": 4,
    "shared by the mean": 4,
    "integer sum": 4,
    "votes, summed": 4,
    "votes, noise of each": 4,
    "low rank": 4,
    "low rank in turns": 4,
}


@pytest.mark.parametrize("name", COSTS)
def test_nothing_more_is_sent_than_a_value_in_a_sum(name):
    plain, skip, drop = (
        collectives(EXCHANGES[name], policy, layout=fg.Layout("leaf"))
        for policy in ("propagate", "skip", "drop_worker")
    )
    assert [c.kind for c in plain] == [c.kind for c in skip] == [c.kind for c in drop]
    assert sum(c.bytes for c in skip) == sum(c.bytes for c in plain)
    assert sum(c.bytes for c in drop) == sum(c.bytes for c in plain) + COSTS[name]


def test_an_exchange_that_does_not_tell_costs_one_sum_of_four_bytes():
    plain, drop = (
        collectives(Plain(), policy, layout=BUCKETS) for policy in ("propagate", "drop_worker")
    )
    assert sum(c.bytes for c in drop) == sum(c.bytes for c in plain) + 4
    assert all(c.kind == "all-reduce" for c in drop)


PARTLY_TOLD = fg.Scheduled({0: Plain(), 1: fg.AllGather(fg.Identity()), 2: fg.AllReduce()})


@pytest.mark.parametrize("check_vma", [True, False])
def test_one_program_may_have_exchanges_that_tell_and_others(check_vma):
    tx = fg.compressed_pmean(PARTLY_TOLD, axis_name=AXIS, non_finite="drop_worker")
    init, update = train_step(tx, WORKERS, check_vma=check_vma, like=PAIR)
    state = init(jax.tree.map(jnp.zeros_like, row(grads(), 0)))
    for seed in range(3):
        mean, state = update(spoiled(grads(seed), [1]), state)
        for leaf in PAIR:
            wanted = np.asarray(grads(seed)[leaf])[[0, 2, 3]].mean(0)
            np.testing.assert_allclose(mean[leaf], wanted, rtol=1e-5, atol=1e-6)
        assert (int(state.skipped), int(state.dropped)) == (0, seed + 1)


def test_a_hierarchy_costs_one_sum_of_four_bytes_more():
    mesh = jax.make_mesh((2, 4), ("slow", "fast"), axis_types=(AxisType.Auto,) * 2)
    axes = ("slow", "fast")

    def found(policy):
        tx = fg.compressed_pmean(
            HIERARCHIES["slow gather"], axis_name=axes, layout=BUCKETS, non_finite=policy
        )
        state = fg.init_state(tx, {"a": jnp.zeros(60), "b": jnp.zeros(60)}, mesh, axes)
        specs = fg.state_specs(state, axes)

        def step(rows, state):
            return tx.update(jax.tree.map(lambda a: a[0], rows), state)

        run = jax.shard_map(step, mesh=mesh, in_specs=(P(axes), specs), out_specs=(P(), specs))
        rows = {"a": jnp.ones((8, 60)), "b": jnp.ones((8, 60))}
        return fg.audit(jax.jit(run).lower(rows, state).compile())

    plain, drop = found("propagate"), found("drop_worker")
    assert sum(c.bytes for c in drop) == sum(c.bytes for c in plain) + 4
    assert len(drop) == len(plain) + 1


def model_step(policy, exchange=EXCHANGES["gather top-k"]):
    """A step of 4 workers with 2 shards each, and its state."""
    shape = np.array(jax.devices()).reshape(4, 2)
    mesh = Mesh(shape, (AXIS, "model"), axis_types=(AxisType.Auto,) * 2)
    tx = fg.compressed_pmean(exchange, fg.ErrorFeedback(), axis_name=AXIS, non_finite=policy)
    param_specs = {"w": P("model")}
    params = {"w": jnp.zeros(40)}
    state = fg.init_state(tx, params, mesh, AXIS, param_specs)
    specs = fg.state_specs(state, AXIS, param_specs)

    def step(rows, state):
        return tx.update({"w": rows[0]}, state)

    wrapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(AXIS, "model"), specs), out_specs=(param_specs, specs)
    )
    return jax.jit(wrapped), state


@pytest.mark.parametrize("name", ["gather top-k", "dense", "two stages", "shared support"])
def test_a_worker_is_dropped_with_all_its_shards(name):
    run, state = model_step("drop_worker", EXCHANGES[name])
    rows = jnp.asarray(values((4, 40)))
    _, before = run(rows, state)
    mean, after = run(rows.at[2, 33].set(np.nan), before)
    assert np.all(np.isfinite(mean["w"]))
    assert (int(after.skipped), int(after.dropped)) == (0, 1)
    old, new = (np.asarray(s.memory.worker_rows.residual["w"]) for s in (before, after))
    np.testing.assert_array_equal(old[2], new[2])
    if name == "dense":
        np.testing.assert_allclose(mean["w"], rows[np.array([0, 1, 3])].mean(0), rtol=1e-5)
    else:
        assert np.all(np.any(old != new, axis=1) == [True, True, False, True])


@pytest.mark.parametrize("name", ["gather top-k", "dense"])
def test_shards_agree_on_a_worker_by_two_sums_of_four_bytes(name):
    def over_shards(policy):
        run, state = model_step(policy, EXCHANGES[name])
        found = fg.audit(run.lower(jnp.ones((4, 40)), state).compile())
        return sum(c.bytes for c in found if c.workers == 2)

    assert over_shards("drop_worker") == over_shards("propagate") + 8
    assert over_shards("skip") == over_shards("propagate")


# What must not be taken for a bad gradient, and what must not follow from one


@pytest.mark.parametrize(
    "codec", [fg.TopK(k=9), CODECS["range float fixed"]], ids=["top-k", "one that hides NaN"]
)
@pytest.mark.parametrize("policy", ["skip", "drop_worker"])
def test_a_worker_with_the_state_of_another_is_never_dropped(policy, codec):
    init, update = mapped(fg.AllGather(codec), policy)
    _, before = update(grads(), init(grads()))
    wrong = jax.tree.map(lambda a: a[np.array([1, 0, 2, 3])], (before.memory, before.worker))
    state = before._replace(memory=wrong[0], worker=wrong[1])
    for skipped in (1, 2):
        mean, state = update(grads(1), state)
        assert is_zero(mean)
        assert counters(state) == ([skipped] * WORKERS, [0] * WORKERS)


@pytest.mark.parametrize("policy", ["skip", "drop_worker"])
def test_a_mean_beyond_a_leaf_is_skipped(policy):
    init, update = mapped(fg.AllReduce(), policy)
    rows = {"w": jnp.full((WORKERS, 3), 6e4, jnp.float16)}
    state = init(rows)
    held = jax.tree.map(lambda a: a + 6e4, state.memory)
    mean, after = update(rows, state._replace(memory=held))
    assert is_zero(mean)
    assert counters(after) == ([1] * WORKERS, [0] * WORKERS)
    assert same(after.memory, held)


def test_a_dropped_workers_loss_tells_recovery_nothing():
    """Its NaN would end compression for the run; that of a worker that counts does."""
    ladder = (fg.AllGather(fg.TopK(k=5)), fg.AllReduce())
    exchange = fg.Fallback(ladder, tolerance=0.5, smoothing=0.0)
    tx = fg.compressed_pmean(exchange, axis_name=AXIS, non_finite="drop_worker")
    update = jax.jit(jax.vmap(lambda g, s, v: tx.update(g, s, value=v), axis_name=AXIS))
    rows = jnp.asarray(values((WORKERS, 40)))
    state, seen = jax.jit(jax.vmap(tx.init))(rows), []
    losses = np.array([1.0, 1.0, 5.0, 1.0])  # without worker 2 the mean is 1
    for bad_gradient, bad_loss in ((0, 0), (1, 1), (1, 0), (0, 1)):
        loss = np.where(np.arange(WORKERS) == 2, np.nan if bad_loss else 5.0, losses)
        grad = rows.at[2, 0].set(np.nan) if bad_gradient else rows
        _, state = update(grad, state, jnp.asarray(loss, jnp.float32))
        inner = state.exchange[0].shared
        seen.append((float(inner.loss[0]), int(inner.level[0])))
    assert seen[:3] == [(2.0, 0), (1.0, 0), (1.0, 0)]
    assert seen[3][1] == 1


@pytest.mark.parametrize(
    ("codec", "first"),
    [
        (fg.TopK(k=9), fg.AllGather),
        (ONE_BIT, fg.AllGather),
        (ONE_BIT, lambda codec: fg.TwoStage(codec, workers=WORKERS)),
    ],
    ids=["top-k", "one bit", "one bit in two stages"],
)
def test_the_error_is_that_of_the_workers_that_count(codec, first):
    exchange = fg.Fallback((first(codec), fg.AllReduce()), max_error=9.0)
    init, update = mapped(exchange, "drop_worker", memory=fg.NoMemory(), track_error=True)
    rows = grads()
    _, state = update(spoiled(rows, [2]), init(rows))
    three = [np.asarray(rows[k])[[0, 1, 3]].reshape(3, -1) for k in PAIR]
    sizes = np.sort(np.abs(np.concatenate(three, axis=1)), axis=1)
    lost = sizes - 2.0 if codec == ONE_BIT else sizes[:, :-9]
    wanted = np.sqrt(np.square(lost).sum() / np.square(sizes).sum())
    np.testing.assert_allclose(state.error, wanted, rtol=1e-5)
    assert np.all(np.asarray(state.exchange[0].shared.level) == 0)


def test_who_is_dropped_ends_no_level():
    rows = jnp.asarray([[8.0, -8.0, 8.0, -8.0]] * 3 + [[np.nan] * 4])
    ladder = fg.AllGather(fg.codecs.DynamicSign(scale=8.0, decay=0.99)), fg.AllReduce()
    tx = fg.compressed_pmean(
        fg.Fallback(ladder, max_error=0.55), axis_name=AXIS, non_finite="drop_worker"
    )
    state = jax.vmap(lambda g: tx.update(g, tx.init(g))[1], axis_name=AXIS)(rows)
    assert not np.any(state.skipped)
    assert not np.any(state.exchange[0].shared.level)


def test_what_comes_behind_sees_zeros_or_the_mean_of_the_others():
    """`apply_if_finite` finds nothing behind a policy; Adam's moments decay in a skipped step."""
    moments = {}
    for policy in ("propagate", "skip", "drop_worker"):
        tx = optax.chain(
            fg.compressed_pmean(fg.AllReduce(), axis_name=AXIS, non_finite=policy),
            optax.apply_if_finite(optax.scale_by_adam(), 9),
        )
        update = jax.jit(jax.vmap(tx.update, axis_name=AXIS))
        rows = jnp.asarray(values((WORKERS, 20)))
        _, state = update(rows, jax.jit(jax.vmap(tx.init))(rows))
        out, state = update(rows.at[2, 3].set(np.nan), state)
        moments[policy] = np.asarray(state[1].inner_state.mu[0])
        assert np.all(np.isfinite(out))
        assert np.all(np.asarray(state[1].total_notfinite) == (policy == "propagate"))
    mu = 0.1 * np.asarray(rows).mean(0)
    np.testing.assert_allclose(moments["propagate"], mu, rtol=1e-5)
    np.testing.assert_allclose(moments["skip"], 0.9 * mu, rtol=1e-5)
    three = 0.1 * np.asarray(rows)[[0, 1, 3]].mean(0)
    np.testing.assert_allclose(moments["drop_worker"], 0.9 * mu + three, rtol=1e-5, atol=1e-6)


def test_metrics_show_what_was_dropped():
    init, update = mapped(fg.AllReduce(), "drop_worker")
    state = init(grads())
    for bad in ([1, 2], [], [0]):
        _, state = update(spoiled(grads(), bad), state)
    found = fg.metrics(jax.tree.map(lambda a: a[0], state))
    assert (int(found["dropped"]), int(found["skipped"])) == (3, 0)


def test_a_count_over_model_shards_stays_positive():
    most = jnp.full(8, 2**31 - 1, jnp.int32)
    found = jax.vmap(lambda own: _non_finite._sum(own, ("model",)), axis_name="model")(most)
    assert np.all(found == (2**31 - 1) // 8 * 8)
