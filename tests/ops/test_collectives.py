"""What a trace knows of collectives: which there are, and what one worker computes between them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from parallel import AXIS, everywhere

import fftgrad as fg
from fftgrad.ops import _collectives
from fftgrad.planning import _timing

X = np.random.default_rng(0).standard_t(3, (300,)).astype(np.float32)


# Each primitive in both of its forms.
COLLECTIVES = {
    "psum": lambda x: lax.psum(x, AXIS),
    "pmax": lambda x: lax.pmax(x, AXIS),
    "pmin": lambda x: lax.pmin(x, AXIS),
    "all_gather": lambda x: lax.all_gather(x, AXIS, axis=1),
    "all_gather tiled": lambda x: lax.all_gather(x, AXIS, axis=1, tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x[:3], AXIS, 0, 0),
    "all_to_all across": lambda x: lax.all_to_all(x[:3], AXIS, 0, 1),
    "all_to_all tiled": lambda x: lax.all_to_all(x, AXIS, 0, 1, tiled=True),
    "psum_scatter": lambda x: lax.psum_scatter(x[:3], AXIS),
    "psum_scatter tiled": lambda x: lax.psum_scatter(x, AXIS, tiled=True),
    "ppermute": lambda x: lax.ppermute(x, AXIS, [(0, 1), (1, 2), (2, 0)]),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_collective(name):
    x = np.arange(24, dtype=np.float32).reshape(6, 4)
    send, rows = COLLECTIVES[name], np.stack([x] * 3)
    program = everywhere("shard_map unchecked", send, 3).lower(rows).compile()
    np.testing.assert_array_equal(jax.jit(_timing.alone(send, {AXIS: 3}))(x), program(rows)[0])
    (found,) = _collectives.collectives(send, {AXIS: 3}, x)
    (audited,) = (
        {(c.kind, c.dtype, c.link_bytes(3)) for c in fg.audit(program)}
        if "all_to_all" not in name
        else {("all-to-all", "f32", found.link_bytes(3))}
    )
    assert (found.kind, found.dtype, found.link_bytes(3)) == audited
    assert (found.workers, found.axes, found.branch) == (3, (AXIS,), ())


def test_axes_of_other_names_are_left_to_jax():
    def both(x):
        return lax.psum(jnp.sum(x), ("slow", "fast")), lax.psum(x, "fast")

    found = _collectives.collectives(both, {"slow": 5, "fast": 2}, X)
    assert [(c.workers, c.axes) for c in found] == [(10, ("slow", "fast")), (2, ("fast",))]
    total, pair = jax.jit(_timing.alone(both, {"slow": 5, "fast": 2}))(np.ones(3, "f4"))
    assert total == 30
    np.testing.assert_array_equal(pair, 2 * np.ones(3))


@pytest.mark.parametrize(
    ("dtype", "name"), [("bfloat16", "bf16"), ("float16", "f16"), ("bool", "pred"), ("int8", "s8")]
)
def test_types_are_named_as_the_compiler_does(dtype, name):
    like = jax.ShapeDtypeStruct((5,), dtype)
    (found,) = _collectives.collectives(lambda x: lax.all_gather(x, AXIS), {AXIS: 4}, like)
    assert (found.dtype, found.bytes) == (name, 5 * jnp.dtype(dtype).itemsize)


def test_workers_in_groups_are_those_of_a_group():
    def pairs(x):
        return lax.psum(x, AXIS, axis_index_groups=[[0, 1], [2, 3]])

    (found,) = _collectives.collectives(pairs, {AXIS: 4}, X)
    assert found.workers == 2
    np.testing.assert_array_equal(jax.jit(_timing.alone(pairs, {AXIS: 4}))(X), 2 * X)


def test_conditionals_are_followed():
    def either(x, flag):
        def inner(x):
            return lax.cond(flag, lambda x: lax.psum(x, AXIS), lambda x: x + 1, x)

        return jax.jit(inner)(x)

    run = jax.jit(_timing.alone(either, {AXIS: 4}))
    np.testing.assert_array_equal(run(X, True), 4 * X)
    np.testing.assert_array_equal(run(X, False), X + 1)
    (found,) = _collectives.collectives(either, {AXIS: 4}, X, True)
    assert (found.kind, found.branch) == ("all-reduce", (1,))
    _, kept = jax.jit(_timing.until_sent(either, {AXIS: 4}))(X, True)
    np.testing.assert_array_equal(kept, X)


def test_the_first_that_is_sent():
    def send(x):
        words = lax.all_gather(2 * x, AXIS)
        return lax.psum(jnp.sum(words), AXIS)

    compiled = jax.jit(_timing.until_sent(send, {AXIS: 4})).lower(X).compile()
    np.testing.assert_array_equal(*compiled(X), 2 * X)
    assert jax.eval_shape(_timing.until_sent(lambda x: 2 * x, {AXIS: 4}), X) == ()
    assert compiled.cost_analysis()["flops"] <= X.size


def test_a_collective_in_a_loop_is_refused():
    def loop(x):
        return lax.fori_loop(0, 3, lambda _, x: lax.pmean(x, AXIS), x)

    with pytest.raises(NotImplementedError, match="time it on real devices"):
        _timing.alone(loop, {AXIS: 4})(X)
    for around in (loop, lambda x: lax.fori_loop(0, 2, lambda _, x: jax.jit(loop)(x), x)):
        (found,) = _collectives.collectives(around, {AXIS: 4}, X)
        assert found.repeated
    with pytest.raises(ValueError, match="link_bytes of its own"):
        _collectives.unconditional(loop, {AXIS: 4}, X)
