"""Figures: one color for one kind of method, colors that differ for everybody, light and dark."""

import pathlib

import numpy as np
import pytest

pytest.importorskip("matplotlib")
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def style(imported):
    return imported("_style")


def test_labels_keep_apart_in_their_order_and_inside(style):
    apart = style.apart({"a": 5.0, "b": 4.0, "c": 90.0, "d": 6.0}, 12.0, 0.0, 100.0)
    assert list(apart) == ["b", "a", "d", "c"]
    heights = list(apart.values())
    assert min(np.diff(heights)) > 11.9
    assert heights[0] >= 0
    assert heights[-1] == pytest.approx(90.0)
    assert style.apart({"a": 500.0}, 12.0, 0.0, 100.0) == {"a": 100.0}
    for ends in ({"a": 99.0, "b": 98.0, "c": 100.0}, {"a": 1.0, "b": 2.0, "c": 0.0}):
        heights = list(style.apart(ends, 12.0, 0.0, 100.0).values())
        assert 0 <= heights[0] <= heights[-1] <= 100
        assert min(np.diff(heights)) > 11.9


def test_a_file_is_the_same_when_it_is_drawn_again(style):
    def drawn():
        figure = style.figure(2.0)
        figure.subplots().plot([0, 1], [0, 1], color=style.INK)
        return style.svg(figure)

    assert drawn() == drawn()
