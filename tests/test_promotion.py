"""Under strict promotion of dtypes, which some users set, all is traced as it is without."""

import jax
import jax.numpy as jnp
import pytest
from cases import CODECS, EXCHANGES, MEMORIES, METHODS, SLOW, sample

import fftgrad as fg

AXIS, WORKERS = "data", 4
TYPICAL = {"beer", "choco_sgd", "diloco", "sparse_loco", "top_k"}
OWN_ADAM = {"scale_by_dion", "feedback_adam", "sharded"}
"""Optax's Adam takes a power of a float and a count, which strict promotion refuses."""
STEP = fg.Step.of(3)


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize("name", sample(CODECS))
def test_codecs(name):
    def both_ways(x):
        return fg.decompress(CODECS[name], fg.compress(CODECS[name], x, step=STEP), x, step=STEP)

    like = jax.ShapeDtypeStruct((150,), jnp.bfloat16)
    assert jax.eval_shape(both_ways, like).dtype == like.dtype


def check_mean(exchange, memory):
    """The workers make a mean like a gradient of two dtypes."""
    tx = fg.compressed_pmean(exchange, memory, axis_name=AXIS)
    like = {"w": jnp.zeros((WORKERS, 10, 15)), "b": jnp.zeros((WORKERS, 5), jnp.bfloat16)}
    step = jax.vmap(lambda grad: tx.update(grad, tx.init(grad))[0], axis_name=AXIS)
    assert like_each_other(jax.eval_shape(step, like), like)


def like_each_other(one, other):
    """Whether shapes and dtypes are equal."""
    return jax.tree.map(lambda a: (a.shape, a.dtype), one) == jax.tree.map(
        lambda a: (a.shape, a.dtype), other
    )


@pytest.mark.parametrize("name", sample(EXCHANGES))
def test_exchanges(name):
    check_mean(EXCHANGES[name], fg.ErrorFeedback())


@pytest.mark.parametrize("name", MEMORIES)
def test_memories(name):
    check_mean(fg.AllGather(fg.TopK(k=3)), MEMORIES[name])


@pytest.mark.parametrize(
    "name",
    [
        name if name in TYPICAL else pytest.param(name, marks=SLOW)
        for name in METHODS
        if name not in OWN_ADAM
    ],
)
def test_methods(name):
    """Of float32: what optax does with narrow leaves is its own."""
    tx = METHODS[name](AXIS)
    like = {"w": jnp.zeros((WORKERS, 10, 12)), "b": jnp.zeros((WORKERS, 5))}

    def step(params):
        return tx.update(params, tx.init(params), params, value=jnp.float32(1.0))[0]

    assert like_each_other(jax.eval_shape(jax.vmap(step, axis_name=AXIS), like), like)
