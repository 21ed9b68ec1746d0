"""Traces of one platform: for shapes alone, and never in the place of a program."""

import jax
import jax.numpy as jnp
import pytest

import fftgrad as fg
from fftgrad.ops import _collectives, _platform

LIKE = jax.ShapeDtypeStruct((100_000,), jnp.float32)
pytestmark = pytest.mark.usefixtures("every_platform")


def both(x):
    return _platform.dependent(x, cpu=jnp.sin, default=jnp.cos)


def platforms(function):
    return str(jax.make_jaxpr(function)(LIKE)).count("platform_index")


@pytest.mark.parametrize("jitted", [False, True])
def test_one_platform_is_traced_where_it_is_asked_for_and_no_trace_is_kept(jitted):
    function = jax.jit(both) if jitted else both
    with _platform.one():
        assert platforms(function) == 0
    with pytest.raises(ZeroDivisionError), _platform.one():
        raise ZeroDivisionError
    assert platforms(function) == 1


def test_what_it_sends_is_read_off_one_platform_and_the_update_has_all():
    tx = fg.compressed_pmean(fg.AllGather(fg.TopK(fraction=0.01)), axis_name="data")
    state = jax.eval_shape(tx.init, LIKE)
    assert _collectives.collectives(tx.update, {"data": 2}, LIKE, state)
    traced = jax.make_jaxpr(tx.update, axis_env=[("data", 2)])(LIKE, state)
    assert str(traced).count("platform_index") > 3


def test_a_program_that_is_called_twice_sends_twice_and_one_in_a_loop_repeats():
    mean = jax.jit(lambda x: jax.lax.pmean(x, "data"))
    quiet = jax.jit(lambda x: x + 1)
    like = jax.ShapeDtypeStruct((3,), jnp.float32)
    twice = _collectives.collectives(lambda x: mean(quiet(mean(quiet(x)))), {"data": 2}, like)
    assert [c.repeated for c in twice] == [False, False]

    def loop(x):
        return jax.lax.scan(lambda x, _: (mean(quiet(x)), None), mean(x), None, 3)[0]

    assert [c.repeated for c in _collectives.collectives(loop, {"data": 2}, like)] == [False, True]
