"""Who waits at a terminal sees how far it is."""

import threading

import pytest

from fftgrad.planning.commands._text import progress


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


def test_elsewhere_it_writes_nothing(capsys):
    with progress("compiling", 4) as tell:
        tell(name="top-k 1 %")
    assert capsys.readouterr() == ("", "")
