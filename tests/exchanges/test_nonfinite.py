"""A NaN or an infinity anywhere is seen by everybody, and the step leaves no trace.

At real sizes and with XLA's optimizations on: its vectorized maximum drops a NaN from about 4,100
values on, and what small vectors show proves nothing.
"""

import functools
import itertools

import jax
import numpy as np
import pytest
from cases import CODECS, EXCHANGES, HIDES_NONFINITE, MEMORIES, SLOW, one_of_each, values
from messages import draws, gathered
from parallel import AXIS, everywhere
from stepwise import once

import fftgrad as fg

WORKERS, N = 4, 5_000
BAD = [np.nan, np.inf, -np.inf]

# `AllGather` of one codec is a row of the codecs.
OTHERS = {name: e for name, e in EXCHANGES.items() if not isinstance(e, fg.AllGather)}
# These make numbers of it, so that an owner knows it from the headers alone.
HIDING = {f"owners, {name}": fg.TwoStage(CODECS[name], WORKERS) for name in sorted(HIDES_NONFINITE)}
ALONE = OTHERS | HIDING
SIZES = pytest.mark.parametrize("n", [N, pytest.param(65_537, marks=SLOW)])


@pytest.fixture(autouse=True, scope="module")
def _as_users_compile_it():
    """The suite compiles without most optimizations, which may hide what users meet."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@functools.cache
def good(n):
    return values((WORKERS, n))


def rows_for(exchange, n):
    """Vectors, or matrices for an exchange that leaves vectors dense."""
    low_rank = isinstance(exchange, fg.PowerSgd | fg.exchanges.AcpSgd)
    return good(n)[:, : n // 50 * 50].reshape(WORKERS, -1, 50) if low_rank else good(n)


def spoiled(x):
    """Rows of all workers with one bad value, and its worker, position and value."""
    n = x[0].size
    for worker, position in enumerate((0, n // 2, n - 1)):
        for bad in BAD:
            one = np.array(x)
            one.reshape(WORKERS, -1)[worker, position] = bad
            yield one, (worker, position, bad)


@SIZES
@pytest.mark.parametrize("name", one_of_each(CODECS))
def test_gathering_is_averaging_what_a_codec_decodes_to_and_neither_hides_anything(name, n):
    codec = CODECS[name]
    mean, sent, own = map(np.asarray, gathered(codec, good(n)))
    assert np.all(mean == mean[0])
    np.testing.assert_allclose(mean[0], sent.mean(0), rtol=1e-4, atol=1e-4)
    if not draws(codec):
        np.testing.assert_allclose(sent, own, rtol=1e-4, atol=1e-4)
    for x, (worker, *where) in spoiled(good(n)):
        mean, _, own = map(np.asarray, gathered(codec, x))
        assert not np.any(np.all(np.isfinite(mean), axis=1)), where
        assert name in HIDES_NONFINITE or not np.all(np.isfinite(own[worker])), where


@SIZES
@pytest.mark.parametrize("name", [*one_of_each(OTHERS), *HIDING])
def test_every_worker_sees_a_bad_value_of_any_worker(name, n):
    rows = rows_for(ALONE[name], n)
    run = everywhere("vmap", lambda x: once(ALONE[name], x).mean, WORKERS)
    assert np.all(np.isfinite(run(rows)))
    for x, where in spoiled(rows):
        seen = np.asarray(run(x)).reshape(WORKERS, -1)
        assert not np.any(np.all(np.isfinite(seen), axis=1)), where


@pytest.mark.parametrize("name", one_of_each(MEMORIES))
def test_a_bad_step_leaves_any_memory_as_it_was(name):
    """Each step with a bad value is counted, and leaves the state as it was before."""
    exchange = fg.AllGather(fg.chain(fg.ChunkTopK(chunk=8), fg.RangeFloat(bits=8)))
    tx, x = fg.compressed_pmean(exchange, MEMORIES[name], axis_name=AXIS), good(N)
    init, update = jax.jit(jax.vmap(tx.init)), everywhere("vmap", tx.update, WORKERS)
    mean, before = update(x, init(x))
    assert np.all(np.isfinite(mean))
    assert np.all(np.asarray(before.skipped) == 0)
    for bad, where in spoiled(x):
        mean, after = update(bad, before)
        own = np.asarray(mean).reshape(-1, x[0].size)
        assert not np.any(np.all(np.isfinite(own), axis=1)), where
        assert np.all(np.asarray(after.skipped) == 1), where
        for kept in ("memory", "exchange"):
            pair = (jax.tree.leaves(getattr(state, kept)) for state in (before, after))
            assert all(map(np.array_equal, *pair)), (kept, where)


@pytest.mark.parametrize("n", [N, 65_537, pytest.param(1_000_003, marks=SLOW)])
@pytest.mark.parametrize("selector", [fg.TopK(fraction=0.01), fg.ChunkTopK(chunk=50)], ids=repr)
def test_a_selector_keeps_a_nan_where_it_is_and_spoils_nothing_else(selector, n):
    """Whatever sorting, comparing and argmax make of a NaN on this machine."""
    run = jax.jit(lambda x: fg.decompress(selector, fg.compress(selector, x), x))
    for position, bad in itertools.product((0, n // 2, n - 1), (np.nan, -np.nan)):
        x = np.array(good(n)[0])
        x[position] = bad
        y = np.asarray(run(x))
        assert np.flatnonzero(np.isnan(y)).tolist() == [position]
        others = np.flatnonzero(np.nan_to_num(y))
        np.testing.assert_array_equal(y[others], x[others])
