"""The figures of an analysis, against data of which they are known; and what it recommends."""

import json

import jax
import jax.numpy as jnp
import messages
import numpy as np
import pytest
from safetensors.numpy import save_file

import fftgrad as fg
from fftgrad.advise import _bases
from fftgrad.advise._rates import Bound

N = 1 << 14
RNG = np.random.default_rng(0)
WHITE = RNG.standard_normal(N).astype(np.float32)
HEAVY = RNG.standard_t(2, N).astype(np.float32)


def smooth(n=N, rho=0.9):
    """A first-order autoregression of variance 1."""
    noise = np.random.default_rng(1).standard_normal(n) * np.sqrt(1 - rho**2)
    out = np.zeros(n)
    for i in range(n):
        out[i] = rho * out[i - 1] + noise[i] if i else noise[i] / np.sqrt(1 - rho**2)
    return out.astype(np.float32)


SMOOTH = smooth()


def plain(gradients, **options):
    return fg.advise.analyze(gradients, ratios=(), **options)


def of_workers(*rows, steps=1):
    """A `GradientLog` of the same rows in some steps."""
    trees = {worker: {"w": row} for worker, row in enumerate(rows)}
    return fg.advise.GradientLog({10 * step: trees for step in range(steps)})


def says(found, *words):
    return [line for line in found.recommendation if all(word in line for word in words)]


def test_of_white_noise():
    whole = plain(WHITE).whole
    assert whole.kurtosis == pytest.approx(3, abs=0.2)
    assert whole.zeros == 0
    np.testing.assert_allclose(whole.spectrum, 1 / 16, atol=0.011)
    np.testing.assert_allclose(whole.correlation, 0, atol=0.04)
    # The energy below the quantile t of a Gaussian: P(|x| < t) - 2 t p(t).
    wanted = [0.7490, 0.9559, 0.9930]
    for name in ("none", "Dct 16", "Dct 64", "Dct 4096", "Hadamard"):
        np.testing.assert_allclose(whole.dropped[name], wanted, atol=0.008)
    # Of |z|² of a complex Gaussian, the share below the quantile of 1 - q is 1 - q (1 - ln q).
    q = np.array([0.1, 0.01, 0.001])
    for name in ("Fft 64", "Fft 4096", "Fft whole"):
        np.testing.assert_allclose(whole.dropped[name], np.sqrt(1 - q * (1 - np.log(q))), atol=0.01)
    assert whole.overlap is whole.cosine is whole.signal is None


def test_of_neighbors_that_are_alike():
    whole = plain(SMOOTH).whole
    np.testing.assert_allclose(whole.correlation, 0.9 ** np.arange(1, 9), atol=0.06)
    frequency = (np.arange(4096) + 0.5) / 8192
    power = 0.19 / (1.81 - 1.8 * np.cos(2 * np.pi * frequency))
    bands = power.reshape(16, -1).sum(1) / power.sum()
    np.testing.assert_allclose(whole.spectrum, bands, rtol=0.15)
    for name in ("Dct 16", "Dct 64", "Dct 4096", "Fft 4096"):
        assert np.all(whole.dropped[name] < whole.dropped["none"])
    assert whole.dropped["Dct 64"][0] < 0.5 * whole.dropped["none"][0]


@pytest.mark.parametrize("basis", _bases.BASES, ids=lambda basis: basis.name)
def test_a_basis_is_that_of_the_library(basis):
    """Also where the last block is not full."""
    x = HEAVY[:8400]  # of small prime factors, so that the whole is not filled either
    squares = basis.squares(x[None])[0]
    assert np.sum(squares, dtype=np.float64) == pytest.approx(np.sum(x.astype(float) ** 2), 1e-4)
    if basis.codec is not None and basis.name != "Hadamard":
        main = fg.compress(basis.codec, jnp.asarray(x)).main
        scale = float(np.max(squares))
        found = np.sort(np.square(np.abs(main)))[-100:]
        np.testing.assert_allclose(np.sort(squares)[-100:], found, atol=1e-5 * scale)
        assert np.iscomplexobj(main) == (basis.reals == 2)


def test_the_rotation_is_that_of_the_library():
    x = jnp.asarray(HEAVY[:4096])
    wanted = fg.compress(fg.Hadamard(signs=False), x).main
    np.testing.assert_allclose(_bases.walsh(np.asarray(x)), wanted, atol=1e-3)


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
    assert found.whole.overlap == pytest.approx(common / k)
    assert found.between_steps == (fg.advise.StepPair((0, 10), 1.0, pytest.approx(1.0)),)
    assert says(found, "worth a try", "37%")
    assert says(found, "PredictedSupport()", "100%")


def test_independent_workers_have_what_chance_gives():
    found = plain(of_workers(*np.random.default_rng(2).standard_normal((4, 1 << 16))))
    assert found.whole.overlap == pytest.approx(0.01, abs=0.003)
    assert found.whole.cosine == pytest.approx(0, abs=0.01)
    assert says(found, "AllGather", "by chance 1%")


def test_signal_and_noise_are_those_that_were_added():
    rows = [WHITE + 2 * RNG.standard_normal(N).astype(np.float32) for _ in range(6)]
    found = plain(of_workers(*rows, steps=2))
    assert found.whole.cosine == pytest.approx(1 / 5, abs=0.02)
    assert found.whole.signal == pytest.approx(1 / 4, abs=0.03)
    assert says(found, "below 0.89")
    same = plain(of_workers(WHITE, WHITE))
    assert same.whole.signal is None
    assert same.whole.overlap == 1
    assert says(same, "same gradient")
    assert says(same, "SharedSupport", "pays", "100%")


def test_the_bound_of_a_uniform_variable():
    """Fine steps lose a twelfth of their square, and take the logarithm of their number."""
    x = np.random.default_rng(3).uniform(-1, 1, 1 << 16)
    for error in (0.1, 0.01):
        levels = 1 / error  # of a width w: √(w² / 12) over √(1 / 3)
        assert Bound(x[None]).bits(error) == pytest.approx(np.log2(levels), abs=0.1)
    assert Bound(np.stack([x, 100 * x])).bits(0.01) < Bound(x[None]).bits(0.01)
    assert Bound(x[None]).bits(1.2) == 0


def test_dense_gradients_want_few_bits_and_sparse_ones_a_selector():
    for gradient, dense in ((WHITE[:4096], True), (HEAVY[:4096], False)):
        told = list[str]()
        found = fg.advise.analyze({"w": gradient}, ratios=(28,), tell=told.append)
        assert told == ["codecs of 28 times fewer bytes"]
        assert bool(says(found, "your gradients are dense")) == dense
        assert bool(says(found, "your gradients are sparse")) != dense
        assert [rate.error for rate in found.rates] == sorted(rate.error for rate in found.rates)
        assert found.rates[0].is_dense == dense
        assert {rate.is_dense for rate in found.rates} == {True, False}
        for rate in found.rates:
            assert rate.bound < rate.bits <= 32 / 28
            again = fg.wire_bytes(rate.codec, gradient)
            assert 8 * again / 4096 == pytest.approx(rate.bits, rel=0.02)
        best = found.rates[0]
        assert json.loads(json.dumps(found.as_dict()))["rates"][0]["codec"] == repr(best.codec)
        step = fg.Step.of(0)
        payload = messages.compress(best.codec, gradient, step=step)
        back = messages.decompress(best.codec, payload, gradient, step=step)
        error = np.linalg.norm(back - gradient) / np.linalg.norm(gradient)
        assert best.error == pytest.approx(error, abs=0.01)


def test_a_transform_is_for_neighbors_that_are_alike():
    assert says(plain(SMOOTH), "Transform by", "correlate by 0.")
    assert says(plain(HEAVY), "Use no transform")


def test_a_leaf_that_holds_much_is_left_dense():
    tree = {"big": np.tile(WHITE, 64), "norm": 5 * WHITE[:5000], "bias": 9 * WHITE[:500]}
    found = plain(tree)
    assert [leaf.name for leaf in found.leaves] == ["big", "norm", "small leaves (1)"]
    assert sum(leaf.energy for leaf in found.leaves) == pytest.approx(1)
    assert says(found, "Leave dense", "norm", "0.47%")
    assert says(found, "Leave dense", "small leaves")
    assert not says(found, "Leave dense", "big")


def test_zeros_are_counted():
    half = np.where(np.arange(N) % 2, WHITE, 0)
    found = plain({"a": half, "b": np.zeros(5000, np.float32)})
    assert found.whole.zeros == pytest.approx((N / 2 + 5000) / (N + 5000))
    assert says(found, "exactly zero")
    empty = found.leaves[1]
    assert (empty.energy, empty.zeros, empty.kurtosis, empty.correlation) == (0, 1, None, None)
    assert not any(np.any(errors) for errors in empty.dropped.values())


def test_it_is_bounded_and_says_so():
    """One block of each stretch, of the same places in all gradients."""
    large = np.repeat(np.arange(64, dtype=np.float32) + 1, 4096)
    found = plain(of_workers(large, large[::-1].copy()), max_values=8 * 4096)
    assert (found.values, found.sampled) == (64 * 4096, 4 * 4096)
    assert found.whole.values == 64 * 4096
    again = plain(of_workers(large, large[::-1].copy()), max_values=8 * 4096)
    assert json.dumps(again.as_dict()) == json.dumps(found.as_dict())
    tree = {f"leaf{i}": large[: 2 * 4096] for i in range(9)}
    some = plain(tree, max_values=3 * 4096)
    assert len(some.unseen) + len(some.leaves) == 9
    assert len(some.unseen) >= 6
    rest = np.std([leaf.sampled for leaf in some.leaves])
    assert rest == 0


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_scale_is_of_no_concern(scale):
    found, wanted = (plain({"w": s * HEAVY.astype(np.float64)}).whole for s in (scale, 1.0))
    np.testing.assert_allclose(found.kurtosis, wanted.kurtosis, rtol=1e-3)
    np.testing.assert_allclose(found.spectrum, wanted.spectrum, rtol=1e-3)
    for name, errors in found.dropped.items():
        np.testing.assert_allclose(errors, wanted.dropped[name], atol=1e-4)


def test_json_has_all_of_it():
    found = plain(of_workers(WHITE, SMOOTH))
    back = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert set(back) == set(found._fields)
    assert back["whole"]["spectrum"] == found.whole.spectrum.tolist()
    assert str(found) == "\n".join(back["recommendation"])


def test_gradients_go_to_a_file_and_back(tmp_path):
    tree = {"a": [np.arange(3.0), np.ones((2, 2), np.float32)], "b/c": jnp.ones(2, "bfloat16")}
    captured = fg.advise.GradientLog({7: {0: tree, 1: tree}, 20: {1: tree}})
    fg.advise.save_gradients(tmp_path / "own", captured)
    found = fg.advise.load_gradients(tmp_path / "own.npz")
    assert found.steps == (7, 20)
    assert [sorted(workers) for workers in found.gradients.values()] == [[0, 1], [1]]
    leaves = found.gradients[20][1]
    assert list(leaves) == ["a/0", "a/1", "b/c"]
    assert leaves["a/0"].tolist() == [0, 1, 2]
    assert leaves["a/1"].shape == (2, 2)
    assert leaves["b/c"].dtype == np.float32
    fg.advise.save_gradients(tmp_path / "b.npz", fg.advise.GradientLog({20: {0: tree}}))
    both = fg.advise.load_gradients(tmp_path / "own.npz", tmp_path / "b.npz")
    assert list(both.gradients[20]) == [0, 1]
    np.save(tmp_path / "c.npy", WHITE)
    files = [tmp_path / name for name in ("c.npy", "own.npz", "c.npy")]
    joined = fg.advise.load_gradients(*files, each="worker").gradients
    assert {step: list(workers) for step, workers in joined.items()} == {
        0: [0, 1],  # the plain ones count alone
        7: [0, 1],
        20: [1],
    }
    assert plain(both).values == 9
    with pytest.raises(ValueError, match=r"step 20 of workers \[0\] again"):
        fg.advise.load_gradients(tmp_path / "b.npz", tmp_path / "b.npz")


def test_leaves_of_equal_text_are_two_in_a_file_and_in_an_analysis(tmp_path):
    tree = {"a/b": WHITE, "a": {"b": 2 * WHITE}}
    fg.advise.save_gradients(tmp_path / "own", fg.advise.GradientLog({7: {0: tree}}))
    (found,) = fg.advise.load_gradients(tmp_path / "own.npz").trees
    assert {name: leaf[0] for name, leaf in found.items()} == {
        "a/b": 2 * WHITE[0],
        "a%2Fb": WHITE[0],
    }
    assert plain(tree).values == 2 * WHITE.size


def test_arrays_of_others_that_are_called_by_numbers_are_one_tree(tmp_path):
    names = ["0/0/w", "0/1/w", "1/0/w"]
    np.savez(tmp_path / "nested.npz", **dict.fromkeys(names, WHITE))
    (found,) = fg.advise.load_gradients(tmp_path / "nested.npz").trees
    assert list(found) == names


def test_files_of_others_are_one_step_of_one_worker(tmp_path):
    arrays = {"enc.w": WHITE[:6].reshape(2, 3), "b": WHITE[:2]}
    np.savez(tmp_path / "plain.npz", **arrays)
    np.save(tmp_path / "one.npy", WHITE)
    save_file({**arrays, "h": np.ones(2, jnp.bfloat16)}, tmp_path / "other.safetensors")
    for file, names in (
        ("plain.npz", {"enc.w", "b"}),
        ("one.npy", {""}),
        ("other.safetensors", {"enc.w", "b", "h"}),
    ):
        found = fg.advise.load_gradients(tmp_path / file).gradients
        assert set(found) == set(found[0]) == {0}
        assert set(found[0][0]) == names


@pytest.mark.parametrize("name", ["a.npz", "a.npy", "a.safetensors"])
@pytest.mark.parametrize("content", [b"", b"no file of arrays", b"PK\x03\x04 and no more"])
def test_what_is_no_file_of_arrays_is_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="save it again") as found:
        fg.advise.load_gradients(tmp_path / name)
    assert "pickle" not in str(found.value)


TWO = {0: {0: {"w": WHITE}, 1: {"v": WHITE}}}


@pytest.mark.parametrize(
    ("call", "error", "remedy"),
    [
        (lambda: plain({}), ValueError, "a value at least"),
        (lambda: plain({"w": np.zeros(0, np.float32)}), ValueError, "a value at least"),
        (lambda: plain(0 * WHITE), ValueError, "only zeros"),
        (lambda: plain(of_workers(WHITE, WHITE / 0)), ValueError, "step 0, worker 1; leave"),
        (lambda: plain({"w": np.arange(5)}), TypeError, "got int64 for w"),
        (lambda: plain(fg.advise.GradientLog({})), ValueError, "a value at least"),
        (lambda: plain(fg.advise.GradientLog(TWO)), ValueError, "of one model"),
        (lambda: plain(WHITE, max_values=100), ValueError, "use 4_194_304"),
        (lambda: fg.advise.analyze(WHITE, ratios=(1,)), ValueError, "must be above 1"),
        (lambda: jax.jit(plain)(WHITE), TypeError, "outside of jax.jit"),
        (lambda: fg.advise.save_gradients("x", {}), TypeError, "pass fg.advise.GradientLog"),
        (
            lambda: fg.advise.save_gradients("x", fg.advise.GradientLog({})),
            ValueError,
            "must hold a gradient",
        ),
        (fg.advise.load_gradients, ValueError, "pass one"),
        (lambda: fg.advise.load_gradients("x", each="day"), ValueError, "use 'worker'"),
        (lambda: fg.advise.load_gradients("nowhere.npz"), FileNotFoundError, "nowhere"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*encountered in divide:RuntimeWarning")
def test_mistakes_are_answered(call, error, remedy):
    with pytest.raises(error, match=remedy):
        call()
