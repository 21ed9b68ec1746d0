"""What the benchmarks of the papers' claims compute, on vectors whose answer is known."""

import json
import math
import pathlib
import subprocess
import sys

import numpy as np
import pytest

BENCHMARKS = pathlib.Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture
def papers(imported):
    return imported("papers")


@pytest.fixture
def claims(imported):
    return imported("claims")


def test_shares_of_ranks_and_of_values(papers):
    error, other = np.array([-1.0, 2.0, 3.0, 0.0]), np.array([5.0, 0.5, 0.0, -4.0])
    # Sorted: 0, 1, 2, 3 against 0, 0.5, 4, 5: below at the last two ranks, the first is a tie.
    assert papers.below(error, other) == 0.5
    assert papers.below(other, error) == 0.25
    assert papers.below(error, other, np.full(4, 2.5)) == 0.25
    assert papers.smaller(error, other) == 0.5
    assert papers.smaller(error, error) == 0
    assert papers.relative(np.array([3.0, 4.0]), np.array([0.0, 10.0])) == 0.5


def gradient(papers):
    values = np.random.default_rng(0).standard_t(3, 600).astype(np.float32)
    return papers.Gradient("any", values, [(100, False), (300, False), (200, True)])


def test_layers_are_compressed_apart_and_the_last_not_at_all(papers):
    own = gradient(papers)
    got = papers.by_layer(papers.CODECS["TernGrad"], own)
    np.testing.assert_array_equal(got[400:], own.values[400:])
    for part in (slice(0, 100), slice(100, 400)):
        top = float(np.abs(own.values[part]).max())
        assert {round(abs(v), 5) for v in got[part]} == {0.0, round(top, 5)}


def test_clipping_is_by_layer_at_two_and_a_half_deviations(papers):
    flat = papers.Gradient("flat", np.tile([1.0, -1.0], 50).astype(np.float32), [(100, True)])
    assert papers.clipped(flat)["shorter"] == pytest.approx(0, abs=1e-9)
    spike = np.where(np.arange(200) == 3, 20.0, np.tile([1.0, -1.0], 100)).astype(np.float32)
    bound = 2.5 * spike.std()
    short = math.sqrt(199 + bound**2)
    found = papers.clipped(papers.Gradient("spike", spike, [(200, False)]))
    assert found["shorter"] == pytest.approx(1 - short / math.sqrt(199 + 400), rel=1e-5)
    cosine = (199 + 20 * bound) / (short * math.sqrt(599))
    assert found["degrees"] == pytest.approx(math.degrees(math.acos(cosine)), rel=1e-4)


def test_the_layers_are_those_of_the_models(imported):
    gradients = imported("gradients")
    found = gradients.layers(gradients.main_job(smoke=False))
    assert sum(size for size, _ in found) == np.load(gradients.SAVED).size
    assert [size for size, last in found if last] == [96 * 256]
    conv = gradients.layers(gradients.convolutions(smoke=True))
    assert [size for size, last in conv if last] == [10, 160]


def test_searches_end_where_their_code_says(papers):
    magnitude = np.arange(1.0, 101.0)  # mean 50.5, largest 100
    # Above 90.1, 80.2, 70.3: 10, 20, 30 values.
    assert papers.trimmed(magnitude, 10) == (10, 1)
    assert papers.trimmed(magnitude, 25) == (30, 3)
    # Above 75.25 are 25.
    assert papers.bisected(magnitude, 20, 0.2) == (25, 1)
    # Above 75.25, 87.6, 93.8: 25, 13, 7.
    assert papers.bisected(magnitude, 6, 0.2) == (7, 3)
    # As published, a count from k/2 to k raises the threshold. Above 81.4 are 19.
    assert papers.bisected(magnitude, 30, 0.2) == (19, 3)
    assert papers.bisected(magnitude, 25, 0.2) == (7, 3)
    spike = np.where(np.arange(1000) == 0, 1000.0, 1.0)
    assert papers.bisected(spike, 10, 0.2) == (1, 3)


def test_ten_bits_add_little_where_the_range_is_that_of_the_data(papers):
    found = papers.quantized(gradient(papers).values / 1000)
    assert found["fitted"] < found["tuned to its range"] < 0.02
    assert found["even steps"] < 0.02
    assert found["largest"] < 0.1
    assert found["tuned to [-1, 1]"] > found["tuned to its range"]


def test_residuals_that_are_alike(claims):
    rng = np.random.default_rng(0)
    common, own = rng.standard_t(3, 1000), rng.standard_t(3, (8, 1000))
    same = claims.chosen_by(np.tile(common, (8, 1)))
    assert claims.cosine(np.tile(common, (8, 1))) == pytest.approx(1)
    assert same["overlap"] == 1
    assert same["lost"] == pytest.approx(same["least"])
    k = -(-1000 // claims.CHUNK)
    left = np.sort(common**2)[:-k].sum() / np.sum(common**2)
    assert same["least"] == pytest.approx(left)
    apart = claims.chosen_by(own)
    assert abs(claims.cosine(own)) < 0.1
    assert apart["overlap"] < 0.5
    assert apart["least"] < apart["lost"] < 1


def test_thetas_fall_where_the_rate_does(claims):
    found = [method.name for method in claims.STUDY.rows]
    assert found[0] == "dense"
    assert {f"theta {theta}" for theta in (0.5, 0.7, 0.85, 0.9, 0.99)} < set(found)
    assert {"theta 0.9, then 0", "theta 0.99, then 0"} < set(found)
    rates = [float(claims.cut(2.0, 180)(step)) for step in (0, 129, 130, 179)]
    assert rates == pytest.approx([2.0, 2.0, 0.2, 0.2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "written"), [("papers.py", "errors"), ("convergence.py claims", "training")]
)
def test_a_smoke_run_writes_its_results(script, written, tmp_path):
    script, *study = script.split()
    command = [sys.executable, BENCHMARKS / script, *study, "--smoke", "--out", tmp_path]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    content = json.loads((tmp_path / f"{written}.json").read_text())
    assert content["command"].startswith("python ")
    if not study:
        (row,) = content["rows"]
        assert 0 < row["relative"]["top-k"] < row["relative"]["FFT (paper)"] < 1
        assert len(row["searches"]) == 2
    else:
        assert len(content["runs"]) == 4
        for run in content["runs"]:
            assert (run["task"], run["steps"], run["seed"]) == ("digits", 4, 0)
            assert ("overlap" in run) == run["method"].startswith("ScaleCom")


def test_a_table_has_the_means_of_the_seeds(claims):
    seeds = [{"loss": 0.1, "accuracy": 0.5}, {"loss": 0.2, "accuracy": 1.0}]
    runs = [{"task": "digits", "method": "dense", **seed} for seed in seeds]
    first, second = claims.markdown({"runs": runs}).split("\n\n")
    assert first.splitlines()[2] == "| dense | 0.150 | 75.0 | |"
    assert len(second.splitlines()) == 2
