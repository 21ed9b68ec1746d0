"""A NaN or an infinity anywhere is seen by everybody, and the step leaves no trace.

At real sizes and with XLA's optimizations on: its vectorized maximum drops a NaN from about 4,100
values on, and what small vectors show proves nothing.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CODECS, EXCHANGES, HIDES_NONFINITE, MEMORIES, drawn, values
from parallel import AXIS, everywhere, train_step

import fftgrad as fg

WORKERS = 4
STEP = fg.Step.of(3)
BAD = [np.nan, np.inf, -np.inf]

SINGLE = {name: codec for name, codec in CODECS.items() if not repr(codec).startswith("chain")}
CHAINS = {name: codec for name, codec in CODECS.items() if name not in SINGLE}
# `AllGather` of one codec is a row of the codecs.
OTHERS = {name: e for name, e in EXCHANGES.items() if not isinstance(e, fg.AllGather)}
# These make numbers of it, so that an owner knows it from the headers alone.
HIDING = {f"owners, {name}": fg.TwoStage(CODECS[name], WORKERS) for name in sorted(HIDES_NONFINITE)}


def rows_of(table, default, slow, names=None):
    """Each row of a table with each of its sizes; by default those of these names at `default`."""
    slowly = functools.partial(pytest.param, marks=pytest.mark.slow)
    names = set(table) if names is None else names
    return [
        (pytest.param if n in default and name in names else slowly)(row, n, id=f"{name}-{n}")
        for name, row in table.items()
        for n in (*default, *slow)
    ]


@pytest.fixture(autouse=True, scope="module")
def _as_users_compile_it():
    """The suite compiles without most optimizations, which may hide what users meet."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@functools.cache
def good(n):
    return values((WORKERS, n))


def places(n):
    """Worker, position and value of what is not finite."""
    positions = (0, n // 2, n - 1)
    return [(i % WORKERS, p, bad) for i, p in enumerate(positions) for bad in BAD]


def spoiled(x, worker, position, bad):
    x = np.array(x)
    x.reshape(WORKERS, -1)[worker, position] = bad
    return x


def vmapped(tx):
    return jax.jit(jax.vmap(tx.init)), everywhere("vmap", lambda g, s: tx.update(g, s), WORKERS)


def sharded(tx, like):
    init, update = train_step(tx, WORKERS, like=like)
    return lambda x: init(jax.tree.map(lambda rows: rows[0], x)), update


def same(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


def wrong_steps(init, update, x):
    """What is wrong with each step that has a bad value; the step before has none."""
    mean, before = update(jnp.asarray(x), init(x))
    assert np.all(np.isfinite(mean))
    assert np.all(np.asarray(before.skipped) == 0)
    wrong = []
    for worker, position, bad in places(x[0].size):
        mean, after = update(jnp.asarray(spoiled(x, worker, position, bad)), before)
        own = np.asarray(mean).reshape(-1, x[0].size)
        checks = {
            "mean finite": not np.any(np.all(np.isfinite(own), axis=1)),
            "not counted": np.all(np.asarray(after.skipped) == 1),
            "memory changed": same(before.memory, after.memory),
            "exchange changed": same(before.exchange, after.exchange),
        }
        if not all(checks.values()):
            wrong.append((position, bad, [what for what, right in checks.items() if not right]))
    return wrong


@pytest.mark.parametrize(
    ("codec", "n"), rows_of(CODECS, [5_000], [1_000, 65_537, 1_000_003], drawn(CODECS))
)
def test_a_bad_step_of_any_codec_behind_all_gather_leaves_no_trace(codec, n):
    tx = fg.compressed_pmean(fg.AllGather(codec), fg.ErrorFeedback(), axis_name=AXIS)
    assert wrong_steps(*vmapped(tx), good(n)) == []


@pytest.mark.parametrize(
    ("exchange", "n"),
    [
        *rows_of(OTHERS, [5_000], [1_000, 65_537, 1_000_003], drawn(OTHERS)),
        *rows_of(HIDING, [5_000], [65_537]),
    ],
)
def test_a_bad_step_of_any_exchange_leaves_no_trace(exchange, n):
    x = good(n)
    if isinstance(exchange, fg.PowerSgd | fg.AcpSgd):  # which leave vectors dense
        x = x[:, : n // 50 * 50].reshape(WORKERS, -1, 50)
    tx = fg.compressed_pmean(exchange, fg.ErrorFeedback(), axis_name=AXIS)
    assert wrong_steps(*vmapped(tx), x) == []


@pytest.mark.parametrize(
    ("exchange", "n"),
    rows_of(
        {"integer sum": fg.QuantizedAllReduce(WORKERS), "dense": fg.AllReduce()},
        [1_000, 65_537],
        [1_000_003],
    ),
)
def test_a_bad_step_of_a_sum_leaves_no_trace_at_any_size(exchange, n):
    tx = fg.compressed_pmean(exchange, fg.ErrorFeedback(), axis_name=AXIS)
    assert wrong_steps(*vmapped(tx), good(n)) == []


@pytest.mark.parametrize(("memory", "n"), rows_of(MEMORIES, [5_000], [65_537]))
def test_a_bad_step_leaves_any_memory_as_it_was(memory, n):
    exchange = fg.AllGather(fg.chain(fg.ChunkTopK(chunk=8), fg.RangeFloat(bits=8)))
    tx = fg.compressed_pmean(exchange, memory, axis_name=AXIS)
    assert wrong_steps(*vmapped(tx), good(n)) == []


MAPPED = ["dense", "led by one", "two stages", "integer sum", "low rank", "low rank in turns"]


@pytest.mark.parametrize(
    ("exchange", "n"), rows_of({name: EXCHANGES[name] for name in MAPPED}, [5_000], [65_537])
)
def test_a_bad_step_under_shard_map_leaves_no_trace(exchange, n):
    tx = fg.compressed_pmean(exchange, fg.ErrorFeedback(), axis_name=AXIS)
    x = good(n)[:, : n // 50 * 50].reshape(WORKERS, -1, 50)
    assert wrong_steps(*sharded(tx, x[0]), x) == []


def hidden(codec, n):
    """Where a codec makes a number of what is not finite."""

    def round_trip(x):
        return fg.decompress(codec, fg.compress(codec, x, step=STEP), x, step=STEP)

    run = jax.jit(round_trip)
    return [
        (position, bad)
        for worker, position, bad in places(n)
        if np.all(np.isfinite(run(spoiled(good(n), worker, position, bad)[worker])))
    ]


@pytest.mark.parametrize(
    ("codec", "n"),
    [
        *rows_of(SINGLE, [5_000, 65_537], [1_000, 1_000_003], drawn(SINGLE)),
        *rows_of(CHAINS, [5_000], [65_537], drawn(CHAINS)),
    ],
)
def test_a_codec_decodes_what_is_not_finite_to_what_is_not_finite(codec, n):
    if codec in [CODECS[name] for name in HIDES_NONFINITE]:
        pytest.skip("says that it may hide them")
    assert hidden(codec, n) == []


SELECTORS = {
    "top-k": fg.TopK(fraction=0.01),
    "chunk top-k": fg.ChunkTopK(chunk=50),
}


@pytest.mark.parametrize(("selector", "n"), rows_of(SELECTORS, [5_000, 65_537], [1_000, 1_000_003]))
def test_a_selector_keeps_a_nan_where_it_is_and_spoils_nothing_else(selector, n):
    """Whatever sorting, comparing and argmax make of a NaN on this machine."""

    def round_trip(x):
        return fg.decompress(selector, fg.compress(selector, x), x)

    run = jax.jit(round_trip)
    for position, bad in itertools.product((0, n // 2, n - 1), (np.nan, -np.nan)):
        x = spoiled(good(n), 0, position, bad)[0]
        y = np.asarray(run(x))
        assert np.flatnonzero(np.isnan(y)).tolist() == [position]
        others = np.flatnonzero(np.nan_to_num(y))
        np.testing.assert_array_equal(y[others], x[others])
