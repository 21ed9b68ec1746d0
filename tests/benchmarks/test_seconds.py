"""Seconds to dense's final loss: steps of a run without limits, times seconds of a step."""

import json

import pytest


@pytest.fixture
def seconds(imported):
    pytest.importorskip("matplotlib")
    return imported("seconds")


def test_a_loss_is_reached_between_two_assessments(seconds):
    curve = [[50, 3.0], [100, 2.0], [150, 2.2], [200, 1.0]]
    assert seconds.reached(curve, 2.5) == 75
    assert seconds.reached(curve, 2.0) == 100
    assert seconds.reached(curve, 1.6) == 175
    assert seconds.reached(curve, 3.5) == 50
    assert seconds.reached(curve, 0.9) is None


def test_the_page_has_the_products_of_the_committed_runs(seconds, imported):
    record = imported("_record")
    runs = json.loads((record.RESULTS / "convergence/large.json").read_text())["runs"]
    found = {name: own[0] for name, own in imported("training").chosen(runs, "large").items()}
    table = record.markdown(*seconds.products(found))
    assert table in (record.ROOT / "docs/slow-links.md").read_text()
