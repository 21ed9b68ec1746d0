"""What a trace knows of collectives: which there are, and what one worker computes between them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import EXCHANGES, sample
from jax import lax
from parallel import AXIS, everywhere, of_size

import fftgrad as fg
from fftgrad.ops import _collectives
from fftgrad.planning import _timing

X = np.random.default_rng(0).standard_t(3, (300,)).astype(np.float32)

# Of equal workers the first gets what all get, unless each draws or leads on its own.
OWN = {
    "led by one",
    "learned codes",
    "summed codes",
    "shared support",
    "shared frequencies",
    "shared rotations",
    "gather rotations",
    "ladder",
}
OWN |= {"gather stochastic", "integer sum", "two stages, one sign", "gather rotated"}
OWN |= {"votes, summed"}
ALIKE = sorted(set(EXCHANGES) - OWN)


@pytest.mark.parametrize("name", sample(ALIKE))
def test_one_of_equal_workers_computes_what_all_of_them_get(name):
    """In the second step, which has a state."""
    exchange = of_size(EXCHANGES[name], 3)
    tx = fg.compressed_pmean(exchange, axis_name=AXIS)
    rows = np.stack([X, X, X])
    all_of_them = everywhere("vmap", tx.update, 3)
    _, states = all_of_them(rows, jax.jit(jax.vmap(tx.init))(rows))
    together, _ = all_of_them(rows, states)
    state = jax.tree.map(lambda a: a[0], states)
    alone, _ = jax.jit(_timing.alone(tx.update, {AXIS: 3}))(X, state)
    if isinstance(
        getattr(exchange, "exchange", exchange), fg.TwoStage
    ):  # it has the first shard of all
        size = -(-X.size // 3)
        np.testing.assert_array_equal(alone[:size], together[0][:size])
    else:
        # A sum of equal values rounds otherwise than a product.
        np.testing.assert_allclose(alone, together[0], rtol=1e-5, atol=1e-5)


def collective(name, x):
    """Each primitive in both of its forms."""
    return {
        "psum": lambda: lax.psum(x, AXIS),
        "pmax": lambda: lax.pmax(x, AXIS),
        "pmin": lambda: lax.pmin(x, AXIS),
        "all_gather": lambda: lax.all_gather(x, AXIS, axis=1),
        "all_gather tiled": lambda: lax.all_gather(x, AXIS, axis=1, tiled=True),
        "all_to_all": lambda: lax.all_to_all(x[:3], AXIS, 0, 0),
        "all_to_all across": lambda: lax.all_to_all(x[:3], AXIS, 0, 1),
        "all_to_all tiled": lambda: lax.all_to_all(x, AXIS, 0, 1, tiled=True),
        "psum_scatter": lambda: lax.psum_scatter(x[:3], AXIS),
        "psum_scatter tiled": lambda: lax.psum_scatter(x, AXIS, tiled=True),
        "ppermute": lambda: lax.ppermute(x, AXIS, [(0, 1), (1, 2), (2, 0)]),
    }[name]()


NAMES = ("psum", "pmax", "pmin", "all_gather", "all_gather tiled", "all_to_all", "all_to_all tiled")
NAMES += ("all_to_all across", "psum_scatter", "psum_scatter tiled", "ppermute")


@pytest.mark.parametrize("name", NAMES)
def test_every_collective(name):
    x = np.arange(24, dtype=np.float32).reshape(6, 4)
    send, rows = (lambda x: collective(name, x)), np.stack([x] * 3)
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
    total, pair = _timing.alone(both, {"slow": 5, "fast": 2})(jnp.ones(3))
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
    np.testing.assert_array_equal(_timing.alone(pairs, {AXIS: 4})(X), 2 * X)


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
    (_, kept, _) = (*_timing.until_sent(either, {AXIS: 4})(X, True), None)[:3]
    np.testing.assert_array_equal(kept, X)


def test_the_first_that_is_sent():
    def send(x):
        words = lax.all_gather(2 * x, AXIS)
        return lax.psum(jnp.sum(words), AXIS)

    (first,) = _timing.until_sent(send, {AXIS: 4})(X)
    np.testing.assert_array_equal(first, 2 * X)
    assert _timing.until_sent(lambda x: 2 * x, {AXIS: 4})(X) == ()
    compiled = jax.jit(_timing.until_sent(send, {AXIS: 4})).lower(X).compile()
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
