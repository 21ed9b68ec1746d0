"""A gather in a loss: along which axis, with which draws, and the codecs that are taken."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import values
from parallel import AXIS, MODES, everywhere

import fftgrad as fg

WORKERS = 4
TWO_BITS = fg.UniformQuantizer(bits=2, bucket=16, norm="max")
FOUR = fg.chain(fg.Hadamard(block=256), fg.UniformQuantizer(bits=4, bucket=256, norm="max"))
EIGHT = fg.UniformQuantizer(bits=8, bucket=256, norm="max")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("parameters", [None, fg.Identity()], ids=["as they are", "by a codec"])
def test_shards_follow_each_other_along_any_axis(parameters, mode):
    """The whole, and the gradient of a loss that tells all its values apart."""
    shards = values((WORKERS, 3, 2, 5))
    factors = values((WORKERS, 3 * 2 * 5 * WORKERS), seed=1)

    def loss(shard, factor, axis):
        found = fg.optimizers.gather_parameters(
            shard, AXIS, fg.Identity(), parameters=parameters, dimension=axis, step=0
        )
        return jnp.sum(found * factor.reshape(found.shape)), found

    def both(shard, factor):
        grad = jax.grad(loss, has_aux=True)
        return [grad(shard, factor, axis) for axis in (1, -1, 0)]

    found = jax.device_get(everywhere(mode, both, WORKERS)(shards, factors))
    for axis, (grads, rows) in zip((1, -1, 0), found, strict=True):
        whole = np.concatenate(list(shards), axis=axis)
        np.testing.assert_allclose(rows, np.broadcast_to(whole, rows.shape), rtol=1e-6)
        total = factors.astype(np.float64).sum(0).reshape(whole.shape)
        expected = np.stack(np.split(total, WORKERS, axis=axis))
        np.testing.assert_allclose(grads, expected, rtol=1e-4, atol=1e-4)


def test_steps_and_keys_draw_anew_on_both_ways():
    x, y = values((WORKERS, 64)), values((WORKERS, 256), seed=1)

    def loss(shard, factor, step, key):
        found = fg.optimizers.gather_parameters(
            shard, AXIS, TWO_BITS, parameters=TWO_BITS, step=step, key=key
        )
        return jnp.sum(found * factor), found

    def results(key, *steps):
        both = jax.grad(functools.partial(loss, key=key), has_aux=True)
        run = jax.jit(jax.vmap(both, (0, 0, None), axis_name=AXIS))
        return [[np.asarray(a).tobytes() for a in run(x, y, np.int32(n))] for n in steps]

    first, second = results(0, 0, 1)
    assert results(jax.random.key(0), 0) == [first]
    for other in (second, *results(1, 0)):
        assert all(a != b for a, b in zip(first, other, strict=True))


# What is taken where nothing is said


def test_what_is_taken_by_itself():
    """And there is no default for the step: draws that repeat in each step add up."""
    own = fg.optimizers

    def default(function, argument):
        return inspect.signature(function).parameters[argument].default

    assert default(own.compressed_psum_scatter, "codec") == FOUR
    assert default(own.gather_parameters, "gradients") == FOUR
    assert default(own.sharded, "gradients") == FOUR
    assert default(own.compressed_all_gather, "codec") == EIGHT
    assert default(own.sharded, "parameters") == EIGHT
    assert default(own.gather_parameters, "step") is inspect.Parameter.empty


def test_gradients_with_an_outlier_lose_less_by_the_rotation():
    x = values((WORKERS, 4096))
    x[:, ::256] *= 100
    exact = x.astype(np.float64).sum(0).reshape(WORKERS, -1)

    def error(**codec):
        def scatter(x):
            return fg.optimizers.compressed_psum_scatter(x, AXIS, **codec).shard

        scatter = everywhere("vmap", scatter, WORKERS)
        apart = (np.asarray(scatter(x)) - exact)[:, 1:256]  # beside the outlier
        return np.linalg.norm(apart)

    assert error() < 0.7 * error(codec=fg.UniformQuantizer(bits=4, bucket=256, norm="max"))
