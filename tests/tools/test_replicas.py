"""Whether all workers hold the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import values
from hypothesis import given
from hypothesis import strategies as st
from parallel import AXIS, MODES, everywhere

import fftgrad as fg


def check(tree):
    return fg.tools.replica_checksum(tree, AXIS)


def rows(dtype="float32"):
    tree = {"a": values((33,)), "b": [values((4, 5), seed=1), values((), seed=2)]}
    return jax.tree.map(lambda x: jnp.asarray(np.broadcast_to(x, (4, *x.shape)), dtype), tree)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool"])
def test_equal_bits_are_equal(mode, dtype):
    found = everywhere(mode, check, 4)(rows(dtype))
    assert np.all(found.equal)
    assert len(set(np.asarray(found.checksum).tolist())) == 1


on_four = jax.jit(jax.vmap(check, axis_name=AXIS))


@given(worker=st.integers(0, 3), position=st.integers(0, 32), bit=st.integers(0, 31))
def test_any_one_bit_is_seen_by_all(worker, position, bit):
    tree = rows()
    words = np.asarray(tree["a"]).view(np.uint32).copy()
    words[worker, position] ^= np.uint32(1) << np.uint32(bit)
    tree["a"] = jnp.asarray(words.view(np.float32))
    found = on_four(tree)
    assert not np.any(found.equal)
    assert len(set(np.asarray(found.checksum).tolist())) == 2


def test_order_and_zeros_count():
    x = jnp.asarray(values((4,)))
    one, other = ({"a": x, "b": x[::-1]}, {"a": x[::-1], "b": x})
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), one, other)
    assert not np.any(everywhere("vmap", check, 2)(stacked).equal)
    zeros = jnp.array([[0.0, 1.0], [-0.0, 1.0]])
    assert not np.any(everywhere("vmap", check, 2)(zeros).equal)
    nans = jnp.full((2, 3), jnp.nan)
    assert np.all(everywhere("vmap", check, 2)(nans).equal)


def test_it_costs_8_bytes_and_repairs_as_shown():
    run = everywhere("shard_map", check, 4)
    assert sum(c.bytes for c in fg.audit(run.lower(rows()).compile())) == 8

    def repair(tree):
        first = jax.lax.axis_index(AXIS) == 0
        tree = jax.tree.map(
            lambda p: jax.lax.psum(jnp.where(first, p, jnp.zeros_like(p)), AXIS), tree
        )
        return check(tree).equal

    broken = rows()
    broken["a"] = broken["a"].at[2, 7].add(1e-3)
    assert not np.any(run(broken).equal)
    assert np.all(everywhere("shard_map", repair, 4)(broken))


def test_wide_values_are_refused():
    with pytest.raises(TypeError, match="cast it"):
        jax.vmap(check, axis_name=AXIS)(jnp.ones((2, 3), jnp.complex64))
