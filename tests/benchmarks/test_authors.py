"""The code of the methods' authors beside ours: the tables, and, with checkouts, the runs."""

import json
import os
import pathlib

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


def test_the_numbers_that_an_exchange_draws_are_found(imported):
    """Stochastic rounding with the numbers of each step and worker gives its mean."""
    compare, codec = imported("others._both"), fg.UniformQuantizer(bits=4, bucket=50)
    rows = compare.gradients((50,), workers=2, steps=3)
    updates, _ = compare.run(compare.pmean(fg.AllGather(codec)), rows)
    for step, row in enumerate(rows):
        sent = []
        for worker, x in enumerate(row.astype(np.float64)):
            uniform = compare.draws(compare.local_key(step, worker), 50)
            assert len(np.unique(uniform)) == 50
            uniform = compare.of_magnitudes(uniform, row[worker])
            norm = np.linalg.norm(x)
            levels = 7 * np.abs(x) / norm
            rounded = np.floor(levels) + (uniform < levels - np.floor(levels))
            sent.append(np.sign(x) * rounded * norm / 7)
        np.testing.assert_allclose(updates[step], np.mean(sent, axis=0), rtol=1e-5)


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
