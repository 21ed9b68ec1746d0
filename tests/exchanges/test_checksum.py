"""Bits that went bad on the way, and workers of another configuration: noticed by all alike."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CODECS, EXCHANGES, HIERARCHIES, gradients, sample, values
from hypothesis import given
from hypothesis import strategies as st
from parallel import AXIS, MODES, everywhere
from updates import PAIR, WORKERS, mapped

import fftgrad as fg
from fftgrad import _axes
from fftgrad.ops import _wire

SEED = jnp.uint32(0xC0FFEE)
ROWS = jnp.asarray(values((WORKERS, 200), seed=3))
CODEC = fg.chain(fg.TopK(fraction=0.1), fg.LogLevels(bits=4))


def same(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


# One buffer


@functools.cache
def packed(codec, n=150):
    def pack(x):
        payload = fg.compress(codec, x, step=fg.Step.of(0))
        return payload, _wire.pack(_wire.Header(True, 5), payload, SEED)

    payload, words = jax.jit(pack)(values((n,)))
    return payload, words, jax.jit(lambda words: _wire.unpack(words, payload, SEED)[0])


@pytest.mark.parametrize("name", ["identity", "fft", "blocked 4 bits", "budget", "sign", "ternary"])
def test_every_flip_of_a_bit_is_noticed(name):
    payload, words, read = packed(CODECS[name])
    n = words.size

    def flipped(at):
        mask = jnp.where(jnp.arange(n) == at // 32, jnp.uint32(1) << (at % 32), jnp.uint32(0))
        header, _ = _wire.unpack(words ^ mask, payload, SEED)
        return header.valid, header.finite

    valid, finite = jax.jit(jax.vmap(flipped))(jnp.arange(32 * n, dtype=jnp.uint32))
    assert not np.any(valid)
    assert not np.any(finite)
    header = read(words)
    assert (bool(header.valid), bool(header.finite), int(header.overflow)) == (True, True, 5)


@given(st.lists(st.tuples(st.integers(0, 41), st.integers(1, 2**32 - 1)), min_size=1, max_size=6))
def test_damage_to_several_words_is_noticed(damage):
    _, words, read = packed(CODECS["top-k 6 bits"], n=400)
    bad = np.asarray(words).copy()
    for place, mask in damage:
        bad[place % bad.size] ^= np.uint32(mask)
    assert bool(read(bad).valid) == np.array_equal(bad, words)


def test_signs_flipped_in_pairs_and_words_that_change_places_are_noticed():
    """Sums of words, or of words times odd numbers, do not see these."""
    _, words, read = packed(CODECS["identity"])
    words = np.asarray(words)
    rng = np.random.default_rng(0)
    pairs = [rng.choice(np.arange(2, words.size), 2, replace=False) for _ in range(200)]
    bad = np.tile(words, (400, 1))
    for row, (i, j) in enumerate(pairs):
        bad[row, [i, j]] ^= np.uint32(1 << 31)
        bad[200 + row, [i, j]] = words[[j, i]]
    assert not np.any(jax.vmap(read)(bad).valid)


def test_what_comes_of_an_invalid_buffer_is_invalid():
    payload = fg.Payload(jnp.arange(3.0))
    words = _wire.pack(_wire.Header(True, 7, valid=False), payload, SEED)
    header, _ = _wire.unpack(words, payload, SEED)
    assert (bool(header.valid), bool(header.finite), int(header.overflow)) == (False, False, 7)


@pytest.mark.parametrize("count", [0, 1, 2**30 - 1, 2**31 - 1])
@pytest.mark.parametrize("finite", [True, False])
def test_the_second_word_tells_of_values(count, finite):
    payload = fg.Payload(jnp.ones(1))
    words = _wire.pack(_wire.Header(jnp.asarray(finite), jnp.int32(count)), payload, SEED)
    told = min(count, 2**30 - 1)  # as many values as a bucket has, but for one
    assert int(words[1]) == (2 * told + finite) % 2**32
    header, _ = _wire.unpack(words, payload, SEED)
    assert (bool(header.finite), int(header.overflow)) == (finite, told)


# Configurations


def seeds(codec=CODEC, n=200, dtype="float32", number=3, skipped=0):
    step = fg.Step(number=number, skipped=skipped)
    made_by = _wire.configuration((codec,), (jax.ShapeDtypeStruct((n,), dtype),))
    return int(_wire.seed(made_by, step.number, step.skipped))


def test_what_differs_has_another_seed():
    found = [
        seeds(),
        seeds(codec=fg.chain(fg.TopK(fraction=0.1), fg.LogLevels(bits=4, rounding="truncate"))),
        seeds(n=201),
        seeds(dtype="bfloat16"),
        *(seeds(number=number) for number in (0, 1, 2, 4, 2**31 - 1)),
        *(seeds(skipped=skipped) for skipped in (1, 2, 3)),
        *(seeds(number=2, skipped=1), seeds(number=4, skipped=1)),
    ]
    assert len(set(found)) == len(found)


def test_another_version_has_another_seed(monkeypatch):
    """So that a buffer of another version is noticed, as one of another codec is."""
    before = seeds()
    monkeypatch.setattr(_wire, "VERSION", _wire.VERSION + 1)
    assert seeds() != before


def test_the_seed_is_the_same_in_every_process():
    """Python's own hash is not, and what prints its address has another one in each."""
    assert _wire.configuration((CODEC,), (jax.ShapeDtypeStruct((200,), "float32"),)) == 4035141080

    @dataclasses.dataclass(frozen=True)
    class By:
        scale: object

    like = (jax.ShapeDtypeStruct((200,), "float32"),)
    one, other = (lambda x: x), (lambda x: x)
    assert repr(By(one)) != repr(By(other))
    assert _wire.configuration((By(one),), like) == _wire.configuration((By(other),), like)


def test_folding_keeps_what_the_seed_is_made_of():
    step = fg.Step.of(0, number=4)._replace(skipped=2)
    for folded in (step.fold(3), step.fold_local(3), fg.Step(4, skipped=2).fold(1)):
        assert (folded.number, folded.skipped) == (4, 2)


# Between workers


def spoil(monkeypatch, collective, worker, receiver=None, bit=40):
    """Flips a bit of what a worker hands to a collective, or of what one receiver gets of it."""
    real = getattr(_axes, collective)

    def flip(x, condition, row):
        size, at = x.shape[-1], jnp.asarray(bit, jnp.uint32)
        mask = (jnp.arange(size) == (at // 32) % size).astype(jnp.uint32) << (at % 32)
        where = condition & (jnp.arange(x.shape[0]) == row)[:, None] if x.ndim == 2 else condition
        return x ^ jnp.where(where, jnp.broadcast_to(mask, x.shape), jnp.uint32(0))

    def spoiled(x, axis_name):
        here = _axes.index(axis_name)
        if receiver is None:
            return real(flip(x, here == worker, 0), axis_name)
        return flip(real(x, axis_name), here == receiver, worker)

    monkeypatch.setattr(_axes, collective, spoiled)


def run(tx, mode="vmap", rows=ROWS):
    """The first state and a compiled `update`, over four workers."""
    update = everywhere(mode, lambda g, s: tx.update(g, s), len(rows))
    return jax.jit(jax.vmap(tx.init))(rows), update


@functools.cache
def flipping(name):
    """A row of the buffers: its first state, its update, and one in which a bit is flipped."""
    exchange, collective = BUFFERS[name]
    tx = pmean(exchange)

    def flipped(grads, state, bit):
        with pytest.MonkeyPatch.context() as patch:
            spoil(patch, collective, worker=2, bit=bit)
            return tx.update(grads, state)

    return *run(tx), everywhere("vmap", flipped, WORKERS)


def pmean(exchange):
    return fg.compressed_pmean(exchange, fg.ErrorFeedback(), axis_name=AXIS)


BUFFERS = {
    "gather": (fg.AllGather(CODEC), "all_gather"),
    "first stage": (fg.TwoStage(fg.Sign(), workers=WORKERS), "all_to_all"),
    "second stage": (fg.TwoStage(fg.Sign(), workers=WORKERS), "all_gather"),
    "piece": (fg.Scheduled({0: fg.AllGather(CODEC), 9: fg.AllReduce()}), "all_gather"),
    "ladder": (fg.Ladder((fg.AllGather(CODEC), fg.AllReduce())), "all_gather"),
}


def assert_bad(before, mean, after):
    """On all workers alike, and without a trace."""
    assert np.all(np.isnan(mean))
    for name in ("skipped", "invalid", "step"):
        old, new = np.asarray(getattr(before, name)), np.asarray(getattr(after, name))
        assert (new - old).tolist() == [1] * WORKERS, name
    assert same(before.memory, after.memory)
    assert same(before.exchange, after.exchange)
    assert same(before.overflow, after.overflow)


@pytest.mark.parametrize("bit", [0, 31, 33, 40, 95])
@pytest.mark.parametrize("name", BUFFERS)
def test_a_flipped_bit_is_noticed_by_all_workers(name, bit):
    state, update, flipped = flipping(name)
    mean, before = update(ROWS, state)
    assert np.all(np.isfinite(mean))
    assert before.invalid.tolist() == [0] * WORKERS
    mean, after = flipped(ROWS, before, np.full(WORKERS, bit, np.uint32))
    assert_bad(before, mean, after)
    # And once it is over, it is over.
    mean, later = update(ROWS, after)
    assert np.all(np.isfinite(mean))
    assert later.invalid.tolist() == [1] * WORKERS


@pytest.mark.parametrize("mode", MODES)
def test_a_flipped_bit_is_noticed_in_every_way_of_running(mode, monkeypatch):
    tx = pmean(fg.AllGather(CODEC))
    state, update = run(tx, mode)
    _, before = update(ROWS, state)
    spoil(monkeypatch, "all_gather", worker=1)
    mean, after = run(tx, mode)[1](ROWS, before)
    assert_bad(before, mean, after)


def test_a_flip_in_one_of_several_buckets_is_one_invalid_step(monkeypatch):
    tree = {"a": ROWS, "b": 2 * ROWS}
    tx = fg.compressed_pmean(
        fg.AllGather(CODEC), fg.ErrorFeedback(), axis_name=AXIS, layout=fg.Layout("leaf", 800)
    )
    update, state = everywhere("vmap", tx.update, WORKERS), jax.jit(jax.vmap(tx.init))(tree)
    _, before = update(tree, state)
    assert len(before.exchange) == 2
    spoil(monkeypatch, "all_gather", worker=3)
    mean, after = everywhere("vmap", lambda g, s: tx.update(g, s), WORKERS)(tree, before)
    assert all(np.all(np.isnan(leaf)) for leaf in mean.values())
    assert after.invalid.tolist() == after.skipped.tolist() == [1] * WORKERS
    assert same(before.memory, after.memory)


@pytest.mark.parametrize("fast", range(4))
def test_a_flip_between_two_groups_is_noticed_in_both(fast, monkeypatch):
    """Each fast worker sees only its piece: what it saw comes to the others with what it counts."""
    exchange = fg.Hierarchical("fast", 4, fg.AllGather(CODEC))
    tx = fg.compressed_pmean(exchange, axis_name=("slow", "fast"))
    rows = jnp.asarray(values((2, 4, 200)))

    def twice(function):
        return jax.vmap(jax.vmap(function, axis_name="fast"), axis_name="slow")

    def step():
        return jax.jit(twice(lambda g, s: tx.update(g, s)))

    mean, before = step()(rows, jax.jit(twice(tx.init))(rows))
    assert np.all(np.isfinite(mean))
    real = _axes.all_gather

    def spoiled(x, axis_name):
        here = (_axes.index("slow") == 1) & (_axes.index("fast") == fast)
        mask = (jnp.arange(x.size) == 3).astype(x.dtype) << 9
        own = _axes.names(axis_name) == ("slow",)
        return real(x ^ jnp.where(here, mask, 0).astype(x.dtype) if own else x, axis_name)

    monkeypatch.setattr(_axes, "all_gather", spoiled)
    mean, after = step()(rows, before)
    assert np.all(np.isnan(mean))
    assert np.all(np.asarray(after.invalid) == 1)
    assert np.all(np.asarray(after.skipped) == 1)
    assert same(before.exchange, after.exchange)


def test_what_one_receiver_alone_got_wrong_is_noticed_by_all_in_the_next_step(monkeypatch):
    tx = pmean(fg.AllGather(CODEC))
    state, update = run(tx)
    _, before = update(ROWS, state)
    with monkeypatch.context() as patch:
        spoil(patch, "all_gather", worker=2, receiver=1)
        mean, after = run(tx)[1](ROWS, before)
    assert np.isnan(mean).all(axis=1).tolist() == [False, True, False, False]
    assert after.invalid.tolist() == after.skipped.tolist() == [0, 1, 0, 0]
    # It did not apply what the others did: from here on their parameters differ.
    for steps in (1, 2):
        mean, after = update(ROWS, after)
        assert np.all(np.isnan(mean))
        assert after.invalid.tolist() == [steps, 1 + steps, steps, steps]


def test_what_the_owner_of_a_shard_alone_got_wrong_is_noticed_by_all(monkeypatch):
    tx = pmean(fg.TwoStage(fg.Sign(), workers=WORKERS))
    state, update = run(tx)
    _, before = update(ROWS, state)
    spoil(monkeypatch, "all_to_all", worker=2, receiver=1)
    mean, after = run(tx)[1](ROWS, before)
    assert_bad(before, mean, after)


OTHERS = {
    "rounding": fg.chain(fg.TopK(fraction=0.1), fg.LogLevels(bits=4, rounding="truncate")),
    "block": fg.chain(fg.Dct(block=8), fg.TopK(fraction=0.1), fg.LogLevels(bits=4)),
    "search": fg.chain(fg.TopK(k=20), fg.LogLevels(bits=4)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_workers_of_different_codecs_notice_each_other(name):
    """Of as many bytes, or the collective itself would fail."""
    mixed = [fg.AllGather(CODEC), fg.AllGather(OTHERS[name])]
    assert len({exchange.wire_bytes(ROWS[0]) for exchange in mixed}) == 1

    def step(x, kind):
        # Each worker's own exchange, and all of them in one collective.
        handed, real = [], _axes.all_gather
        out = []
        for exchange in mixed:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(_axes, "all_gather", lambda b, a: handed.append(b) or real(b, a))
                exchange.mean(x, exchange.init(x), fg.exchanges.Channel(AXIS, fg.Step.of(0)))
        sent = jnp.where(kind == 0, *handed)
        for exchange in mixed:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(_axes, "all_gather", lambda _, a: real(sent, a))
                reduced = exchange.mean(
                    x, exchange.init(x), fg.exchanges.Channel(AXIS, fg.Step.of(0))
                )
            out.append((reduced.mean, reduced.tally.finite, reduced.tally.invalid))
        return jax.tree.map(lambda a, b: jnp.where(kind == 0, a, b), *out)

    program = everywhere("vmap", step, WORKERS)
    mean, finite, invalid = program(ROWS, jnp.array([0, 0, 1, 0]))
    assert np.all(np.isnan(mean))
    assert not np.any(finite)
    assert invalid.tolist() == [1, 1, 3, 1]
    mean, finite, invalid = program(ROWS, jnp.array([1, 1, 1, 1]))
    assert np.all(np.isfinite(mean))
    assert np.all(finite)
    assert not np.any(invalid)


@pytest.mark.parametrize("field", ["step", "skipped"])
@pytest.mark.parametrize("name", ["gather", "first stage"])
def test_workers_of_different_steps_notice_each_other(name, field):
    tx = pmean(BUFFERS[name][0])
    state, update = run(tx)
    _, before = update(ROWS, state)
    behind = getattr(before, field) + jnp.array([0, 1, 0, 0])
    mean, after = update(ROWS, before._replace(**{field: behind}))
    assert np.all(np.isnan(mean))
    assert after.invalid.tolist() == [1] * WORKERS
    assert same(before.memory, after.memory)


@pytest.mark.parametrize("name", sample(EXCHANGES))
def test_nothing_is_invalid_in_a_healthy_run(name):
    init, update = mapped(EXCHANGES[name])
    rows = gradients(PAIR, WORKERS, seed=9)
    state = init(rows)
    for step in range(4):
        grads = jax.tree.map(lambda g, step=step: g * (1 + step), rows)
        if step == 1:
            grads["a"] = grads["a"].at[0, 0].set(jnp.nan)
        mean, state = update(grads, state)
    # Nor by a bad step, which all skip.
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(mean))
    assert state.invalid.tolist() == [0] * WORKERS
    assert state.skipped.tolist() == [1] * WORKERS
    assert update._cache_size() == 1


@pytest.mark.parametrize("exchange", HIERARCHIES.values(), ids=HIERARCHIES)
def test_nothing_is_invalid_in_a_healthy_hierarchy(exchange):
    tx = fg.compressed_pmean(exchange, axis_name=("slow", "fast"))
    rows = jnp.asarray(values((2, 4, 200)))

    def twice(function):
        return jax.vmap(jax.vmap(function, axis_name="fast"), axis_name="slow")

    update = jax.jit(twice(lambda g, s: tx.update(g, s)))
    state = jax.jit(twice(tx.init))(rows)
    for step in range(3):
        mean, state = update(rows * (1 + step), state)
    assert np.all(np.isfinite(mean))
    assert not np.any(state.invalid)


def test_metrics_tell_of_invalid_steps(monkeypatch):
    tx = pmean(fg.AllGather(CODEC))
    spoil(monkeypatch, "all_gather", worker=0)
    state, update = run(tx)
    _, state = update(ROWS, state)
    assert int(fg.metrics(jax.tree.map(lambda a: a[0], state))["invalid"]) == 1
