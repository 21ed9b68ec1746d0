"""Links: how people write them, and how they are found from what collectives take."""

import itertools
import json
import math

import pytest
from parallel import mesh_of
from processes import ROOT, free_port, running

import fftgrad as fg
from fftgrad.ops._collectives import RING
from fftgrad.planning import _predict, _text, _timing
from fftgrad.planning._timing import COLLECTIVES, SIZES, Sent

SHARES = {"all-reduce": 1.0, "all-gather": 0.9, "all-to-all": 0.6}
KINDS = {collective: kind for kind, collective in COLLECTIVES.items()}


@pytest.fixture
def modelled(monkeypatch):
    """Collectives that take what a link of the model takes; and the sizes that were asked for."""
    sizes = list[int]()

    def use(bandwidth, latency, noise=lambda: 1.0):
        sizes.clear()

        def time(mesh, axis_name, collective, size, _):
            kind, workers = KINDS[collective], mesh.shape[axis_name]
            if kind == "all-reduce":
                sizes.append(size)
            over = size * RING[kind](workers) / bandwidth / SHARES[kind]
            return (_predict.rounds(kind, workers) * latency + over) * noise()

        monkeypatch.setattr(_timing, "_time", time)
        return sizes

    return use


@pytest.mark.parametrize("workers", [2, 8])
@pytest.mark.parametrize("latency", [0.0, 1e-5, 5e-3, 0.02, 0.12])
def test_a_modelled_link_is_found(modelled, workers, latency):
    for bandwidth, seconds in itertools.product((1e5, 1.25e7, 1.25e8, 2e9), (0.01, 0.5)):
        modelled(bandwidth, latency)
        link = fg.planning.measure_link(mesh_of(workers), seconds=seconds)
        assert link.bandwidth == pytest.approx(bandwidth, rel=1e-6)
        assert link.latency == pytest.approx(latency, rel=1e-6, abs=1e-9)
        assert dict(link.shares) == pytest.approx({"all-gather": 0.9, "all-to-all": 0.6}, rel=1e-6)


def test_noise_on_a_long_link_is_no_bandwidth(modelled):
    """Of 50 ms each way, by rounds that are a hundredth longer or shorter."""
    turns = iter([1.01, 0.99, 1.0] * len(SIZES))
    modelled(1.25e7, 0.12, lambda: next(turns))
    link = fg.planning.measure_link(mesh_of(4), seconds=1.0)
    assert link.bandwidth == pytest.approx(1.25e7, rel=0.1)
    assert link.latency == pytest.approx(0.12, rel=0.02)


def test_sizes_are_left_out_by_what_their_bytes_take(modelled):
    sizes = modelled(1.25e8, 1.0)  # no size makes a latency shorter
    fg.planning.measure_link(mesh_of(4), seconds=0.5)
    assert sizes == list(SIZES)
    sizes = modelled(1e6, 0.0)  # an all-to-all of 4 MiB takes 5.2 s
    fg.planning.measure_link(mesh_of(4), seconds=1.0)
    assert sizes == list(SIZES[:2])
    fg.planning.measure_link(mesh_of(4), seconds=2.0)
    assert sizes == [*SIZES[:2], *SIZES[:3]]


def fitted(seconds):
    """The link on which gathers of these bytes take so long."""
    return _timing.fit([Sent("all-gather", 3, size, took) for size, took in seconds.items()])


def test_what_no_link_of_the_model_takes_is_fitted_by_one():
    hidden_by_noise = fitted({8192.0: 0.061, 8192.0 * 32: 0.060})
    assert 0 < hidden_by_noise.bandwidth < 1e9
    assert 0 < hidden_by_noise.latency <= 0.061 / 3
    # Links let so many bytes through before they slow down.
    at_once = fitted({s: max(1e-4, (s - 5e4) / 1e7) for s in (1e4, 1e6, 1e7)})
    assert at_once.bandwidth == pytest.approx(1e7, rel=0.01)
    assert at_once.latency < 1e-4
    less_than_none = fitted({s: s / 1e8 * 0.99 for s in (1e3, 1e6, 1e8)})
    assert less_than_none.latency == 0
    assert less_than_none.bandwidth > 0


def test_rates_and_times():
    rates = {
        "1gbit": 1.25e8, "100 Mbit/s": 1.25e7, "10Gbps": 1.25e9, "25GB/s": 2.5e10, "1.6Tbit": 2e11,
        "25Gb/s": 3.125e9, "1Gbit/s": 1.25e8, "1GBIT": 1.25e8, "1 GBps": 1e9, "100Mbits/s": 1.25e7,
        "8b/s": 1.0, 125e6: 125e6,
    }  # fmt: skip
    assert {text: _text.bytes_per_second("link", text) for text in rates} == pytest.approx(rates)
    times = {"300ms": 0.3, "50us": 5e-5, "2 s": 2.0, "20ns": 2e-8, 0.25: 0.25, 0: 0.0}
    assert {text: _text.seconds("step", text) for text in times} == pytest.approx(times)


def test_mistakes():
    bits_or_bytes = ("1gb", "1GB", "100mb", "8b", "1e9", "-1gbit")
    for given, error, remedy in (
        (("fast",), ValueError, "use '1gbit'"),
        (("1gbit", "100"), ValueError, "use '300ms'"),
        *(((text,), ValueError, "in bit/s or B/s, got") for text in bits_or_bytes),
        ((math.nan,), ValueError, "positive and finite"),
        (("1gbit", -1.0), ValueError, "not negative"),
        ((None,), TypeError, "a number or a text"),
    ):
        with pytest.raises(error, match=remedy):
            fg.planning.Link(*given)
    for mesh, axis, remedy in ((1, "data", "give the link"), (2, "model", "axis of the mesh")):
        with pytest.raises(ValueError, match=remedy):
            fg.planning.measure_link(mesh_of(mesh), axis)


@pytest.mark.processes
def test_two_processes_measure_the_same_link(tmp_path):
    coordinator, program = f"127.0.0.1:{free_port()}", str(ROOT / "tests/measured_program.py")
    commands = [[program, coordinator, "2", str(number)] for number in range(2)]
    with running(tmp_path, commands, cache=tmp_path / "compiled") as processes:
        for process in processes:
            assert process.wait() == 0, process.err.read_text()
        one, other = (json.loads(process.told[-1]) for process in processes)
    assert one == other
    for text in one:
        found = eval(text, {"Link": fg.planning.Link})
        assert 1e5 < found.bandwidth < 1e13
        assert 0 <= found.latency < 10
