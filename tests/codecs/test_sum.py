"""Sums of what many payloads stand for: in order, to the bit, and in bounded memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import values

import fftgrad as fg
from fftgrad.codecs import _sum

N, WORKERS = 4096, 12
STEP = fg.Step.of(0)
CODECS = [fg.TopK(fraction=0.05), fg.Budget(ratio=25), fg.chain(fg.Dct(64), fg.TopK(k=9))]


@pytest.fixture
def on_an_accelerator(monkeypatch):
    """Takes its branches, and this size for a large one."""
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **_: default(*args))
    monkeypatch.setattr(_sum, "LARGE", 1)


def added(codec, workers=WORKERS, n=N):
    """The program, and payloads of so many workers."""
    rows = jnp.stack([jnp.asarray(values((n,), seed)) for seed in range(workers)])
    payloads = jax.vmap(lambda row: fg.compress(codec, row, step=STEP))(rows)
    add = functools.partial(_sum.add_each, codec, scale=jnp.arange(1.0, workers + 1), step=STEP)
    return jax.jit(add), jnp.ones(n), payloads


@pytest.mark.usefixtures("on_an_accelerator")
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_groups_of_payloads_are_added_in_the_order_of_the_workers(codec, monkeypatch):
    add, total, payloads = added(codec)
    bits = [np.asarray(add(total, payloads))]
    for decoded in (1, 1000):  # all side by side, and one by one
        monkeypatch.setattr(_sum, "DECODED", decoded)
        add, *_ = added(codec)
        bits.append(np.asarray(add(total, payloads)))
    one = total
    for i in range(WORKERS):
        own = jax.tree.map(lambda leaf, i=i: leaf[i], payloads)
        one = _sum.add(codec, one, own, jnp.float32(i + 1), STEP)
    for found in bits:
        np.testing.assert_array_equal(found, np.asarray(one))


def test_as_many_are_decoded_side_by_side_as_the_sum_has_room_for():
    n = 1 << 20
    assert _sum._together(64, n // 1000, n) == 64
    assert _sum._together(64, n // 20, n) == 2
    assert _sum._together(64, n // 4, n) == 1
    assert _sum._together(7, n // 20, n) == 1  # a divisor of the workers
    assert _sum._together(64, 1000, 1000) == 64  # too small to matter


@pytest.mark.usefixtures("on_an_accelerator")
def test_the_memory_of_a_sum_does_not_grow_with_the_workers():
    def temporaries(workers):
        add, total, payloads = added(fg.Budget(ratio=25), workers, 1 << 14)
        return add.lower(total, payloads).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(32) < 1.5 * temporaries(4)
