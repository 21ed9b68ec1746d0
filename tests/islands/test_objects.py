"""What is in the store: its bytes, what becomes of altered ones, and the mean of contributions."""

import functools

import hypothesis
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from simulation import NESTEROV, PARAMS, SETTINGS

import fftgrad as fg
from fftgrad.islands import _objects, _round
from fftgrad.islands._model import Model, Programs
from fftgrad.islands._objects import Contribution, DamagedError, Entry, Manifest, Refusal, Who
from fftgrad.islands._round import read_anchor

SHAPES = (("b", (3,)), ("w", (4, 4)))
MODEL = Model.of(PARAMS)


@functools.cache
def descent(rate):
    return optax.sgd(rate)


def trees(count):
    rng = np.random.default_rng(0)
    return [{k: rng.standard_normal(s).astype(np.float32) for k, s in SHAPES} for _ in range(count)]


def payloads(programs, tree):
    return programs.compress(fg.NoMemory(), tree, (), programs.init(), 5, 7)[0]


def mean(exchange, changes, shares):
    """The step that plain descent takes by these changes."""
    programs = Programs(SHAPES, exchange, descent)
    zero = {k: np.zeros(s, np.float32) for k, s in SHAPES}
    sent = [payloads(programs, change) for change in changes]
    state = (zero, descent(1.0).init(zero))
    params, _ = programs.advance(state, sent, shares, 5)
    return {k: -leaf for k, leaf in params.items()}


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_mean_is_weighted_and_copies_count_nothing(count):
    changes, shares = trees(count), np.arange(1, count + 1) / sum(range(1, count + 1))
    found = mean(fg.AllGather(fg.codecs.Identity()), changes, shares)
    for path, _ in SHAPES:
        wanted = sum(s * change[path] for s, change in zip(shares, changes, strict=True))
        np.testing.assert_allclose(found[path], wanted, atol=1e-6)


def test_leaves_of_one_size_keep_their_own_means():
    shapes = tuple((path, (3,)) for path in "ab")
    programs = Programs(shapes, fg.AllGather(lambda *_: fg.codecs.Identity()), descent)
    changes = [{"a": np.full(3, i, np.float32), "b": np.full(3, -i, np.float32)} for i in (1, 5, 9)]
    sent = [programs.from_bytes(programs.to_bytes(payloads(programs, c))) for c in changes]
    zero = {path: np.zeros(3, np.float32) for path in "ab"}
    moved, _ = programs.advance((zero, descent(1.0).init(zero)), sent, [0.5, 0.25, 0.25], 5)
    np.testing.assert_allclose(moved["a"], -4.0)
    np.testing.assert_allclose(moved["b"], 4.0)


SHARES = [0.1, 0.2, 0.3, 0.4]


def test_weights_count_after_the_clip():
    """Σ w · clip(v) / Σ w: a weight makes nothing longer, and none of the others shorter."""
    changes = trees(4)
    changes[3] = {k: 50 * leaf for k, leaf in changes[3].items()}
    found = mean(fg.AllGather(fg.codecs.Identity(), clip_to_median=True), changes, SHARES)
    flat = np.stack([np.concatenate([c[k].ravel() for k, _ in SHAPES]) for c in changes])
    norms = np.linalg.norm(flat.astype(np.float64), axis=1)
    clipped = flat * np.minimum(1.0, np.median(norms) / norms)[:, None]
    wanted = np.array(SHARES) @ clipped
    np.testing.assert_allclose(
        np.concatenate([found[k].ravel() for k, _ in SHAPES]), wanted, rtol=1e-5, atol=1e-6
    )


def by_leaf(name, _):
    return fg.TopK(k=2) if name == "w" else fg.codecs.Identity()


@pytest.mark.parametrize(
    "codec",
    [
        fg.chain(fg.Dct(block=4), fg.TopK(fraction=0.5)),
        fg.codecs.RandomK(k=4),
        fg.Budget(ratio=4),
        by_leaf,
    ],
    ids=["dct", "random-k", "budget", "rule"],
)
def test_others_decode_what_was_sent(codec):
    """Also of codecs that draw, and of a rule by leaf."""
    programs = Programs(SHAPES, fg.AllGather(codec))
    (tree,) = trees(1)
    own, sent, *_ = programs.compress(fg.NoMemory(), tree, (), programs.init(), 5, 7)
    blobs = programs.to_bytes(own)
    again = programs.from_bytes([memoryview(blob) for blob in blobs])
    vectors = np.concatenate(programs.decode(again, 5))
    np.testing.assert_allclose(vectors, np.concatenate([sent[k].ravel() for k, _ in SHAPES]))


def contribution():
    programs = Programs(SHAPES, SETTINGS.exchange)
    blobs = programs.to_bytes(payloads(programs, trees(1)[0]))
    return Contribution(Who("a", 1), 3, 2, "00", "22", 1.5, None, "", blobs).to_bytes()


def manifest():
    entry = Entry("a", 1, "00", 1.5, 2, None, 3.0)
    refusal = Refusal("b", 2, "altered")
    return Manifest(3, Who("a", 1), "00", [entry], [refusal], ["c"], ["a"], 1.0).to_bytes()


def anchor():
    return _round.first_anchor(PARAMS, PROGRAMS).to_bytes()


PROGRAMS = Programs(SHAPES, SETTINGS.exchange, NESTEROV)


READ = {
    "contribution": lambda data: Contribution.from_bytes(data),
    "manifest": lambda data: Manifest.from_bytes(data, 3),
    "anchor": lambda data: read_anchor(data, PROGRAMS),
}
WRITTEN = {"contribution": contribution(), "manifest": manifest(), "anchor": anchor()}


@pytest.mark.parametrize("kind", READ)
def test_an_object_is_read_as_it_was_written(kind):
    assert READ[kind](WRITTEN[kind]).to_bytes() == WRITTEN[kind]


@pytest.mark.parametrize("kind", READ)
@hypothesis.given(st.data())
def test_altered_bytes_are_refused_or_mean_something(kind, data):
    """Never another error than the one that says so, and none of an array is ever other bits."""
    written, read = WRITTEN[kind], READ[kind]
    at = data.draw(st.integers(0, len(written) - 1))
    new = data.draw(st.binary(max_size=4))
    altered = written[:at] + new + written[at + data.draw(st.integers(0, 4)) :]
    hypothesis.assume(altered != written)
    try:
        read(altered)
    except DamagedError:
        return
    assert kind == "manifest"  # JSON, whose truth is that it was made once


def test_a_manifest_of_another_format_is_no_damage(monkeypatch):
    """Or another one would be written in its place."""
    monkeypatch.setattr(_objects, "FORMAT", 99)
    data = _objects.pack_json(_objects.unpack_json(WRITTEN["manifest"]))
    monkeypatch.undo()
    with pytest.raises(ValueError, match="format 3, got a manifest of round 3 of format 99") as e:
        Manifest.from_bytes(data, 3)
    assert not isinstance(e.value, DamagedError)


def test_an_anchor_is_of_its_outer_optimizer():
    with pytest.raises(DamagedError, match="another outer optimizer"):
        read_anchor(WRITTEN["anchor"], Programs(SHAPES, SETTINGS.exchange, optax.adam))
    other = Model.of({"w": jnp.zeros((4, 4))})
    with pytest.raises(DamagedError, match="of other parameters"):
        read_anchor(WRITTEN["anchor"], Programs.of(other, SETTINGS.exchange, NESTEROV))


def test_a_damaged_manifest_is_named():
    with pytest.raises(DamagedError, match="altered"):
        Manifest.from_bytes(WRITTEN["manifest"].replace(b'"weight": 1.5', b'"weight": 1.6'), 3)
    with pytest.raises(DamagedError, match="no JSON"):
        Manifest.from_bytes(b"{", 3)
    with pytest.raises(DamagedError, match="is that of round 3"):
        Manifest.from_bytes(WRITTEN["manifest"], 4)
