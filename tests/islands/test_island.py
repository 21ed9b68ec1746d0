"""An island as a program calls it: its steps, its thread, and what it refuses."""

import dataclasses
import functools
import json
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fftgrad as fg
from fftgrad.islands import Settings, _objects

pytest.importorskip("obstore")
DENSE = fg.AllGather(fg.codecs.Identity())
ZEROS = np.zeros(3, np.float32)
QUICK = Settings(DENSE, sync_every=2, rate=1.0, deadline=2.0)


def memory():
    return fg.islands.open_store("memory://")


@functools.cache
def descent(rate):
    return optax.sgd(rate)


def together(store, names, program, **options):
    """Each island in a thread of its own; what the programs return."""
    found, errors = {}, []

    def run(name):
        try:
            with fg.islands.Island(store, name, ZEROS, **options) as island:
                found[name] = program(island, name)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return found


def test_it_is_diloco_without_a_program_in_common():
    """Two islands and two workers that take the same inner steps."""
    pushes = {"a": np.float32([1.0, 2.0, 3.0]), "b": np.float32([3.0, -2.0, 1.0])}
    settings = Settings(DENSE, sync_every=2, rate=0.5, islands=2, deadline=30.0)

    def program(island, name):
        params, seen = island.params, []
        for step in range(8):
            params = island.step(params + 0.1 * (step + 1) * pushes[name])
            seen.append(np.asarray(params))
        return np.stack(seen)

    found = together(memory(), "ab", program, settings=settings, outer=fg.islands.nesterov)
    tx = fg.optimizers.diloco(
        optax.sgd(1.0), fg.islands.nesterov(0.5), 2, DENSE, fg.NoMemory(), axis_name="data"
    )

    def worker(push):
        def step(carry, number):
            params, state = carry
            updates, state = tx.update(-0.1 * (number + 1) * push, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        return jax.lax.scan(step, (jnp.zeros(3), tx.init(jnp.zeros(3))), jnp.arange(8.0))[1]

    rows = jax.jit(jax.vmap(worker, axis_name="data"))(np.stack([pushes["a"], pushes["b"]]))
    np.testing.assert_allclose(np.stack([found["a"], found["b"]]), rows, rtol=1e-5)


def test_weights_are_those_of_the_round():
    """(1 · 3 + 3 · 1) / 4 in place of the mean."""
    settings = Settings(DENSE, sync_every=2, rate=1.0, islands=2, deadline=30.0)

    def program(island, name):
        push, weight = {"a": (3.0, 0.5), "b": (1.0, 1.5)}[name]
        params = island.step(island.params, weight=weight)
        return island.step(params + push, weight=weight)

    found = together(memory(), "ab", program, settings=settings, outer=descent)
    np.testing.assert_allclose(found["a"], 1.5)
    np.testing.assert_array_equal(found["a"], found["b"])


def test_with_a_delay_it_goes_on_and_keeps_a_share():
    settings = Settings(DENSE, sync_every=4, rate=0.5, deadline=20.0)
    with fg.islands.Island(
        memory(), "a", ZEROS, settings=settings, outer=descent, overlap_steps=2, mixing=0.25
    ) as island:
        params = island.params
        for _ in range(4):
            params = island.step(params + 1.0)
        np.testing.assert_array_equal(params, np.full(3, 4.0))  # sent, and gone on
        params = island.step(params + 1.0)
        np.testing.assert_array_equal(params, np.full(3, 5.0))
        assert island._courier.wait(20.0)
        params = island.step(params + 1.0)
        np.testing.assert_allclose(params, np.full(3, 0.25 * 6.0 + 0.75 * 2.0))
        assert island.round == 1


def test_narrow_parameters_lose_nothing_of_a_small_step():
    """What all have in common is float32: 256 steps of 1/1024 reach 1.25 from 1."""
    settings = Settings(DENSE, sync_every=1, rate=1 / 16, deadline=20.0)
    dtype = jnp.bfloat16
    params = {"w": np.ones(3, dtype)}
    with fg.islands.Island(memory(), "a", params, settings=settings, outer=descent) as island:
        params = island.params
        for _ in range(16):
            params = island.step({"w": params["w"] + np.asarray(1 / 64, dtype)})
        assert params["w"].dtype == dtype
        np.testing.assert_allclose(island._member.anchor.params["w"], 1 + 16 / 1024)


def test_who_leaves_and_comes_back_goes_on_from_what_all_hold():
    store, settings = memory(), dataclasses.replace(QUICK, deadline=20.0)
    with fg.islands.Island(store, "a", ZEROS, settings=settings, outer=descent) as island:
        params = island.params
        for _ in range(4):
            params = island.step(params + 1.0)
        digest, residual = island.digest, island.residual
    start = time.monotonic()
    with fg.islands.Island(
        store, "a", ZEROS + 7, settings=settings, outer=descent, residual=residual
    ) as island:
        assert time.monotonic() - start < settings.deadline / 2  # it asks nobody for its name
        assert (island.digest, island.round) == (digest, 2)
        np.testing.assert_array_equal(island.params, params)


class Cut:
    """A store that is away for as long as somebody says."""

    def __init__(self, store):
        self.store, self.away = store, False

    def __getattr__(self, name):
        if self.away:
            raise OSError("no route to it")
        return getattr(self.store, name)


def test_while_the_store_is_away_it_trains_on_alone(monkeypatch):
    monkeypatch.setattr("fftgrad.islands._island.PAUSE", 0.05)
    monkeypatch.setattr("fftgrad.islands._store.FIRST_PAUSE", 0.01)
    store = Cut(memory())
    settings = Settings(DENSE, sync_every=2, rate=1.0, deadline=1.0)
    with fg.islands.Island(store, "a", ZEROS, settings=settings, outer=descent) as island:
        params = island.params
        store.away = True
        start = time.monotonic()
        for _ in range(6):
            params = island.step(params + 1.0)
        assert time.monotonic() - start < 6 / 2 * settings.deadline  # one of three
        np.testing.assert_array_equal(params, np.full(3, 6.0))
        while not island.trouble:
            time.sleep(0.01)
        assert "no route to it" in island.trouble
        store.away = False
        assert island._courier.wait(20.0)
        params = island.step(params + 1.0)
        assert island.outcomes[0].counted
        assert not island.trouble


def test_wrong_runs_are_refused_before_the_first_step_and_left_as_they_are():
    store = memory()
    make = functools.partial(fg.islands.Island, store, settings=QUICK)
    make("a", {"w": ZEROS}).close()
    before = {key: store.read(key) for key in store.list("") if not key.startswith("islands/")}
    with pytest.raises(ValueError, match=r"got 1, of which the run lacks \[\['w', \[4\]"):
        make("b", {"w": np.zeros(4, np.float32)})
    with pytest.raises(ValueError, match=r"must be those of the run, .*'sync_every': 2"):
        make("b", {"w": ZEROS}, settings=Settings(DENSE, sync_every=3))
    with pytest.raises(ValueError, match="the outer optimizer of the run"):
        make("c", {"w": ZEROS}, outer=optax.adam)
    with pytest.raises(ValueError, match="letters, digits, _ and -"):
        make("a/b", {"w": ZEROS})
    after = {key: store.read(key) for key in store.list("") if not key.startswith("islands/")}
    assert after == before
    store = memory()
    with pytest.raises(ValueError, match=r"must be finite, got \['w'\]"):
        fg.islands.Island(store, "a", {"w": np.full(3, np.nan, np.float32)})
    unfit = Settings(fg.AllGather(fg.codecs.Tiles(64, shape=(3, 4))))
    with pytest.raises(ValueError, match="Tiles"):
        fg.islands.Island(store, "a", np.zeros(5, np.float32), settings=unfit)
    assert store.list("") == []
    store.create(_objects.RUN, json.dumps({"format": 99}).encode())
    with pytest.raises(ValueError, match="must have format 3, got a run of format 99"):
        fg.islands.Island(store, "a", ZEROS)


GREEDY = Settings(fg.AllGather(fg.TopK(k=1)), sync_every=1, rate=1.0, deadline=0.5)
PUSH = np.float32([4.0, 3.0, 2.0, 1.0])


def greedy(store, residual=None, name="a", settings=GREEDY):
    return fg.islands.Island(
        store, name, np.zeros(4, np.float32), settings=settings, outer=descent, residual=residual
    )


def test_a_residual_that_is_too_old_is_left_out():
    """What was sent since would be sent again."""
    store = memory()
    with greedy(store) as island:
        params = island.step(island.params + PUSH)
        residual = island.residual
        for _ in range(2):
            params = island.step(params)
    np.testing.assert_array_equal(params, [4.0, 3.0, 2.0, 0.0])
    with pytest.warns(UserWarning, match="because it would be sent"):
        again = greedy(store, residual)
    with again:
        for _ in range(4):
            params = again.step(params)
    np.testing.assert_array_equal(params, [4.0, 3.0, 2.0, 0.0])


def test_a_contribution_that_is_open_at_the_end_is_counted_once(monkeypatch):
    store = memory()
    settings = Settings(GREEDY.exchange, sync_every=1, rate=1.0, islands=2, deadline=1.0)
    island = greedy(store, settings=settings)
    monkeypatch.setattr(island, "_patience", lambda: 0.0)
    island.step(island.params + PUSH)
    while not store.list(_objects.ROUNDS):
        time.sleep(0.01)
    residual = island.residual
    island.close()
    np.testing.assert_array_equal(residual.sent[""] + residual.after[""], -PUSH)
    with greedy(store, residual, settings=settings) as island:
        assert island.round == 1  # it waited for the others, and closed the round
        params = island.params
        np.testing.assert_array_equal(params, [4.0, 0.0, 0.0, 0.0])
        for _ in range(4):
            params = island.step(params)
    np.testing.assert_array_equal(params, PUSH)


def test_a_change_that_is_under_way_is_in_the_residual(monkeypatch):
    monkeypatch.setattr("fftgrad.islands._island.PAUSE", 0.05)
    monkeypatch.setattr("fftgrad.islands._store.FIRST_PAUSE", 0.01)
    store = Cut(memory())
    with greedy(store) as island:
        store.away = True
        island.step(island.params + PUSH)
        residual = island.residual
    np.testing.assert_array_equal(residual.after[""], -PUSH)
    store.away = False
    with greedy(store, residual) as island:
        params = island.params
        for _ in range(5):
            params = island.step(params)
    np.testing.assert_array_equal(params, PUSH)


def empty(store):
    store.delete(tuple(store.list("")))


def test_a_residual_of_a_store_that_was_emptied_since_is_refused():
    """Its rounds and names are those of the new run, too."""
    store = memory()
    with greedy(store) as island:
        island.step(island.params + PUSH)
        residual = island.residual
    empty(store)
    with greedy(store) as island:
        island.step(island.params)
    with pytest.raises(ValueError, match="must be of this run, got another"):
        greedy(store, residual)


def test_nobody_goes_on_in_a_store_that_was_emptied_and_begun_anew(monkeypatch):
    """By the same program, with the same settings and the same names."""
    monkeypatch.setattr("fftgrad.islands._island.PAUSE", 0.05)
    store = memory()
    with greedy(store) as island, greedy(memory()) as other:
        params = island.step(island.params + PUSH)
        empty(store)
        for key in ("run.json", _objects.anchor_key(0)):
            store.create(key, other._courier.performer._store.read(key))
        island.step(params + PUSH)
        while not island.trouble:
            time.sleep(0.01)
        assert "got that of another run" in island.trouble
    assert store.list("") == [_objects.anchor_key(0), "run.json"]


@pytest.mark.parametrize("delay", [0, 2])
def test_steps_since_the_last_meeting_are_handed_in_at_the_end(delay):
    """If the parameters are; else they are left out."""
    settings = Settings(DENSE, sync_every=4, rate=1.0, deadline=20.0)
    for hands_in in (True, False):
        store = memory()
        with fg.islands.Island(
            store,
            "a",
            ZEROS,
            settings=settings,
            outer=descent,
            overlap_steps=delay,
            mixing=0.5,
        ) as island:
            params = island.params
            for _ in range(7 if delay == 0 else 3):
                params = island.step(params + 1.0)
            before = island._member.anchor.params[""].copy()
            found = island.finish(params) if hands_in else island.finish()
            assert len(island.outcomes) == (delay == 0) + hands_in
            assert all(outcome.counted for outcome in island.outcomes)
            np.testing.assert_allclose(found, params if hands_in else before)
            np.testing.assert_array_equal(found, island._member.anchor.params[""])


def test_at_the_end_the_meeting_under_way_comes_first():
    settings = Settings(DENSE, sync_every=4, rate=1.0, deadline=20.0)
    with fg.islands.Island(
        memory(), "a", ZEROS, settings=settings, outer=descent, overlap_steps=3, mixing=0.5
    ) as island:
        params = island.params
        for _ in range(5):
            params = island.step(params + 1.0)
        found = island.finish(params)
        assert [outcome.counted for outcome in island.outcomes] == [True, True]
        np.testing.assert_allclose(found, np.full(3, 4.5))  # half of the step after the meeting


def test_a_weight_is_one_that_every_share_can_have():
    with fg.islands.Island(memory(), "a", ZEROS, settings=QUICK) as island:
        for weight in (0.0, -1.0, float("nan"), 1e-318, 1e-7, 1e13, float("inf")):
            with pytest.raises(ValueError, match=r"must be in .*; pass the tokens of the step"):
                island.step(island.params, weight=weight)


def test_a_folder_that_went_away_is_not_made_again(tmp_path, monkeypatch):
    """An island would begin another run there, alone, and go on in the old one when it is back."""
    monkeypatch.setattr("fftgrad.islands._island.PAUSE", 0.05)
    folder, away = tmp_path / "store", tmp_path / "away"
    with fg.islands.Island(
        str(folder), "a", ZEROS, settings=dataclasses.replace(QUICK, deadline=0.4)
    ) as island:
        params = island.params
        for _ in range(2):
            params = island.step(params + 1.0)
        folder.rename(away)
        for _ in range(4):
            params = island.step(params + 1.0)
        while not island.trouble:
            time.sleep(0.01)
        assert "must have the run.json of this run, got none" in island.trouble
        assert not folder.exists()
        away.rename(folder)
        assert island._courier.wait(20.0)
        island.step(params)
        assert [outcome.counted for outcome in island.outcomes] == [True, True]
        assert not island.trouble
        folder.rename(away)
    assert not folder.exists()


def test_a_sparse_codec_converges_by_the_default_outer_step():
    """Nesterov's momentum behind error feedback diverges on it."""
    x = np.random.default_rng(0).standard_normal((64, 16)).astype(np.float32)
    y = x @ np.linspace(-1, 1, 16, dtype=np.float32)
    exchange = fg.AllGather(fg.chain(fg.TopK(fraction=0.03), fg.LogQuantizer(bits=4)))
    settings = Settings(exchange, sync_every=5)
    train = jax.jit(lambda w: w - 0.02 * jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(w))
    with fg.islands.Island(memory(), "a", np.zeros(16, np.float32), settings=settings) as island:
        w = island.params
        for _ in range(500):
            w = island.step(train(w))
    assert np.mean((x @ np.asarray(w) - y) ** 2) < 0.05


def test_what_ends_the_thread_reaches_the_program(monkeypatch):
    with fg.islands.Island(memory(), "a", ZEROS, settings=QUICK) as island:

        def broken(*_):
            raise OverflowError("timeout value is too large")

        monkeypatch.setattr(island._courier, "_try", broken)
        island.step(island.params)
        with pytest.raises(OverflowError, match="too large"):
            island.step(island.params)


def test_a_step_takes_the_parameters_of_the_island():
    params = {"b": ZEROS, "w": ZEROS}
    with fg.islands.Island(memory(), "a", params, settings=QUICK) as island:
        for other in (
            {"b2": ZEROS, "w": ZEROS},
            {"b": np.zeros(1, np.float32), "w": ZEROS},
            {"b": ZEROS, "w": np.zeros(3, jnp.bfloat16)},
        ):
            with pytest.raises(ValueError, match=r"must have .*, got .*; pass the parameters of"):
                island.step(other)
    with pytest.raises(RuntimeError, match="before close"):
        island.step(params)


def test_who_is_refused_again_and_again_is_told():
    with fg.islands.Island(memory(), "a", ZEROS, settings=QUICK) as island:
        params = np.full(3, np.nan, np.float32)
        for _ in range(3):
            island.step(params)
        assert not island.trouble
        with pytest.warns(UserWarning, match="last 2 contributions were refused: not finite"):
            island.step(params)
        assert "not finite" in island.trouble
        for _ in range(2):
            params = island.step(island.params)
        assert not island.trouble
