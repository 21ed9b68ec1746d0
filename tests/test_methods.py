"""Published methods: what they are made of, and what they do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from cases import METHODS, TREE, gradients
from parallel import AXIS, everywhere, train_step

import fftgrad as fg


@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
def test_a_method_is_one_line_of_a_chain(make):
    tx = optax.chain(make(AXIS), optax.sgd(0.1))
    grads = gradients(TREE, 4)
    updates = everywhere("shard_map", lambda g: tx.update(g, tx.init(g))[0], 4)(grads)
    for got, given in zip(jax.tree.leaves(updates), jax.tree.leaves(grads), strict=True):
        assert (got.shape, got.dtype) == (given.shape, given.dtype)
        assert bool(jnp.all(jnp.isfinite(got)))


def test_fft_sparsification_is_the_papers_pipeline():
    """Linearize, float16, whole FFT, top 15 %, 10 bits, average: in NumPy."""
    like = {
        "a": jax.ShapeDtypeStruct((10, 11), "float32"),
        "b": jax.ShapeDtypeStruct((40,), "float32"),
    }
    grads = gradients(like, 4)
    tx = fg.methods.fft_sparsification(theta=0.85, bits=10, axis_name=AXIS)
    mean = everywhere("shard_map", lambda g: tx.update(g, tx.init(g))[0], 4)(grads)
    got = np.concatenate([np.ravel(mean["a"][0]), np.ravel(mean["b"][0])])
    expected = np.zeros(150)
    for worker in range(4):
        g = np.concatenate([np.ravel(grads["a"][worker]), np.ravel(grads["b"][worker])])
        z = reference.fft(g, None, half=True)
        keep = reference.top_k(z, reference.kept(0.15, z.size))
        spectrum = np.zeros_like(z)
        spectrum[keep] = z[keep]
        expected += reference.inverse_fft(spectrum, 150, None) / 4
    # Ten bits with six of mantissa: half a step is 2^-7 of each number kept.
    assert np.linalg.norm(got - expected) <= 2.0**-7 * np.linalg.norm(expected)
    assert np.linalg.norm(got - expected) > 0


def test_a_diminishing_theta_changes_the_bytes_not_the_program():
    like = {"w": jax.ShapeDtypeStruct((1000,), "float32")}
    tx = fg.methods.fft_sparsification(theta_schedule={0: 0.9, 1: 0.5, 3: 0.0}, axis_name=AXIS)
    init, update = train_step(tx, 4, like=like)
    grads = gradients(like, 4)
    state = init({"w": jnp.zeros(1000)})
    sent = {c.branch: (c.kind, c.bytes) for c in fg.audit(update.lower(grads, state).compile())}
    assert sent[0,][1] < sent[1,][1] < sent[2,][1]
    assert sent[2,] == ("all-reduce", 4000)
    exact = np.asarray(grads["w"]).mean(0)
    errors = []
    for _ in range(5):
        mean, state = update(grads, state)
        errors.append(float(np.linalg.norm(mean["w"] - exact) / np.linalg.norm(exact)))
    assert errors[0] > errors[1] == errors[2] > 100 * errors[3]
    assert update._cache_size() == 1


@pytest.mark.parametrize("theta", [-0.1, 1.0, 15])
def test_theta_out_of_range(theta):
    with pytest.raises(ValueError, match=r"the paper uses 0\.85"):
        fg.methods.fft_sparsification(theta=theta)
