"""What the codecs of two stages remember is kept, for each shard and for its owner."""

import re

import jax
import numpy as np
import pytest
from cases import values
from parallel import AXIS, everywhere
from stepwise import once, run

import fftgrad as fg

WORKERS = 4


def states_of(exchange, rows):
    """The state of the exchange on each worker after each step."""
    return run(fg.compressed_pmean(exchange, axis_name=AXIS), np.stack(rows))[1].exchange[0]


def test_a_threshold_of_two_stages_serves_for_its_steps():
    exchange = fg.TwoStage(fg.Threshold(fraction=0.1, reuse=3), WORKERS)
    rows = [values((WORKERS, 80)) / (1 + t) for t in range(4)]
    for (found,) in states_of(exchange, rows).own.worker_rows.reset_rows:
        assert [set(np.ravel(age).tolist()) for age in found.age] == [{1}, {2}, {3}, {1}]
        np.testing.assert_array_equal(found.threshold[0], found.threshold[2])
        assert np.all(found.threshold[2] != found.threshold[3])


def test_each_shard_has_a_state_of_its_own():
    exchange = fg.TwoStage(fg.codecs.AdaComp(bin_size=5), workers=WORKERS)
    state = states_of(exchange, [values((WORKERS, 80))])
    (residue,) = state.own.worker_rows.reset_rows[0][0].residue
    assert residue.shape == (WORKERS, 1, WORKERS, 20)
    rows = residue.reshape(-1, 20)
    assert len({row.tobytes() for row in rows}) == len(rows)


@pytest.mark.parametrize("workers", [2, 8, 64, 512])
def test_the_bytes_over_a_link_are_those_of_the_codec_for_any_number_of_workers(workers):
    like = jax.ShapeDtypeStruct((1 << 20,), "float32")
    dense, two = (
        fg.link_bytes(exchange, like, workers)
        for exchange in (fg.AllReduce(), fg.TwoStage(fg.Budget(ratio=25), workers))
    )
    assert dense / two == pytest.approx(25, rel=0.05)


def test_the_program_does_not_grow_with_the_workers():
    def size(workers):
        exchange = fg.TwoStage(fg.Budget(ratio=25), workers)
        tx = fg.compressed_pmean(exchange, fg.ErrorFeedback(), axis_name=AXIS)
        x = np.zeros((workers, workers << 8), np.float32)  # shards of one size
        state = jax.eval_shape(jax.vmap(tx.init), x)
        program = jax.make_jaxpr(jax.vmap(tx.update, axis_name=AXIS))(x, state)
        return len(re.findall(r" = [a-z]", str(program)))  # equations; lines wrap at widths

    assert size(4) == size(64) > 1000


@pytest.mark.parametrize("workers", [3, 6])
def test_what_no_worker_sent_counts_as_not_sent_to_the_bit(workers):
    """Or a momentum that is masked where something was sent would be cleared."""
    exchange = fg.TwoStage(fg.TopK(k=3 * workers), workers)
    rows = values((workers, 40 * workers))

    sent = everywhere("vmap", lambda row: row - once(exchange, row).error, workers)
    found = np.asarray(sent(rows))
    assert np.count_nonzero(found) <= workers * (3 * workers + 3 * workers)


def test_a_loss_beyond_float32_does_not_stay_in_the_residual():
    exchange = fg.TwoStage(fg.TopK(fraction=0.1), WORKERS)
    tx = fg.compressed_pmean(exchange, fg.ErrorFeedback(), axis_name=AXIS)
    rows = values((WORKERS, 80))
    large = np.float32(3e38) * np.sign(rows) * (0.5 + 0.5 * np.abs(rows) / np.abs(rows).max())
    _, state = run(tx, large[None])
    residual = np.abs(state.memory.worker_rows.residual)
    assert np.all(residual < np.finfo(np.float32).max)  # also false for NaN


def test_an_owner_compresses_its_own_shard_only_once():
    """In the mean of the whole own shard, the second value is the largest."""
    x = np.array([[3, 2.5, 0, 0, 0, 0], [0, 2, 0, 0, 0, 0]], np.float32)
    exchange = fg.TwoStage(fg.TopK(k=2), 2)  # one value of each shard
    mean = everywhere("vmap", lambda row: once(exchange, row).mean, 2)(x)
    assert np.asarray(mean)[0].tolist() == [0, 2.25, 0, 0, 0, 0]
