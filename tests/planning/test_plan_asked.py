"""`fftgrad plan` refuses what is wrong at once, and its page shows what it says."""

import pathlib
import re

import numpy as np
import pytest
from cases import values

from fftgrad import planning
from fftgrad.__main__ import main
from fftgrad.planning import _candidates
from fftgrad.planning._plan import ACCEPTED, MARGIN
from fftgrad.planning.commands import _plan

PAGE = pathlib.Path(__file__).parent.parent.parent / "docs/command-line.md"


@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        (
            ["--fast=3", "--fast-bandwidth=1GB/s"],
            "plan: --fast: must be a divisor of the 4",
        ),
        (["--axis-name=a,b", "--fast=4", "--fast-bandwidth=1GB/s"], "plan: --fast: must be a"),
        (["--axis-name=a", "--fast=2", "--fast-bandwidth=1GB/s"], "plan: --axis-name: must name"),
    ],
)
def test_what_the_library_refuses_is_said_at_once(monkeypatch, capsys, argv, remedy):
    monkeypatch.setattr(planning._exchange, "timing_of", lambda *_: pytest.fail("it was timed"))
    known = ["--bandwidth=100mbit", "--parameters=1k", "--workers=4", "--step=1s"]
    assert main(["plan", *known, *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert remedy in line


def test_gradients_of_other_parameters_are_refused(tmp_path, capsys):
    np.savez(tmp_path / "params.npz", w=values((3, 4)))
    np.savez(tmp_path / "gradients.npz", q=values((3, 4)))
    files = ["--params", "params.npz", "--gradients", "gradients.npz"]
    files = [str(tmp_path / one) if one.endswith("npz") else one for one in files]
    assert main(["plan", "--workers=16", "--bandwidth=100mbit", "--step=30ms", *files]) == 2
    assert "plan: --gradients: must be trees like params" in capsys.readouterr().err


def test_the_page_shows_rows_as_they_are_classed_and_ordered():
    (block,) = re.findall(r"```text\n(exchange .*?)```", PAGE.read_text(), re.DOTALL)
    form = r"^(\S.*?) +([\d.]+) ms +([\d.]+) .* (as dense|close|check|worse|not measured)$"
    shown = re.findall(form, block, re.MULTILINE)
    assert len(shown) == 10
    known = {row.name: row for row in _candidates.candidates(_plan.squares(1_000_000), 4)}
    places, dense = [], min(float(found[1]) for found in shown if known[found[0]].dense)
    for name, milliseconds, _, loss in shown:
        row = known[name]
        assert loss == row.loss, name
        takes = float(milliseconds) * row.steps
        is_faster = takes * (1 + MARGIN) < dense
        group = 1 if row.dense else (0 if is_faster else 2) if row.loss in ACCEPTED else 3
        places.append((group, takes))
    assert places == sorted(places)
    assert places[0][0] == 0
    best = known[shown[0][0]]
    said = " ".join(block.split())
    assert f"{shown[0][2]} times the steps of the best dense: {best.name} takes" in said
    assert f"Loss: {best.loss}." in said
    whole = best.optimizer is not None
    assert ("goes in place of your optimizer" in said) == whole
    assert block.splitlines()[-1] == best.code("data")
