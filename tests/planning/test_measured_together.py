"""Several processes measure together: the slowest counts, and all find the same."""

import json

import pytest
from measured_program import SLEEPS
from processes import ROOT, free_port, running

import fftgrad as fg

PROGRAM = str(ROOT / "tests/measured_program.py")


@pytest.mark.processes
def test_two_processes_find_the_same(tmp_path):
    coordinator = f"127.0.0.1:{free_port()}"
    commands = [[PROGRAM, coordinator, "2", str(number)] for number in range(2)]
    with running(tmp_path, commands, cache=tmp_path / "compiled") as processes:
        for process in processes:
            assert process.wait() == 0, process.err.read_text()
        said = [json.loads(process.told[-1]) for process in processes]
    assert said[0] == said[1]
    flat, pairs, link, step = said[0]
    assert max(SLEEPS) <= step < 100 * max(SLEEPS)
    names = {
        "Measured": fg.planning.Measured,
        "Timing": fg.planning.Timing,
        "Link": fg.planning.Link,
    }
    flat, pairs, link = (eval(text, names) for text in (flat, pairs, link))
    assert flat.workers == pairs.workers == 4
    assert flat.axis_name == "data"
    assert {timing.workers for timing in flat.timings.values()} == {(4,)}
    assert (pairs.fast, pairs.axis_name) == ((2, fg.planning.Link("50GB/s")), ("slow", "fast"))
    assert {timing.workers for timing in pairs.timings.values()} == {(2, 2)}
    for found in (flat.link, link):
        assert 1e5 < found.bandwidth < 1e13
        assert 0 <= found.latency < 10
