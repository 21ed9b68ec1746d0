"""A link is found from what its collectives take, whatever the latency and the bandwidth are."""

import itertools

import pytest
from parallel import mesh_of

import fftgrad as fg
from fftgrad.ops._collectives import RING
from fftgrad.planning import _link
from fftgrad.planning._link import COLLECTIVES, SIZES, Sent

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
            return (_link.rounds(kind, workers) * latency + over) * noise()

        monkeypatch.setattr(_link, "_time", time)
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
        assert link.residual < 1e-6


def test_noise_on_a_long_link_is_no_bandwidth(modelled):
    """Of 50 ms each way, by rounds that are a hundredth longer or shorter."""
    turns = iter([1.01, 0.99, 1.0] * len(SIZES))
    modelled(1.25e7, 0.12, lambda: next(turns))
    link = fg.planning.measure_link(mesh_of(4), seconds=1.0)
    assert link.bandwidth == pytest.approx(1.25e7, rel=0.1)
    assert link.latency == pytest.approx(0.12, rel=0.02)
    assert 0 < link.residual < 0.1


def test_sizes_are_left_out_by_what_their_bytes_take(modelled):
    sizes = modelled(1.25e8, 1.0)  # no size makes a latency shorter
    fg.planning.measure_link(mesh_of(4), seconds=0.5)
    assert sizes == list(SIZES)
    sizes = modelled(1e5, 0.0)
    fg.planning.measure_link(mesh_of(4), seconds=0.5)
    assert sizes == list(SIZES[:2])
    sizes = modelled(1e6, 0.0)  # an all-to-all of 4 MiB takes 5.2 s
    fg.planning.measure_link(mesh_of(4), seconds=1.0)
    assert sizes == list(SIZES[:2])
    fg.planning.measure_link(mesh_of(4), seconds=2.0)
    assert sizes == [*SIZES[:2], *SIZES[:3]]


def test_where_noise_hides_the_bytes_the_bandwidth_is_finite():
    found = [Sent("all-gather", 3, 8192.0, 0.061), Sent("all-gather", 3, 8192.0 * 32, 0.060)]
    link = _link.fit(found)
    assert 0 < link.bandwidth < 1e9
    assert 0 < link.latency <= 0.061 / 3
