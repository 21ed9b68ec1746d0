"""Gradients in files; the figures of an analysis, against known data; and its recommendation."""

import jax.numpy as jnp
import messages
import numpy as np
import pytest

import fftgrad as fg
from fftgrad.__main__ import main
from fftgrad.planning import _gradients

N = 1 << 14
RNG = np.random.default_rng(0)
WHITE = RNG.standard_normal(N).astype(np.float32)
HEAVY = RNG.standard_t(2, N).astype(np.float32)


SMOOTH = np.convolve(WHITE, np.ones(16) / 4, "same").astype(np.float32)


def plain(gradients, **options):
    return fg.planning.analyze(gradients, ratios=(), **options)


def of_workers(*rows, steps=1):
    """A `GradientLog` of the same rows in some steps."""
    trees = {worker: {"w": row} for worker, row in enumerate(rows)}
    return fg.planning.GradientLog({10 * step: trees for step in range(steps)})


def says(found, *words):
    return [line for line in found.recommendation if all(word in line for word in words)]


def test_of_white_noise():
    found = plain(WHITE)
    # The energy below the quantile t of a Gaussian: P(|x| < t) - 2 t p(t).
    wanted = [0.7490, 0.9559, 0.9930]
    for name in ("none", "Dct 16", "Dct 64", "Hadamard"):
        np.testing.assert_allclose(found.dropped[name], wanted, atol=0.008)
    # Of |z|² of a complex Gaussian, the share below the quantile of 1 - q is 1 - q (1 - ln q).
    q = np.array([0.1, 0.01, 0.001])
    for name in ("Fft 64", "Fft 4096", "Fft whole"):
        np.testing.assert_allclose(found.dropped[name], np.sqrt(1 - q * (1 - np.log(q))), atol=0.01)
    assert found.overlap is found.cosine is None


def test_of_neighbors_that_are_alike():
    found = plain(SMOOTH)
    for name in ("Dct 16", "Dct 64", "Fft 4096"):
        assert np.all(found.dropped[name] < found.dropped["none"])
    assert found.dropped["Dct 64"][0] < 0.5 * found.dropped["none"][0]
    assert says(found, "Transform by")
    assert says(plain(HEAVY), "Use no transform")


def test_planted_supports_are_found():
    """Four workers with 60 of 164 large places in common, and each with places of its own."""
    k, common = 164, 60
    places = RNG.permutation(N)
    rows = []
    for worker in range(4):
        row = 0.01 * RNG.standard_normal(N)
        own = places[common + worker * 200 :][: k - common]
        row[np.concatenate([places[:common], own])] = 5 + RNG.random(k)
        rows.append(row.astype(np.float32))
    found = plain(of_workers(*rows, steps=2))
    assert found.overlap == pytest.approx(common / k)
    assert says(found, "worth a try", "37%")


def test_signal_and_noise_are_those_that_were_added():
    rows = [WHITE + 2 * RNG.standard_normal(N).astype(np.float32) for _ in range(6)]
    found = plain(of_workers(*rows, steps=2))
    assert found.cosine == pytest.approx(1 / 5, abs=0.02)
    assert says(found, "below 0.89")
    same = plain(of_workers(WHITE, WHITE))
    assert (same.overlap, same.cosine) == (1, pytest.approx(1))
    assert says(same, "LeaderTopK", "pays", "100%")


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.full
def test_dense_gradients_want_few_bits_and_sparse_ones_a_selector(dense):
    gradient = (WHITE if dense else HEAVY)[:4096]
    found = fg.planning.analyze({"w": gradient}, ratios=(28,))
    assert [rate.error for rate in found.rates] == sorted(rate.error for rate in found.rates)
    assert {rate.is_dense for rate in found.rates} == {True, False}
    best = found.rates[0]
    assert best.is_dense == dense
    assert says(found, f"{best.codec!r} loses least")
    assert best.bits <= 32 / 28 * 1.02
    step = fg.Step.of(0)
    payload = messages.compress(best.codec, gradient, step=step)
    back = messages.decompress(best.codec, payload, gradient, step=step)
    error = np.linalg.norm(back - gradient) / np.linalg.norm(gradient)
    assert best.error == pytest.approx(error, abs=0.01)


def test_a_sample_is_bounded_and_of_the_same_places_in_all_gradients():
    large = np.repeat(np.arange(64, dtype=np.float32) + 1, 4096)
    found = plain(of_workers(large, large[::-1].copy()), max_values=8 * 4096)
    assert (found.values, found.sampled) == (64 * 4096, 4 * 4096)
    again = plain(of_workers(large, large[::-1].copy()), max_values=8 * 4096)
    assert repr(again) == repr(found)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_scale_is_of_no_concern(scale):
    found, wanted = (plain({"w": s * HEAVY.astype(np.float64)}) for s in (scale, 1.0))
    for name, errors in found.dropped.items():
        np.testing.assert_allclose(errors, wanted.dropped[name], atol=1e-4)


def test_gradients_go_to_a_file_and_back(tmp_path):
    tree = {"a": [np.arange(3.0), np.ones((2, 2), np.float32)], "b/c": jnp.ones(2, "bfloat16")}
    log = fg.planning.GradientLog({7: {0: tree, 1: tree}, 20: {1: tree}})
    fg.planning.save_gradients(tmp_path / "own", log)
    found = fg.planning.load_gradients(tmp_path / "own.npz")
    assert found.steps == (7, 20)
    assert [sorted(workers) for workers in found.gradients.values()] == [[0, 1], [1]]
    leaves = found.gradients[20][1]
    assert list(leaves) == ["a/0", "a/1", "b/c"]
    assert leaves["a/0"].tolist() == [0, 1, 2]
    assert leaves["a/1"].shape == (2, 2)
    assert leaves["b/c"].dtype == np.float32
    fg.planning.save_gradients(tmp_path / "b.npz", fg.planning.GradientLog({20: {0: tree}}))
    both = fg.planning.load_gradients(tmp_path / "own.npz", tmp_path / "b.npz")
    assert list(both.gradients[20]) == [0, 1]
    with pytest.raises(ValueError, match="step 20 and worker 0 again"):
        fg.planning.load_gradients(tmp_path / "b.npz", tmp_path / "b.npz")


def test_other_arrays_are_a_tree_of_one_step_and_worker(tmp_path):
    own = {"0/0/w": WHITE[:6].reshape(2, 3), "half": np.ones(2, jnp.bfloat16)}
    np.savez(tmp_path / "plain.npz", count=np.arange(3), **own)
    found = fg.planning.load_gradients(tmp_path / "plain.npz").gradients
    assert list(found) == list(found[0]) == [0]
    assert {name: x.dtype for name, x in found[0][0].items()} == {
        "0/0/w": np.float32,
        "half": jnp.bfloat16,
    }


@pytest.mark.parametrize("content", [b"", b"no file of arrays", b"PK\x03\x04 and no more"])
def test_what_is_no_file_of_arrays_is_refused(tmp_path, capsys, content):
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(ValueError, match="save it again"):
        fg.planning.load_gradients(tmp_path / "a.npz")
    assert main(["analyze", str(tmp_path / "a.npz")]) == 2
    assert "a.npz" in capsys.readouterr().err
    np.savez(tmp_path / "objects.npz", np.array([print], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="save it again"):  # nothing in a file is run
        fg.planning.load_gradients(tmp_path / "objects.npz")


@pytest.mark.parametrize(
    ("gradients", "remedy"),
    [
        ({}, "or none"),
        (0 * WHITE, "not all zero"),
        (of_workers(WHITE, WHITE * np.inf), "must be finite"),
        (fg.planning.GradientLog({}), "or none"),
        (of_workers(WHITE, WHITE[:9]), "of one model"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_mistakes_are_answered(gradients, remedy):
    with pytest.raises(ValueError, match=remedy):
        plain(gradients)


def test_the_command_shows_tables(tmp_path, capsys, monkeypatch):
    rates = (fg.planning.Rate(fg.Budget(ratio=30), 30, 1.07, 0.24),)
    monkeypatch.setattr(_gradients, "_rates", lambda *_: rates)
    trees = {
        i: {"kernel": RNG.standard_t(3, N - 100), "bias": RNG.normal(size=100)} for i in (0, 1)
    }
    fg.planning.save_gradients(tmp_path / "a.npz", fg.planning.GradientLog({3: trees}))
    assert main(["analyze", str(tmp_path / "a.npz")]) == 0
    out = capsys.readouterr().out
    for words in ("16,384 values", "Fft whole", "Budget(ratio=30)", "- Use no"):
        assert words in out
