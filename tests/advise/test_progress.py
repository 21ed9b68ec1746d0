"""Who waits at a terminal sees how far it is; a log has a line now and then."""

import threading
import types

import pytest

from fftgrad.advise.commands import _show
from fftgrad.advise.commands._show import progress


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.usefixtures("terminal")
def test_at_a_terminal_it_is_drawn_by_no_thread_of_its_own(capsys):
    threads = threading.active_count()
    with progress("compiling", 4) as tell:
        tell(1)
        assert threading.active_count() == threads
    out, err = capsys.readouterr()
    assert out == ""
    assert "compiling" in err


@pytest.mark.usefixtures("terminal")
def test_what_goes_on_is_named(capsys):
    with progress("timing here") as tell:
        tell(name="top-k 1 %")
    assert "timing here: top-k 1 %" in capsys.readouterr().err


@pytest.fixture
def clock(monkeypatch):
    """The seconds that have passed, as the test says."""
    now = types.SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(_show.time, "monotonic", lambda: now.seconds)
    return now


def test_elsewhere_a_short_run_writes_nothing(capsys, clock):
    with progress("compiling", 4) as tell, progress("timing here") as say:
        for _ in range(4):
            clock.seconds += 2.4
            tell(1)
            say(name="top-k 1 %")
    assert capsys.readouterr() == ("", "")


def test_elsewhere_a_long_run_writes_a_line_now_and_then(capsys, clock):
    with progress("compiling", 40) as tell:
        for _ in range(40):
            clock.seconds += 1.0
            tell(1)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert lines[0] == "compiling 10/40, about 34.4 s left"
    assert [line.split()[1].strip(",") for line in lines] == ["10/40", "20/40", "30/40", "40/40"]


def test_a_line_for_each_name_where_each_takes_long(capsys, clock):
    with progress("timing", 2, aside=0.0) as tell:
        tell(name="dense")
        clock.seconds += 3.0
        tell(name="signs")
    assert capsys.readouterr().err == "timing 1/2: dense\ntiming 2/2: signs, about 3 s left\n"
