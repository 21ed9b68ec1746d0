"""Two processes of two devices find what one process of four finds."""

import json

import numpy as np
import pytest
from cases import EXCHANGES
from processes import ROOT, free_port, running

SCRIPT = str(ROOT / "tests/one_process.py")
SOME = ["gather top-k", "two stages"]


def reports(folder, names, count=2):
    """What each of so many processes finds, compiled alike: options of XLA may change roundings."""
    folder.mkdir()
    address = f"localhost:{free_port()}"
    commands = [[SCRIPT, address, str(count), str(number), *names] for number in range(count)]
    with running(folder, commands, cache=folder / "compiled") as processes:
        for process in processes:
            assert process.wait() == 0, process.err.read_text()
        return [json.loads(process.told[-1]) for process in processes]


def assert_close(found, wanted):
    """The same, but for what is summed on the way to a figure."""
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for name in wanted:
            assert_close(found[name], wanted[name])
    elif isinstance(wanted, list):
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)
    elif isinstance(wanted, float):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    else:
        assert found == wanted


@pytest.mark.processes
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(SOME, id="some"),
        pytest.param([n for n in EXCHANGES if n not in SOME], id="others", marks=pytest.mark.slow),
    ],
)
def test_two_processes_find_what_one_finds(tmp_path, names):
    (wanted,) = reports(tmp_path / "one", names, count=1)
    for found in reports(tmp_path / "two", names):
        assert_close(found, wanted)
    assert all(wanted[name]["equal"] for name in names)
    assert all(wanted[name]["metrics"]["residual"] > 0 for name in names if name in SOME)
