"""Seconds to dense's final loss: steps of a run without limits, times seconds of a step."""

import pytest


def test_a_loss_is_reached_between_two_assessments(imported):
    pytest.importorskip("matplotlib")
    reached = imported("tables").reached
    curve = [[50, 3.0], [100, 2.0], [150, 2.2], [200, 1.0]]
    assert reached(curve, 2.5) == 75
    assert reached(curve, 2.0) == 100
    assert reached(curve, 1.6) == 175
    assert reached(curve, 3.5) == 50
    assert reached(curve, 0.9) is None
