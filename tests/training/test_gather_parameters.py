"""A gather in a loss: along which axis, with which draws, and the codecs that are taken."""

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
@pytest.mark.parametrize("axis", [1, -1, 0])
def test_shards_follow_each_other_along_any_axis(axis, parameters, mode):
    """The whole, and the gradient of a loss that tells all its values apart."""
    shards = jnp.asarray(values((WORKERS, 3, 2, 5)))
    whole = np.concatenate(list(np.asarray(shards)), axis=axis)
    factors = jnp.asarray(values((WORKERS, *whole.shape), seed=1))

    def loss(shard, factor):
        found = fg.optimizers.gather_parameters(
            shard, AXIS, fg.Identity(), parameters=parameters, dimension=axis, step=0
        )
        return jnp.sum(found * factor), found

    def both(shard, factor):
        grad, found = jax.grad(loss, has_aux=True)(shard, factor)
        return grad, found

    grads, found = everywhere(mode, both, WORKERS)(shards, factors)
    for row in found:
        np.testing.assert_allclose(row, whole, rtol=1e-6)
    expected = np.split(np.asarray(factors, np.float64).sum(0), WORKERS, axis=axis)
    np.testing.assert_allclose(grads, np.stack(expected), rtol=1e-4, atol=1e-4)


def results(step, key):
    """What a gather and its gradient are in a step, with codecs that draw."""

    def loss(shard, factor):
        found = fg.optimizers.gather_parameters(
            shard, AXIS, TWO_BITS, parameters=TWO_BITS, step=step, key=key
        )
        return jnp.sum(found * factor), found

    def both(shard, factor):
        grad, found = jax.grad(loss, has_aux=True)(shard, factor)
        return grad, found

    x, y = jnp.asarray(values((WORKERS, 64))), jnp.asarray(values((WORKERS, 256), seed=1))
    return [np.asarray(a).tobytes() for a in jax.jit(jax.vmap(both, axis_name=AXIS))(x, y)]


def test_steps_and_keys_draw_anew_on_both_ways():
    first = results(step=0, key=0)
    assert first == results(step=0, key=jax.random.key(0))
    for other in (results(step=1, key=0), results(step=0, key=1)):
        assert all(a != b for a, b in zip(first, other, strict=True))


def test_there_is_no_default_for_the_step():
    """Draws that repeat in each step add up."""
    gather = jax.vmap(lambda x: fg.optimizers.gather_parameters(x, AXIS), axis_name=AXIS)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'step'"):
        gather(jnp.ones((WORKERS, 4)))


# What is taken where nothing is said


@pytest.mark.parametrize(
    ("function", "argument", "codec"),
    [
        (fg.optimizers.compressed_psum_scatter, "codec", FOUR),
        (fg.optimizers.gather_parameters, "gradients", FOUR),
        (fg.optimizers.sharded, "gradients", FOUR),
        (fg.optimizers.compressed_all_gather, "codec", EIGHT),
        (fg.optimizers.sharded, "parameters", EIGHT),
    ],
)
def test_what_is_taken_by_itself(function, argument, codec):
    assert inspect.signature(function).parameters[argument].default == codec


def test_gradients_with_an_outlier_lose_less_by_the_rotation():
    x = jnp.asarray(values((WORKERS, 4096))).at[:, ::256].multiply(100.0)
    exact = np.asarray(x, np.float64).sum(0).reshape(WORKERS, -1)

    def error(**codec):
        def scatter(x):
            return fg.optimizers.compressed_psum_scatter(x, AXIS, **codec).shard

        scatter = everywhere("vmap", scatter, WORKERS)
        apart = (np.asarray(scatter(x)) - exact)[:, 1:256]  # beside the outlier
        return np.linalg.norm(apart)

    assert error() < 0.7 * error(codec=fg.UniformQuantizer(bits=4, bucket=256, norm="max"))
