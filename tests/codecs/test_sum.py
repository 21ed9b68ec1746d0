"""Sums of what many payloads stand for: in order, to the bit, and in bounded memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import values

import fftgrad as fg
from fftgrad.codecs import _sum
from fftgrad.codecs._chain import payload_spec

N, WORKERS = 4096, 12
STEP = fg.Step.of(0)
BLOCKS = fg.chain(fg.Fft(block=4), fg.TopK(k=2), fg.RangeFloat(8))
CODECS = [fg.TopK(fraction=0.05), fg.Budget(ratio=25), BLOCKS]


@pytest.fixture
def on_an_accelerator(monkeypatch):
    """Takes its branches, and this size for a large one."""
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **_: default(*args))
    monkeypatch.setattr(_sum, "LARGE", 1)


def added(codec, workers=WORKERS, n=N):
    """The program, the sum that it adds to, and payloads of so many workers."""
    rows = np.stack([values((n,), seed) for seed in range(workers)])
    payloads = jax.jit(jax.vmap(lambda row: fg.compress(codec, row, step=STEP)))(rows)
    return program(codec, workers), np.ones(n, np.float32), payloads


def program(codec, workers=WORKERS):
    scale = np.arange(1, workers + 1, dtype=np.float32)
    return jax.jit(functools.partial(_sum.add_each, codec, scale=scale, step=STEP))


@pytest.mark.usefixtures("on_an_accelerator")
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_groups_of_payloads_are_added_in_the_order_of_the_workers(codec, monkeypatch):
    add, total, payloads = added(codec)
    bits = [np.asarray(add(total, payloads))]
    for decoded in (1, 1000):  # all side by side, and one by one
        monkeypatch.setattr(_sum, "DECODED", decoded)
        bits.append(np.asarray(program(codec)(total, payloads)))
    one, add_one = total, jax.jit(functools.partial(_sum.add, codec, step=STEP))
    for i in range(WORKERS):
        own = jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i], payloads)
        one = add_one(one, own, np.float32(i + 1))
    for found in bits:
        if codec == BLOCKS:  # products of matrices
            np.testing.assert_allclose(found, one, rtol=1e-4, atol=1e-4)
        else:
            np.testing.assert_array_equal(found, one)


@pytest.mark.usefixtures("on_an_accelerator")
def test_the_memory_of_a_sum_does_not_grow_with_the_workers():
    codec, like = fg.TopK(fraction=0.2), jax.ShapeDtypeStruct((1 << 14,), jnp.float32)

    def temporaries(workers):
        rows = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((workers, *leaf.shape), leaf.dtype),
            payload_spec(codec, like),
        )
        compiled = program(codec, workers).lower(like, rows).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(32) < 1.5 * temporaries(4)


@pytest.mark.usefixtures("on_an_accelerator")
@pytest.mark.parametrize("codec", [*CODECS, fg.Sign()], ids=repr)
def test_shards_are_decoded_side_by_side_and_not_in_a_loop(codec):
    _, total, payloads = added(codec)
    scale = np.arange(1, WORKERS + 1, dtype=np.float32)

    def add(payloads, scale):
        return _sum.add_each(codec, total, payloads, scale, STEP, shards=True)

    np.testing.assert_allclose(
        jax.jit(add)(payloads, scale), program(codec)(total, payloads), rtol=1e-4, atol=1e-4
    )

    def loops(workers):
        rows = jax.tree.map(lambda leaf: np.zeros((workers, *leaf.shape[1:]), leaf.dtype), payloads)
        compiled = jax.jit(add).lower(rows, np.ones(workers, np.float32)).compile().as_text()
        return compiled.count("while(")

    assert loops(64) == loops(4)
