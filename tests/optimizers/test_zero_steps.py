"""What a step of a sharded optimizer does with NaNs, weights, hidden leaves and keys."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import gradients, values
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from parallel import AXIS, everywhere, mesh_of
from stepwise import run

import fftgrad as fg

WORKERS = 4
LOSSLESS = {"gradients": fg.codecs.Identity(), "parameters": fg.codecs.Identity()}
SGD = optax.sgd(1.0)
"""One for all tests, whose trial updates of it are then the same programs."""
PARAMS = {"w": values((10, 11)), "b": values((7,), seed=1)}


def of_workers():
    return jax.tree.map(np.array, gradients(PARAMS, WORKERS))


def rows(tx, mode="vmap", params=PARAMS):
    """A step from a fresh state: (gradients, and weights, a row a worker) -> moves and state."""

    def step(grads, **extra):
        return tx.update(grads, tx.init(params), params, **extra)

    return everywhere(mode, lambda grads, extra: step(grads, **extra), WORKERS)


# What is not finite

HIDING = {
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), 10**6),
    "zero_nans": optax.chain(optax.zero_nans(), optax.adam(0.1)),
}


@pytest.mark.parametrize(
    ("name", "memory"), [("apply_if_finite", fg.NoMemory()), ("zero_nans", fg.ErrorFeedback())]
)
def test_training_goes_on_after_a_nan_that_the_inner_optimizer_hides(name, memory):
    """One NaN of one worker, in the shard of one owner, in one of 30 steps."""
    tx = optax.chain(
        optax.stateless(lambda bad, params: params.at[3].add(jnp.where(bad, jnp.nan, 0.0))),
        fg.optimizers.sharded(HIDING[name], WORKERS, memory=memory, axis_name=AXIS),
    )
    bad = (np.arange(WORKERS) == 2) & (np.arange(30) == 3)[:, None]
    params, (_, states) = run(tx, bad, np.ones(256, np.float32))
    assert states.skipped[:, 0].tolist() == [0, 0, 0] + [1] * 27
    np.testing.assert_array_equal(params[3], params[2])
    for leaf in jax.tree.leaves((states.memory, states.inner, states.ahead)):
        assert leaf[3].tobytes() == leaf[2].tobytes()
    assert np.all(params[4] != params[3])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(states))
    means = params[-1].reshape(WORKERS, WORKERS, 64).mean(2)
    np.testing.assert_allclose(means, means[0, 0], atol=0.02)
    assert np.abs(means).max() < 0.5


def test_what_is_finite_until_it_is_decoded_is_seen():
    """Here it is the codec that makes an infinity, and no header of a worker tells."""

    @dataclasses.dataclass(frozen=True)
    class Squares(fg.codecs.Quantizer):
        def compress(self, x, state, step):
            return fg.codecs.Compressed(fg.codecs.Payload(x))

        def decompress(self, payload, like, step):
            return payload.main * payload.main

    tx = fg.optimizers.sharded(
        optax.apply_if_finite(SGD, 9), WORKERS, gradients=Squares(),
        parameters=fg.codecs.Identity(), axis_name=AXIS,
    )  # fmt: skip
    grads = of_workers()
    for leaf in grads.values():
        leaf[1] = 1e30
    moves, state = rows(tx)(grads, {})
    assert state.skipped.tolist() == [1] * WORKERS
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(jax.device_get(moves)))


# Weights


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_beside_an_axis_that_xla_has_it_counts_by_its_weight_too(kind):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    tx = fg.optimizers.sharded(SGD, 2, axis_name=AXIS, **LOSSLESS)
    weights, grads = np.float32([1, 3]), values((2, 12))

    def step(params, state, rows, weights):
        moves, state = tx.update(rows[0], state, params, weight=weights[0])
        return optax.apply_updates(params, moves), state

    with jax.set_mesh(mesh):
        state = fg.init_state(tx, np.zeros(12, np.float32), mesh, AXIS)
        specs = fg.state_specs(state, AXIS)
        step = jax.jit(jax.shard_map(
            step, mesh=mesh, in_specs=(P(), specs, P(AXIS), P(AXIS)), out_specs=(P(), specs),
            axis_names={AXIS},
        ))  # fmt: skip
        own = jax.sharding.NamedSharding(mesh, P(AXIS))
        params, _ = step(np.zeros(12, np.float32), state, *jax.device_put((grads, weights), own))
    np.testing.assert_allclose(params, -(weights @ grads) / 4, rtol=1e-4, atol=1e-5)


# Hidden leaves


def test_leaves_that_another_one_averages_may_be_hidden():
    tx = optax.partition(
        {
            name: fg.optimizers.sharded(
                inner, WORKERS, axis_name=AXIS, allow_masked=True, **LOSSLESS
            )
            for name, inner in (("one", SGD), ("other", optax.sgd(0.5)))
        },
        {"w": "one", "b": "other"},
    )
    grads = of_workers()
    moves, _ = rows(tx, "shard_map")(grads, {})
    for name, rate in (("w", 1.0), ("b", 0.5)):
        for row in np.asarray(moves[name]):
            np.testing.assert_allclose(row, -rate * grads[name].mean(0), rtol=1e-4, atol=1e-5)


# What varies


@pytest.mark.parametrize("which", ["updates", "params"])
def test_summed_gradients_and_sharded_parameters_are_refused(which):
    tx = fg.optimizers.sharded(SGD, WORKERS, axis_name=AXIS)

    def step(own, same):
        own = jax.tree.map(lambda a: a[0], own)
        grads, params = (same, same) if which == "updates" else (own, own)
        return tx.update(grads, tx.init(same), params)[0]

    message = {
        "updates": r"sharded\(updates\['b'\]\): must be the gradient of one worker's own batch",
        "params": r"sharded\.update\(params\['b'\]\): must be the same on all workers",
    }
    mapped = jax.shard_map(step, mesh=mesh_of(WORKERS), in_specs=(P(AXIS), P()), out_specs=P())
    with pytest.raises(ValueError, match=message[which]):
        jax.eval_shape(mapped, of_workers(), PARAMS)


# Draws


def test_another_key_draws_otherwise_and_what_is_drawn_to_send_is_drawn_to_receive():
    """The signs of a rotation, on either way."""
    rotated = {"gradients": fg.Hadamard(block=16), "parameters": fg.Hadamard(block=16)}
    two_bits = dict.fromkeys(("gradients", "parameters"), fg.UniformQuantizer(bits=2))
    options = [*({"key": k, **two_bits} for k in (0, 1, jax.random.key(1))), rotated, LOSSLESS]
    txs = [fg.optimizers.sharded(SGD, WORKERS, axis_name=AXIS, **one) for one in options]
    moves = lambda grads: [tx.update(grads, tx.init(PARAMS), PARAMS)[0] for tx in txs]  # noqa: E731
    *keyed, there, exact = everywhere("vmap", moves, WORKERS)(of_workers())
    found = [np.asarray(moves["w"]).tobytes() for moves in keyed]
    assert found[0] != found[1] == found[2]
    for name, leaf in exact.items():
        np.testing.assert_allclose(there[name], leaf, rtol=1e-3, atol=1e-4)


@dataclasses.dataclass(frozen=True)
class Draw(fg.codecs.Quantizer):
    """What decodes to the value and a number that all workers draw."""

    def compress(self, x, state, step):
        return fg.codecs.Compressed(fg.codecs.Payload(x))

    def decompress(self, payload, like, step):
        return payload.main + jax.random.uniform(step.shared)


def test_the_way_back_has_draws_of_its_own():
    """With the same draw twice the one would undo the other."""
    tx = fg.optimizers.sharded(SGD, WORKERS, gradients=Draw(), parameters=Draw(), axis_name=AXIS)
    moves, _ = rows(tx, params=np.zeros(8, np.float32))(np.zeros((WORKERS, 8), np.float32), {})
    assert np.abs(np.asarray(moves)).min() > 1e-3
