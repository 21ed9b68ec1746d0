"""The best codec for a sample: it is measured, keeps to the bytes, and finds the basis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SLOW, values

import fftgrad as fg
from fftgrad.advise import _search_codec

N = 512
WAVE = np.sin(np.arange(N) / 9).astype(np.float32)
SPIKES = np.where(np.arange(N) % 61 == 4, values((N,)), 0.001 * values((N,), 1)).astype(np.float32)


def error_of(codec, *gradients):
    round_trip = jax.jit(lambda g: fg.decompress(codec, fg.compress(codec, g), g))
    lost = [g - round_trip(g) for g in gradients]
    return np.linalg.norm(lost) / np.linalg.norm(gradients)


@pytest.mark.parametrize(("gradient", "basis"), [(WAVE, fg.Dct), (SPIKES, fg.Budget)])
def test_it_finds_the_basis_that_compacts(gradient, basis):
    found = fg.advise.search_codec(gradient, bytes=100)
    assert isinstance(getattr(found.codec, "stages", (found.codec,))[0], basis)
    assert found.bytes == fg.wire_bytes(found.codec, gradient) <= 100
    assert found.error == pytest.approx(error_of(found.codec, gradient), rel=1e-3)
    assert found[:3] == found.rows[0]
    errors = [row.error for row in found.rows]
    assert errors == sorted(errors)
    assert all(row.bytes <= 100 for row in found.rows)
    assert {type(row.codec).__name__ for row in found.rows} >= {"Budget", "Sign", "Chain"}
    assert str(found).count("\n") == len(found.rows) - 1
    assert repr(found.codec) in str(found)


@pytest.fixture(params=["few", pytest.param("all", marks=SLOW)])
def families(request, monkeypatch):
    """What is tried compiles a program each: here one of each kind, or all."""
    if request.param == "few":
        monkeypatch.setattr(_search_codec, "FILLED", _search_codec.FILLED[:2])
        monkeypatch.setattr(_search_codec, "LEVEL_BITS", (4,))
        monkeypatch.setattr(_search_codec, "DENSE", (fg.Sign(), fg.Cast("bfloat16")))


@pytest.mark.usefixtures("families")
def test_the_error_is_that_of_the_whole_sample():
    tree = {"a": jnp.asarray(SPIKES[:200]), "b": jnp.asarray(SPIKES[200:]).reshape(24, 13)}
    more = jax.tree.map(lambda leaf: 3 * leaf[::-1], tree)
    rows = [np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(g)]) for g in (tree, more)]
    found = fg.advise.search_codec(tree, more, bytes=80)
    assert found.error == pytest.approx(error_of(found.codec, *rows), rel=1e-3)


@pytest.mark.usefixtures("families")
def test_it_finds_the_least_bytes_within_an_error():
    found = fg.advise.search_codec(SPIKES, error=0.02)
    assert found.error <= 0.02
    assert all(row.error <= 0.02 and row.bytes >= found.bytes for row in found.rows)
    smaller = fg.advise.search_codec(SPIKES, bytes=int(found.bytes * 0.8))
    assert smaller.error > 0.02


@pytest.mark.parametrize(
    ("call", "error", "remedy"),
    [
        (lambda: fg.advise.search_codec(WAVE), ValueError, "exactly one must be given"),
        (
            lambda: fg.advise.search_codec(WAVE, bytes=9, error=0.1),
            ValueError,
            "exactly one must be given",
        ),
        (lambda: fg.advise.search_codec(bytes=90), ValueError, "a value at least, got none"),
        (lambda: fg.advise.search_codec(WAVE, WAVE[:9], bytes=90), ValueError, "one structure"),
        (
            lambda: fg.advise.search_codec(0 * WAVE, bytes=90),
            ValueError,
            "not be all zero, got only zeros",
        ),
        (lambda: fg.advise.search_codec(WAVE / 0, bytes=90), ValueError, "must be finite"),
        (lambda: fg.advise.search_codec(WAVE, error=1.5), ValueError, r"must be in \(0, 1\)"),
        (lambda: fg.advise.search_codec(WAVE, bytes=20), ValueError, "got 20; use bytes=28"),
        (
            lambda: jax.jit(lambda g: fg.advise.search_codec(g, bytes=90))(WAVE),
            TypeError,
            "outside of jax.jit",
        ),
        (
            lambda: fg.advise.search_codec(np.arange(9), bytes=90),
            TypeError,
            "must be of floating-point values, got int64",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*encountered in divide:RuntimeWarning")
def test_mistakes_are_answered(call, error, remedy):
    with pytest.raises(error, match=remedy):
        call()
