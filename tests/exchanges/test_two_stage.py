"""What the codecs of two stages remember is kept, for each shard and for its owner."""

import jax
import jax.numpy as jnp
import numpy as np
from cases import values
from parallel import AXIS

import fftgrad as fg

WORKERS = 4


def steps(exchange, rows):
    """The states after each step."""
    tx = fg.compressed_pmean(exchange, axis_name=AXIS)
    update = jax.jit(jax.vmap(tx.update, axis_name=AXIS))
    state = jax.jit(jax.vmap(tx.init))(rows[0])
    states = []
    for row in rows:
        _, state = update(row, state)
        states.append(state.exchange[0])
    return states


def test_a_threshold_of_two_stages_serves_for_its_steps():
    exchange = fg.TwoStage(fg.Threshold(fraction=0.1, reuse=3), WORKERS)
    rows = [jnp.asarray(values((WORKERS, 80)) / (1 + t)) for t in range(4)]
    states = steps(exchange, rows)
    for stage in (0, 1):
        found = [state.own.worker_rows.rows[stage][0] for state in states]
        thresholds = [np.asarray(f.threshold) for f in found]
        assert [set(np.ravel(f.age).tolist()) for f in found] == [{1}, {2}, {3}, {1}]
        np.testing.assert_array_equal(thresholds[0], thresholds[2])
        assert np.all(thresholds[2] != thresholds[3])


def test_each_shard_has_a_state_of_its_own():
    exchange = fg.TwoStage(fg.codecs.AdaComp(bin_size=5), workers=WORKERS)
    (state,) = steps(exchange, [jnp.asarray(values((WORKERS, 80)))])
    residue = np.asarray(state.own.worker_rows.rows[0][0].residue)
    assert residue.shape == (WORKERS, 1, WORKERS, 20)
    rows = residue.reshape(-1, 20)
    assert len({row.tobytes() for row in rows}) == len(rows)
