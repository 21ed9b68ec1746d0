"""`fftgrad plan --program`: what it prints runs, and trains."""

import contextlib
import io
import pathlib
import re

import jax
import pytest

import fftgrad as fg
from fftgrad import planning
from fftgrad.__main__ import main
from fftgrad.planning.commands import _plan

README = pathlib.Path(__file__).parents[2] / "README.md"
ASKED = ["plan", "--parameters=1k", "--workers=8", "--bandwidth=100mbit", "--step=30ms"]
SIGNS = fg.TwoStage(fg.Sign(), 8)
ROWS = (
    fg.planning.Candidate("dense", fg.AllReduce(), dense=True, loss="as dense"),
    fg.planning.Candidate("4 local steps, signs", fg.Recipe(SIGNS, fg.ErrorFeedback()), every=4),
    fg.planning.Candidate("whole", SIGNS, optimizer=fg.optimizers.feedback_adam, loss="close"),
)
FAST = fg.Hierarchical("fast", 2, slow=fg.AllGather(fg.Sign()), memory=fg.ErrorFeedback())


@pytest.fixture
def planned(monkeypatch):
    """A plan of few rows, made of times that nobody measured."""

    def use(rows=ROWS, **options):
        timings = {row.name: fg.planning.Timing(0.0, 0.0) for row in rows}
        like = jax.ShapeDtypeStruct((30, 30), "float32")
        found = fg.planning.plan(
            like, step=0.03, link="100mbit", workers=8, rows=rows, timings=timings, **options
        )
        monkeypatch.setattr(planning, "plan", lambda *_, **__: found)
        monkeypatch.setattr(planning, "candidates", lambda *_: rows)
        return found

    return use


def printed(capsys, *argv):
    capsys.readouterr()
    assert main([*ASKED, *argv]) == 0
    return capsys.readouterr().out


def trains(source):
    """Whether the loss at the end is well below the first, as the program prints them."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(source, "program", "exec"), {"__name__": "__main__"})
    before, after = map(float, out.getvalue().split(" -> "))
    return after < before / 2


@pytest.mark.parametrize("name", [row.name for row in ROWS])
def test_a_program_of_a_row_trains(planned, capsys, name):
    found = planned()
    source = printed(capsys, f"--program={name}")
    row = next(row for row in found.rows if row.name == name)
    assert row.code in source
    assert "(128, 100)" in source  # rows of the batch, 16 for each of eight workers
    assert max(map(len, source.split("import jax\n")[0].splitlines())) < 100
    assert ("rows[0]" in source) == (row.every > 1)
    assert ("optax.sgd(0.3)" in source) == (not row.whole and row.every == 1)
    assert trains(source)


def test_a_program_of_two_levels_trains(planned, capsys):
    link = fg.planning.Link("50GB/s")
    dense = fg.Hierarchical("fast", 2, slow=fg.AllReduce())
    rows = [
        fg.planning.Candidate("dense", dense, dense=True, loss="as dense"),
        fg.planning.Candidate("signs", FAST, loss="close"),
    ]
    planned(rows, fast=(2, link))
    source = printed(capsys, "--program=signs")
    assert "jax.make_mesh((4, 2), ('slow', 'fast')" in source
    assert trains(source)


def test_without_a_name_it_is_that_of_the_best_row(planned, capsys):
    found = planned()
    source = printed(capsys, "--program")
    assert found.best.code in source
    said = " ".join(re.search('"""(.*?)\n\n', source, re.DOTALL)[1].split())
    assert said == _plan.answer(found)
    assert "exchange " not in source.split("\n\n")[0]


def test_a_line_runs_in_the_readmes_program(planned, capsys):
    """A whole optimizer takes the place of its chain."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (block,) = [block for block in blocks if "tx = fg.optimizers.feedback_adam(" in block]
    whole = next(row for row in planned().rows if row.whole)
    pasted = f"learning_rate = 0.02\ntx = {whole.code}\n"
    source = re.sub(r"tx = fg\.optimizers\..*\n", lambda _: pasted, block)
    assert whole.code in source
    exec(compile(source, "README.md", "exec"), {"__name__": "__main__"})
    assert float(capsys.readouterr().out.split()[0]) < 0.1
