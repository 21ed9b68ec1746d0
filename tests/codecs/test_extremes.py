"""Values at the ends of float32, values that are all equal, and codecs in every combination."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from cases import CODECS, sample, values
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from messages import compress, decompress
from parallel import AXIS, everywhere

import fftgrad as fg
from fftgrad.codecs._chain import counts_overflow

WORKERS = 4
STEP = fg.Step.of(3)


@functools.partial(jax.jit, static_argnums=0)
def both_ways(codec, x):
    """What a codec makes of an array."""
    return fg.decompress(codec, fg.compress(codec, x, step=STEP), x, step=STEP)


def round_trip(codec, x):
    return np.asarray(both_ways(codec, x))


@functools.cache
def program(tx, workers):
    """`init` and `update` of all workers, compiled."""
    return jax.vmap(tx.init), everywhere("vmap", lambda g, s: tx.update(g, s), workers)


def updates(tx, rows, steps=1):
    """The mean of each step, of the first worker, and the last state."""
    init, update = program(tx, len(rows))
    state, means = init(rows), []
    for _ in range(steps):
        mean, state = update(rows, state)
        assert all(np.array_equal(row, mean[0], equal_nan=True) for row in mean)
        means.append(np.asarray(mean[0]))
    return means, state


# Equal values


@pytest.fixture
def as_users_compile_it():
    """With the optimizations that the suite goes without: they change how values are rounded."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


EQUAL = [0.1, 1 / 3, -3.7, 7.0, 1e-20, 3e20]
SIZES = [2, 64, 100, 1_000, 5_000]


@pytest.mark.usefixtures("as_users_compile_it")
@pytest.mark.parametrize("n", SIZES)
def test_equal_values_survive_ternary(n):
    optimized = jax.jit(lambda x: both_ways.__wrapped__(fg.Ternary(), x))
    for value in EQUAL:
        x = np.full(n, value, np.float32)
        np.testing.assert_allclose(optimized(x), x, rtol=1e-5)


@pytest.mark.usefixtures("as_users_compile_it")
@pytest.mark.parametrize("n", SIZES)
def test_equal_values_survive_an_integer_sum(n):
    tx = fg.compressed_pmean(fg.IntegerSum(WORKERS), axis_name=AXIS)
    init, update = jax.vmap(tx.init), everywhere("vmap", lambda g, s: tx.update(g, s), WORKERS)
    for value in EQUAL:
        rows = jnp.full((WORKERS, n), value, jnp.float32)
        mean, _ = update(rows, init(rows))
        np.testing.assert_allclose(mean, rows, rtol=1e-5)


def test_almost_equal_values_survive_ternary():
    """Their deviation is rounding noise, too small to clip by."""
    x = np.float32(0.1) * (1 + np.float32(1e-6) * values((500,)))
    np.testing.assert_allclose(round_trip(fg.Ternary(), x), x, rtol=1e-4)


# The ends of the range

QUANTIZERS = {
    "levels": fg.UniformLevels(bits=4, bucket=64),
    "levels max": fg.UniformLevels(bits=3, bucket=64, norm="max"),
    "ternary": fg.Ternary(clip=None),
    "ternary clipped": fg.Ternary(),
    "lloyd-max": fg.codecs.LloydMax(bits=2, block=64),
    "sign": fg.Sign(),
    "range float": fg.RangeFloat(bits=8),
}


def spiky():
    """One value of 1.5 among small ones: times 2^127 both it and the length are below 2^128."""
    x = 0.05 * values((64,)) / np.abs(values((64,))).max()
    x[37] = -1.5
    return x.astype(np.float32)


@pytest.mark.parametrize("exponent", [-100, 100, 126, 127])
@pytest.mark.parametrize("codec", QUANTIZERS.values(), ids=QUANTIZERS)
def test_a_quantizer_does_the_same_at_any_scale(codec, exponent):
    scale = np.float32(2.0) ** np.float32(exponent)
    expected = round_trip(codec, spiky())
    assert np.any(expected)
    np.testing.assert_allclose(
        round_trip(codec, scale * spiky()) / scale, expected, rtol=1e-5, atol=1e-12
    )


@pytest.mark.parametrize("clip", [None, 2.5])
def test_an_integer_sum_does_the_same_at_any_scale(clip):
    tx = fg.compressed_pmean(fg.IntegerSum(WORKERS, clip=clip), axis_name=AXIS)
    rows = np.stack([np.roll(spiky(), i // 2) for i in range(WORKERS)])
    (expected,), _ = updates(tx, rows)
    assert np.any(expected)
    for exponent in (-100, 100, 126, 127):
        scale = np.float32(2.0) ** np.float32(exponent)
        (mean,), _ = updates(tx, scale * rows)
        np.testing.assert_allclose(mean / scale, expected, rtol=1e-5, atol=1e-12)


def test_the_mean_of_a_group_is_finite_where_its_values_are():
    exchange = fg.Hierarchical("fast", 4, fg.AllReduce())
    tx = fg.compressed_pmean(exchange, axis_name=("slow", "fast"))

    def one(grad):
        return tx.update(grad, tx.init(grad))[0]

    run = jax.vmap(jax.vmap(one, axis_name="fast"), axis_name="slow")
    mean = jax.jit(run)(jnp.full((2, 4, 10), 2e38))
    np.testing.assert_allclose(mean, 2e38, rtol=1e-2)


@pytest.mark.parametrize(("bits", "mantissa"), [(10, 1), (12, 3), (6, 2), (16, 7)])
def test_any_codes_decode_to_finite_numbers(bits, mantissa):
    """What arrives may be anything; with few mantissa bits there are more codes than numbers."""
    codec = fg.RangeFloat(bits=bits, mantissa=mantissa)
    for largest in (1e-30, 1.0, 3e38):
        x = np.full(5_000, largest, np.float32)
        payload = compress(codec, x)
        words = np.random.default_rng(0).integers(0, 2**32, payload.main.shape, np.uint32)
        garbage = payload._replace(main=jnp.asarray(words))
        assert np.all(np.isfinite(decompress(codec, garbage, x)))


WITH_SCALES = {
    "levels": fg.UniformLevels(bits=4, bucket=64),
    "bin means": fg.codecs.BinMeans(),
    "lloyd-max": fg.codecs.LloydMax(bits=2, block=64),
    "ternary": fg.Ternary(),
    "log levels": fg.LogLevels(bits=4),
}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("codec", WITH_SCALES.values(), ids=WITH_SCALES)
def test_a_scale_that_is_none_decodes_to_no_number(codec, bad):
    """What arrives may be anything; the last of the numbers beside the codes counts for all."""
    x = spiky()
    payload = compress(codec, x, step=STEP)
    payload = payload._replace(side=payload.side.at[-1].set(bad))
    assert np.all(np.isnan(decompress(codec, payload, x, step=STEP)))


def test_what_is_beyond_a_scale_is_counted_and_so_is_a_nan():
    x = jnp.array([0.5, -2.0, np.nan, np.inf, -1.0])
    assert (
        fg.codecs.DynamicSign(scale=1.0, decay=0.9)
        .compress(x, (), STEP._replace(number=0))
        .overflow
        == 3
    )


def test_what_a_transform_cannot_hold_makes_a_bad_step():
    tx = fg.compressed_pmean(
        fg.AllGather(fg.chain(fg.Dct(block=16), fg.TopK(k=4))), fg.ErrorFeedback(), axis_name=AXIS
    )
    state = jax.vmap(tx.init)(jnp.zeros((2, 64)))
    update = everywhere("vmap", tx.update, 2)
    mean, after = update(jnp.full((2, 64), 3e38), state)
    assert np.isnan(mean).any()
    assert np.asarray(after.skipped).tolist() == [1, 1]
    mean, _ = update(jnp.ones((2, 64)), after)
    np.testing.assert_allclose(mean, 1.0, rtol=1e-5)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_a_cast_keeps_signs_and_sizes(name):
    x = np.array([1.0, -1.0, 0.0, 2.0, -2.0, 1.5], np.float32)
    np.testing.assert_allclose(round_trip(fg.Cast(name), x), x, rtol=0.25)


BOUNDED = {
    "heavy tail": values((5000,)),
    "equal": np.full(5000, 3.0, np.float32),
    "zero": np.zeros(5000, np.float32),
    "two values": np.where(np.arange(5000) % 3, 1.0, -2.0).astype(np.float32),
    "one-hot": np.eye(1, 5000, 137, dtype=np.float32)[0],
    "dynamic range": np.exp(np.random.default_rng(0).normal(0, 9, 5000)).astype(np.float32),
}


@functools.partial(jax.jit, static_argnums=0)
def threshold(codec, x):
    return codec.compress(x, codec.init(x), fg.Step()).state.threshold


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize("fraction", [0.001, 0.02, 0.4])
@pytest.mark.parametrize("x", BOUNDED.values(), ids=BOUNDED)
def test_a_threshold_is_that_of_halving_the_bounds(x, fraction):
    codec, k = fg.Threshold(fraction=fraction), reference.kept(fraction, x.size)
    found = threshold(codec, x)
    size = np.abs(x)
    low, high = np.float32(np.mean(size, dtype=np.float64)), size.max()
    low = low if np.sum(size > low) >= k else np.float32(0)
    for halvings in range(20):
        if k <= np.sum(size > low) <= 2 * k:
            break
        bits = np.array([low, high], np.float32).view(np.int32)
        by_bits = (bits[0] + (bits[1] - bits[0]) // 2).view(np.float32)
        middle = np.float32(0.5) * low + np.float32(0.5) * high if halvings < 8 else by_bits
        low, high = (middle, high) if np.sum(size > middle) >= k else (low, middle)
    np.testing.assert_allclose(found, low, rtol=1e-5)


@pytest.mark.usefixtures("platform")
def test_a_threshold_is_found_however_far_the_largest_is_from_the_others():
    codec, k = fg.Threshold(fraction=0.01), 10
    run = functools.partial(both_ways, codec)
    for exponent in range(38):
        for seed in range(4):
            x = values((1000,), seed=seed)
            x[900] = 10.0**exponent
            kept = np.flatnonzero(run(x))
            largest = np.argsort(-np.abs(x))
            assert k <= kept.size <= 2 * k, exponent
            assert set(kept) == set(largest[: kept.size]), exponent


def test_behind_feedback_one_large_value_keeps_no_other_away():
    tx = fg.compressed_pmean(
        fg.AllGather(fg.Threshold(fraction=0.01)), fg.ErrorFeedback(), axis_name=AXIS
    )
    rows = np.stack([values((1000,), seed=seed) for seed in range(2)])
    rows[:, 900] = 1e7
    means, _ = updates(tx, rows, steps=30)
    sent = [set(np.flatnonzero(mean)) for mean in means]
    assert all(900 in positions for positions in sent)
    assert len(set.union(*sent)) > 100


@pytest.mark.parametrize("search", ["binary", "exact"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_threshold_keeps_what_is_not_finite_wherever_it_is(search, bad):
    codec = fg.Threshold(fraction=0.1, search=search)
    run = functools.partial(both_ways, codec)
    hidden = []
    for position in range(90):
        x = values((90,))
        x[position] = bad
        if np.all(np.isfinite(run(x))):
            hidden.append(position)
    assert hidden == []


def test_an_exact_threshold_sends_the_largest_and_no_zeros():
    codec = fg.Threshold(fraction=0.1, search="exact")
    x = values((400,))
    y = round_trip(codec, x)
    largest = np.sort(np.argsort(-np.abs(x))[:40])
    assert set(largest) <= set(np.flatnonzero(y))
    np.testing.assert_array_equal(y[largest], x[largest])
    few = np.where(np.arange(400) % 100 == 7, x, 0).astype(np.float32)
    np.testing.assert_array_equal(round_trip(codec, few), few)


def test_quantized_redsync_sends_the_best_of_a_layer_not_the_first():
    """A layer of 1.6 MB: of its positive values, the 400 largest must be among what is sent."""
    tx = fg.compressed_pmean(fg.methods.redsync(0.001, quantize=True), axis_name=AXIS)
    row = values((400_000,))
    (mean,), _ = updates(tx, np.stack([row] * 2))
    best = np.argsort(-row)[:400]
    sent = np.flatnonzero(mean)
    assert sent.size <= 800
    missed = set(best.tolist()) - set(sent.tolist())
    assert len(missed) == 0


# Chains with two linear stages in front

CHAINS = {
    "random-k of hadamard, levels": fg.chain(
        fg.Hadamard(block=8), fg.RandomK(k=16), fg.UniformLevels(bits=4)
    ),
    "random-k of spectra": fg.chain(fg.Fft(block=16), fg.RandomK(k=16)),
    "random-k of spectra, range float": fg.chain(
        fg.Fft(block=16), fg.RandomK(k=16), fg.RangeFloat(bits=8)
    ),
    "top-k of two transforms": fg.chain(fg.Dct(block=16), fg.Hadamard(block=16), fg.TopK(k=12)),
    "two transforms, levels": fg.chain(
        fg.Dct(block=16), fg.Hadamard(block=16), fg.UniformLevels(bits=4)
    ),
    "two transforms": fg.chain(fg.Dct(block=16), fg.Hadamard(block=16)),
    "three transforms": fg.chain(
        fg.Dct(block=16), fg.Hadamard(block=16), fg.Fft(block=16), fg.TopK(k=12)
    ),
}
AROUND = {
    "gather": fg.AllGather,
    "two stages": lambda codec: fg.TwoStage(codec, workers=WORKERS),
    "piecewise": lambda codec: fg.Scheduled({0: fg.AllGather(codec)}),
}


def assert_mean_is_that_of_what_was_sent(exchange, rows):
    """What was sent is what is missing from the residual."""
    tx = fg.compressed_pmean(exchange, fg.ErrorFeedback(), axis_name=AXIS)
    (mean,), state = updates(tx, rows)
    sent = rows - np.asarray(state.memory.worker_rows.residual).reshape(rows.shape)
    expected = sent.astype(np.float64).mean(0)
    np.testing.assert_allclose(mean, expected, atol=1e-4)
    assert np.any(mean)


@pytest.mark.parametrize(("chain", "around"), sample(itertools.product(CHAINS, AROUND), set))
def test_two_linear_stages_in_front_work_in_every_exchange(chain, around):
    exchange = AROUND[around](CHAINS[chain])
    assert_mean_is_that_of_what_was_sent(exchange, values((WORKERS, 128)))


SHARED = ["top-k of two transforms", "three transforms", "two transforms"]


@pytest.mark.parametrize("chain", SHARED)
def test_two_linear_stages_in_front_work_in_a_shared_support(chain):
    exchange = fg.SharedSupport(CHAINS[chain])
    assert_mean_is_that_of_what_was_sent(exchange, values((WORKERS, 128)))


@pytest.mark.parametrize("name", ["random-k of spectra", "two transforms"])
def test_two_linear_stages_are_summed(name):
    assert_mean_is_that_of_what_was_sent(fg.AllReduce(CHAINS[name]), values((WORKERS, 128)))


def test_top_k_takes_a_chain_of_transforms():
    transform = fg.chain(fg.Dct(block=16), fg.Hadamard(block=16))
    tx = fg.compressed_pmean(fg.methods.top_k(0.1, transform=transform), axis_name=AXIS)
    (mean,), _ = updates(tx, values((WORKERS, 128)))
    assert np.all(np.isfinite(mean))
    assert np.any(mean)


# Any chain

real_transforms = st.one_of(
    st.sampled_from([4, 16, 64]).map(lambda b: fg.Dct(block=b)),
    st.sampled_from([4, 16, 64]).map(lambda b: fg.Hadamard(block=b)),
)
spectra = st.sampled_from([4, 16, 64, None]).map(lambda b: fg.Fft(block=b))
fractions = st.sampled_from([0.05, 0.3, 1.0])
selectors = st.one_of(
    fractions.map(lambda f: fg.TopK(fraction=f)),
    st.sampled_from([4, 10, 32]).map(lambda c: fg.ChunkTopK(chunk=c)),
    fractions.map(lambda f: fg.RandomK(fraction=f)),
    fractions.map(lambda f: fg.RandomK(fraction=f, rescale=True)),
    st.sampled_from([0.05, 0.3]).map(lambda f: fg.Threshold(fraction=f)),
)
range_floats = st.builds(
    lambda bits, rounding: fg.RangeFloat(bits=bits, rounding=rounding),
    st.integers(3, 10),
    st.sampled_from(["nearest", "truncate", "stochastic"]),
)
real_quantizers = st.one_of(
    range_floats,
    st.just(fg.Sign()),
    st.just(fg.Cast("bfloat16")),
    st.integers(2, 6).map(lambda bits: fg.UniformLevels(bits=bits, bucket=40)),
    st.sampled_from([None, 2.5]).map(lambda clip: fg.Ternary(clip=clip)),
    st.integers(1, 4).map(lambda bits: fg.codecs.LloydMax(bits=bits, block=32)),
)


@st.composite
def chains(draw):
    """Up to two real transforms, perhaps a spectrum, a selector, and a quantizer at the end."""
    stages = draw(st.lists(real_transforms, max_size=2))
    complex_ = draw(st.booleans())
    if complex_:
        stages.append(draw(spectra))
    stages += draw(st.lists(selectors, max_size=1))
    stages += draw(st.lists(range_floats if complex_ else real_quantizers, max_size=1))
    return fg.chain(*stages)


def draws(codec):
    """Whether it rounds by chance: another program may then round a value to the other side."""
    return any(word in repr(codec) for word in ("stochastic", "UniformLevels", "Ternary"))


# Each example is a whole program.
@settings(max_examples=settings.default.max_examples // 2)
@given(codec=chains(), n=st.sampled_from([1, 33, 130]))
def test_any_chain_is_gathered_to_the_mean_of_what_it_decodes_to(codec, n):
    exchange = fg.AllGather(codec)

    def one(x):
        out = exchange.mean(x, exchange.init(x), fg.exchanges.Channel(AXIS, STEP))
        payload = fg.compress(codec, x, step=STEP)
        return out.mean, x - out.error, payload, fg.decompress(codec, payload, x, step=STEP)

    rows = jnp.asarray(values((2, n)))
    mean, sent, payload, own = everywhere("vmap", one, 2)(rows)
    assert mean.shape == sent.shape == own.shape == rows.shape
    np.testing.assert_allclose(mean[0], np.mean(sent, axis=0), rtol=1e-4, atol=1e-4)
    if not draws(codec):
        np.testing.assert_allclose(sent, own, rtol=1e-4, atol=1e-4)
    leaves = jax.tree.leaves((payload.main, payload.side))
    nbytes = sum(-(-leaf[0].nbytes // 4) * 4 for leaf in leaves)
    assert fg.wire_bytes(codec, rows[0]) == fg.wire_bytes(exchange, rows[0]) == 4 + nbytes


# State of a stage, in two stages


def test_two_stages_of_one_sided_values_send_the_negative_ones_too():
    codec = fg.chain(fg.codecs.AlternatingSign(), fg.TopK(k=4))
    tx = fg.compressed_pmean(fg.TwoStage(codec, workers=2), fg.ErrorFeedback(), axis_name=AXIS)
    row = np.array([1.0, -1.0, 2.0, -2.0], np.float32)
    means, state = updates(tx, np.stack([row, row]), steps=6)
    applied = np.sum(means, axis=0)
    assert np.all(applied * row > 0)
    left = np.asarray(state.memory.worker_rows.residual).mean(0).ravel()
    np.testing.assert_allclose(applied + left, 6 * row, atol=1e-5)


# Overflow

TOO_LARGE = {
    "gather": fg.AllGather(fg.Cast("float16")),
    "gather, last of a chain": fg.AllGather(fg.chain(fg.TopK(k=12), fg.Cast("float16"))),
    "gather, first of a chain": fg.AllGather(fg.chain(fg.Fft(half=True), fg.TopK(k=4))),
    "gather, second of three": fg.AllGather(
        fg.chain(fg.Fft(half=True), fg.TopK(k=4), fg.RangeFloat(bits=8))
    ),
    "sum": fg.AllReduce(fg.Fft(half=True)),
    "sum of a chain": fg.AllReduce(fg.chain(fg.Fft(half=True), fg.RandomK(k=4))),
    "leader": fg.SharedSupport(fg.chain(fg.Fft(half=True), fg.TopK(k=4))),
    "two stages": fg.TwoStage(fg.Cast("float16"), workers=WORKERS),
    "eigenbasis": fg.Eigenbasis(fg.AllGather(fg.Cast("float16"))),
    "piecewise": fg.Scheduled({0: fg.AllReduce(fg.Fft(half=True))}),
    "ladder": fg.Ladder((fg.AllReduce(fg.Fft(half=True)),)),
}


@pytest.mark.parametrize("exchange", TOO_LARGE.values(), ids=TOO_LARGE)
def test_every_exchange_counts_what_overflows(exchange):
    rows = np.zeros((WORKERS, 12), np.float32)
    rows[1, :3], rows[3, 0] = 2e5, -5e5
    tx = fg.compressed_pmean(exchange, axis_name=AXIS)
    _, state = updates(tx, rows, steps=2)
    assert np.asarray(state.overflow).tolist() == [8] * WORKERS


def test_every_exchange_whose_codec_may_overflow_is_tried():
    """The others send float32, or integers of a shared scale."""
    names = {**vars(fg.exchanges), **vars(fg.contrib.votes)}.values()
    public = {e for e in names if isinstance(e, type) and issubclass(e, fg.Exchange)}
    tried = {type(exchange) for exchange in TOO_LARGE.values()}
    in_meshes = {fg.Hierarchical}
    others = {fg.PowerSgd, fg.AcpSgd, fg.IntegerSum, fg.contrib.votes.TopVotes}
    assert public - {fg.Exchange} == tried | in_meshes | others


COUNTING = [
    name
    for name, codec in CODECS.items()
    if counts_overflow(codec, jax.ShapeDtypeStruct((150,), jnp.float32))
]


@pytest.mark.parametrize("name", sample(COUNTING))
def test_every_codec_that_counts_is_counted_over_the_workers(name):
    codec = CODECS[name]
    rows = values((WORKERS, 150)) * np.float32(1e5)
    rows[0] = 1e5
    own = jax.jit(lambda x: codec.compress(x, codec.init(x), fg.Step.of(0)).overflow)
    own = [int(own(row)) for row in rows]
    assert sum(own) > 0 or name in ("bfloat16", "top-k bfloat16", "threshold exact")
    _, state = updates(fg.compressed_pmean(fg.AllGather(codec), axis_name=AXIS), rows, steps=1)
    assert np.asarray(state.overflow).tolist() == [sum(own)] * WORKERS


# How far a threshold is searched for


TWICE = {
    "above the mean": [10.0, 9.0, 5.0, 4.0],
    "above the first middle": [16.0, 15.0, 10.0, 9.5, 6.0, 5.0],
}


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize("large", TWICE.values(), ids=TWICE)
def test_a_bisection_ends_where_twice_as_many_are_above(large):
    x = jnp.zeros(32).at[jnp.arange(3, 3 + len(large))].set(jnp.array(large))
    kept = np.asarray(round_trip(fg.Threshold(fraction=1 / 16), x))
    np.testing.assert_array_equal(kept, np.where(x >= np.sort(large)[-4], x, 0))


# A codec of one's own


@dataclasses.dataclass
class NotFrozen(fg.Quantizer):
    """All that a codec needs, but for a hash."""

    dtype: str = "float16"

    def compress(self, x, state, step=None):
        return fg.Compressed(fg.Payload(x.astype(self.dtype)))

    def decompress(self, payload, like, step):
        return payload.main.astype(like.dtype)


@pytest.mark.parametrize(
    "use",
    [
        lambda codec: updates(
            fg.compressed_pmean(fg.AllGather(codec), axis_name=AXIS),
            np.ones((WORKERS, 8), np.float32),
        ),
        lambda codec: fg.wire_bytes(codec, jnp.ones(8)),
        lambda codec: fg.chain(fg.Dct(block=4), codec).decompress,
        lambda codec: fg.wire_bytes(fg.TwoStage(codec, workers=2), jnp.ones(8)),
    ],
    ids=["all-gather", "bytes", "chain", "two stages"],
)
def test_a_codec_without_a_hash_is_told_to_be_frozen(use):
    with pytest.raises(TypeError, match=r"frozen=True"):
        use(NotFrozen())


# Specs of a state whose parameters have no names

SHARDED = P(None, "model")
WITH_STATE = {
    "two stages": fg.TwoStage(fg.Sign(), workers=4),
    "threshold": fg.AllGather(fg.Threshold(fraction=0.1, reuse=2)),
    "adacomp": fg.AllGather(fg.codecs.AdaComp(bin_size=20)),
}
TREES = {
    "list": ([jnp.zeros((6, 8)), jnp.zeros((4, 2))], [SHARDED, SHARDED]),
    "tuple of one": ((jnp.zeros((6, 8)),), (SHARDED,)),
    "array": (jnp.zeros((6, 8)), SHARDED),
}


@pytest.mark.parametrize(("stateful", "tree"), sample(itertools.product(WITH_STATE, TREES), set))
def test_specs_follow_parameters_without_names(stateful, tree):
    exchange, (params, param_specs) = WITH_STATE[stateful], TREES[tree]
    tx = fg.compressed_pmean(exchange, fg.ErrorFeedback(), axis_name="data")
    specs = fg.state_specs(jax.eval_shape(tx.init, params), "data", param_specs)
    named = {f"p{i}": leaf for i, leaf in enumerate(jax.tree.leaves(params))}
    named_specs = dict.fromkeys(named, SHARDED)
    expected = fg.state_specs(jax.eval_shape(tx.init, named), "data", named_specs)
    assert jax.tree.leaves(specs.exchange) == jax.tree.leaves(expected.exchange)
    assert set(jax.tree.leaves(specs.memory)) == {P("data", None, "model")}
    assert specs.step == specs.skipped == P()

    mesh = Mesh(
        np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2
    )
    state = jax.jit(jax.shard_map(tx.init, mesh=mesh, in_specs=(param_specs,), out_specs=specs))(
        params
    )
    grads = jax.tree.map(lambda p: jnp.asarray(values((4, *p.shape))), params)
    grad_specs = jax.tree.map(lambda s: P("data", *s), param_specs)

    def update(rows, state):
        return tx.update(jax.tree.map(lambda g: g[0], rows), state)

    step = jax.shard_map(
        update, mesh=mesh, in_specs=(grad_specs, specs), out_specs=(param_specs, specs)
    )
    mean, _ = jax.jit(step)(grads, state)
    assert jax.tree.map(jnp.shape, mean) == jax.tree.map(jnp.shape, params)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(mean))
