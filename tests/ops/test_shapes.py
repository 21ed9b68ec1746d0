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

    def cut(row):
        return _shapes.cut(row, sizes)

    @jax.jit
    def ways(x):
        return {
            "first": cut(x[0]),
            "last": _shapes.cut(x, sizes, 1),
            "rows": jax.vmap(cut)(x),
            "columns": jax.vmap(cut, 1, 1)(x.T),
            "rows of rows": jax.vmap(jax.vmap(cut))(x.reshape(2, 3, -1)),
        }

    wanted = {
        "first": np.split(X[0], stops),
        "last": np.split(X, stops, 1),
        "rows": np.split(X, stops, 1),
        "columns": np.split(X.T, stops, 0),
        "rows of rows": np.split(X.reshape(2, 3, -1), stops, 2),
    }
    for name, pieces in ways(X).items():
        for piece, right in zip(pieces, wanted[name], strict=True):
            np.testing.assert_array_equal(piece, right, err_msg=name)


@pytest.mark.usefixtures("platform")
def test_unstack_is_the_inverse_of_stack():
    rows = [X[:, i : i + 2] for i in range(_shapes.FEW + 2)]
    for row, right in zip(jax.jit(_shapes.unstack)(np.stack(rows)), rows, strict=True):
        np.testing.assert_array_equal(row, right)


@pytest.mark.usefixtures("every_platform")
@pytest.mark.parametrize("axis", [0, 1])
def test_readers_of_equal_pieces_are_one_kernel(axis):
    """As the compiler sees them; it makes equal ones once."""

    def read(x):
        return [jnp.sin(piece) / (1 + piece) for piece in _shapes.cut(x, [16] * 20, axis)]

    x = np.ones((320,) if axis == 0 else (2, 320), np.float32)
    text = jax.jit(read).lower(x).compile().as_text()
    bodies = re.findall(r"\n%fused_computation\S* \(.*?\n(.*?)\n}", text, re.DOTALL)
    readers = [re.sub(r"(%[\w-]+)[.\w-]*|, metadata={.*?}", r"\1", body) for body in bodies]
    assert sum("sine" in body for body in readers) == 20
    assert len({body for body in readers if "sine" in body}) == 1


@pytest.mark.usefixtures("platform")
def test_pieces_may_be_of_anything_and_of_nothing():
    keys = jax.random.split(jax.random.key(0), _shapes.FEW)
    data = jax.jit(lambda keys: [jax.random.key_data(key) for key in _shapes.unstack(keys)])
    np.testing.assert_array_equal(data(keys), jax.random.key_data(keys))
    like = jax.ShapeDtypeStruct((0,), "float32")
    empty = jax.eval_shape(lambda x: _shapes.cut(x, [0] * 9), like)
    assert [piece.shape for piece in empty] == [(0,)] * 9
    with jax.enable_x64(True):
        pieces = jax.jit(lambda x: _shapes.cut(x, [2] * 10))(np.arange(20.0))
    assert [p.tolist() for p in pieces[:2]] == [[0.0, 1.0], [2.0, 3.0]]


@pytest.mark.usefixtures("every_platform")
def test_pieces_have_derivatives_both_ways():
    weights, rows = np.arange(1, 11, dtype=np.float32), np.ones((3, 20), np.float32)

    def total(x):
        return sum(w * piece.sum() for w, piece in zip(weights, _shapes.cut(x, [2] * 10)))  # noqa: B905

    @jax.jit
    def derivatives(rows):
        one, gradient = rows[0], jax.grad(total)
        return gradient(one), jax.vmap(gradient)(rows), jax.jvp(total, (one,), (one,))[1]

    alone, mapped, tangent = derivatives(rows)
    right = np.repeat(weights, 2)
    np.testing.assert_array_equal(alone, right)
    np.testing.assert_array_equal(mapped, np.stack([right] * 3))
    assert tangent == right.sum()
