"""The code of the methods' authors beside ours: the tables, and, with checkouts, the runs."""

import functools
import json
import os
import pathlib

import jax
import numpy as np
import pytest
from processes import ROOT

import fftgrad as fg

RESULTS = sorted((ROOT / "benchmarks/results/others").glob("*.json"))
CHECKOUTS = os.environ.get("FFTGRAD_CHECKOUTS")
"""A folder of checkouts, named as their repositories are, such as powersgd and DeMo."""


@pytest.fixture
def authors(imported):
    return imported("authors")


def test_every_source_has_results(authors):
    assert set(authors.NAMES) <= {path.stem for path in RESULTS}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_source_agrees_or_says_what_differs(authors, path):
    if path.stem not in authors.NAMES:
        pytest.skip("no code of authors")
    record = json.loads(path.read_text())
    assert record["repository"] in authors.shown(record)
    assert "/" not in record["command"].partition("CHECKOUT")[0].replace("benchmarks/authors", "")
    for row in record["rows"]:
        assert row["verdict"] in ("equal", "agrees", "by choice"), row
        if row["verdict"] == "by choice":
            assert row["differs"], row
        elif row["verdict"] == "agrees":
            assert row["difference"] <= row["limit"], row


def test_a_row_that_is_not_within_its_limit_differs(imported):
    row = imported("others._both").Row("theirs", "ours", "inputs", 1e-3)
    assert row.verdict == "**differs**"
    assert row._replace(difference=1e-6).verdict == "agrees"
    assert row._replace(limit=None).verdict == "by choice"
    assert row._replace(difference=0.0).verdict == "equal"


def test_the_largest_difference_is_relative_to_the_largest_magnitude(imported):
    apart = imported("others._both").apart
    assert apart([1.0, 4.0], [1.0, 5.0]) == pytest.approx(0.2)
    with pytest.raises(ValueError, match="shapes must be equal"):
        apart([1.0], [1.0, 2.0])


@functools.cache
def sent(codec):
    """What comes of a vector in a step whose key is this one."""

    def both_ways(x, number, key):
        step = fg.Step(number, key, key)
        return fg.decompress(codec, fg.compress(codec, x, step=step), x, step=step)

    return jax.jit(both_ways)


def test_the_numbers_that_a_codec_draws_are_found(imported):
    """Stochastic rounding with these numbers is what the codec does."""
    compare = imported("others._both")
    key = compare.local_key(step=3, worker=1)
    uniform = compare.draws(key, 50)
    assert len(np.unique(uniform)) == 50
    x = np.random.default_rng(0).standard_normal(50).astype(np.float32)
    uniform = compare.of_magnitudes(uniform, x)
    found = sent(fg.UniformQuantizer(bits=4, bucket=50))(x, 3, key)
    norm = np.linalg.norm(x.astype(np.float64))
    levels = 7 * np.abs(x.astype(np.float64)) / norm
    rounded = np.floor(levels) + (uniform < levels - np.floor(levels))
    np.testing.assert_allclose(found, np.sign(x) * rounded * norm / 7, rtol=1e-5)


def test_the_local_key_is_that_of_the_exchange(imported):
    compare = imported("others._both")
    codec = fg.codecs.Ternary(clip=None)
    rows = compare.gradients((40,), workers=2, steps=3)
    updates, _ = compare.run(compare.pmean(fg.AllGather(codec)), rows)
    for number, row in enumerate(rows):
        keys = [compare.local_key(number, worker) for worker in range(2)]
        told = [sent(codec)(x, number, key) for x, key in zip(row, keys, strict=True)]
        np.testing.assert_allclose(updates[number], np.mean(told, axis=0), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # whose children run no JAX
@pytest.mark.skipif(not CHECKOUTS, reason="FFTGRAD_CHECKOUTS is no folder of checkouts")
@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_authors_code_agrees_again(authors, path):
    if path.stem not in authors.NAMES:
        pytest.skip("no code of authors")
    name = authors.source(path.stem).REPOSITORY.rpartition("/")[2]
    checkout = pathlib.Path(CHECKOUTS, name)
    if not checkout.exists() and path.stem != "torch_hook":
        pytest.skip(f"no checkout of {name}")
    found = authors.compared(path.stem, checkout if checkout.exists() else None, smoke=True)
    assert found["rows"]
    assert all("differs" not in row["verdict"] for row in found["rows"]), found["rows"]
