"""Arrays as one and back: pieces are those of NumPy, and readers of equal ones share a kernel."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fftgrad.ops import _shapes

SIZES = [3, 1, 0, 4, 4, 3, 2, 4, 4, 4]
X = np.random.default_rng(0).normal(size=(6, sum(SIZES))).astype(np.float32)


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize("sizes", [SIZES, [29], [20, 9]], ids=["many", "one", "two"])
def test_pieces_follow_each_other_along_any_axis(sizes):
    stops = np.cumsum(sizes)[:-1]
    ways = {
        "first": (_shapes.cut(jnp.asarray(X[0]), sizes), np.split(X[0], stops)),
        "last": (_shapes.cut(jnp.asarray(X), sizes, 1), np.split(X, stops, 1)),
        "rows": (
            jax.vmap(lambda row: _shapes.cut(row, sizes))(jnp.asarray(X)),
            np.split(X, stops, 1),
        ),
        "columns": (
            jax.vmap(lambda column: _shapes.cut(column, sizes), 1, 1)(jnp.asarray(X.T)),
            np.split(X.T, stops, 0),
        ),
        "rows of rows": (
            jax.vmap(jax.vmap(lambda row: _shapes.cut(row, sizes)))(X.reshape(2, 3, -1)),
            np.split(X.reshape(2, 3, -1), stops, 2),
        ),
    }
    for name, (pieces, wanted) in ways.items():
        for piece, right in zip(pieces, wanted, strict=True):
            np.testing.assert_array_equal(piece, right, err_msg=name)


@pytest.mark.usefixtures("platform")
def test_unstack_is_the_inverse_of_stack():
    rows = [jnp.asarray(X[:, i : i + 2]) for i in range(_shapes.FEW + 2)]
    for row, right in zip(_shapes.unstack(jnp.stack(rows)), rows, strict=True):
        np.testing.assert_array_equal(row, right)


@pytest.mark.usefixtures("every_platform")
@pytest.mark.parametrize("axis", [0, 1])
def test_readers_of_equal_pieces_are_one_kernel(axis):
    """As the compiler sees them; it makes equal ones once."""

    def read(x):
        return [jnp.sin(piece) / (1 + piece) for piece in _shapes.cut(x, [16] * 20, axis)]

    x = jnp.ones((320,) if axis == 0 else (2, 320))
    text = jax.jit(read).lower(x).compile().as_text()
    bodies = re.findall(r"\n%fused_computation\S* \(.*?\n(.*?)\n}", text, re.DOTALL)
    readers = [re.sub(r"(%[\w-]+)[.\w-]*|, metadata={.*?}", r"\1", body) for body in bodies]
    assert sum("sine" in body for body in readers) == 20
    assert len({body for body in readers if "sine" in body}) == 1


@pytest.mark.usefixtures("platform")
def test_pieces_may_be_of_anything_and_of_nothing():
    keys = jax.random.split(jax.random.key(0), _shapes.FEW)
    for key, own in zip(_shapes.unstack(keys), keys, strict=True):
        assert jax.random.key_data(key).tolist() == jax.random.key_data(own).tolist()
    assert [p.shape for p in _shapes.cut(jnp.zeros(0), [0] * 9)] == [(0,)] * 9
    with jax.enable_x64(True):
        pieces = _shapes.cut(jnp.arange(20.0), [2] * 10)
    assert [p.tolist() for p in pieces[:2]] == [[0.0, 1.0], [2.0, 3.0]]


@pytest.mark.usefixtures("every_platform")
def test_pieces_have_derivatives_both_ways():
    weights = jnp.arange(1.0, 11.0)

    def total(x):
        return sum(w * piece.sum() for w, piece in zip(weights, _shapes.cut(x, [2] * 10)))  # noqa: B905

    right = jnp.repeat(weights, 2)
    np.testing.assert_array_equal(jax.grad(total)(jnp.ones(20)), right)
    rows = jnp.ones((3, 20))
    np.testing.assert_array_equal(jax.vmap(jax.grad(total))(rows), jnp.stack([right] * 3))
    _, tangent = jax.jvp(total, (jnp.ones(20),), (jnp.ones(20),))
    assert tangent == right.sum()
