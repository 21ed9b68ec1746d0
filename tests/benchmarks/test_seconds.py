"""Seconds to dense's final loss: steps of a run without limits, times seconds of a step."""

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
