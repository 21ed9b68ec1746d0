"""The model of a step: its closed forms, the papers' models within it, and units."""

import math

import pytest

import fftgrad as fg
from fftgrad.planning import _link
from fftgrad.planning._link import Parts, collective_seconds, exchange_seconds, rounds, step_seconds

LINK = fg.planning.Link(1e6, 1e-3)


def gathered(size, workers, axes=("data",)):
    return fg.tools.Collective("all-gather", "u32", (size // 4,), size, (), False, workers, axes)


@pytest.mark.parametrize(
    ("kind", "algorithm", "turns", "times"),
    [
        ("all-reduce", "ring", 14, 1.75),
        ("all-reduce", "tree", 6, 1.75),
        ("all-gather", "ring", 7, 7),
        ("all-gather", "tree", 3, 7),
        ("reduce-scatter", "ring", 7, 0.875),
        ("reduce-scatter", "tree", 3, 0.875),
        ("all-to-all", "ring", 7, 0.875),
        ("all-to-all", "tree", 7, 0.875),
        ("collective-permute", "ring", 1, 1),
    ],
)
def test_a_collective_of_eight_workers(kind, algorithm, turns, times):
    assert rounds(kind, 8, algorithm) == turns
    found = collective_seconds(kind, 4000, 8, LINK, algorithm)
    assert found == pytest.approx(turns * 1e-3 + times * 4000 / 1e6)
    assert collective_seconds(kind, 4000, 1, LINK, algorithm) == 0


@pytest.mark.parametrize(
    ("kind", "turns", "times"),
    [
        ("all-reduce", 18, 2),  # a pipelined tree, up and down
        ("all-gather", 9, 511),
        ("reduce-scatter", 9, 511 / 512),
        ("all-to-all", 511, 511 / 512),
        ("collective-permute", 1, 1),
    ],
)
def test_short_messages_among_many_workers_go_by_trees(kind, turns, times):
    """As 0.5 MB among 512 workers over 1 Gbit/s."""
    link = fg.planning.Link(1.25e8, 1e-4)
    found = collective_seconds(kind, 500_000, 512, link)
    assert found == pytest.approx(turns * 1e-4 + times * 500_000 / 1.25e8)


def test_long_messages_among_few_workers_go_by_rings():
    link = fg.planning.Link(1.25e8, 1e-4)
    for size in (1e7, 1e9):
        ring = collective_seconds("all-reduce", size, 4, link, "ring")
        assert collective_seconds("all-reduce", size, 4, link) == ring


def test_the_slowest_axis_holds_up_a_collective():
    links = {"slow": fg.planning.Link(1e6, 0.0), "fast": fg.planning.Link(1e9, 0.5)}
    assert exchange_seconds([gathered(1000, 3, ("slow",))], links, "ring") == pytest.approx(2e-3)
    both = exchange_seconds([gathered(1000, 3, ("slow", "fast"))], links, "ring")
    assert both == pytest.approx(2 * 0.5 + 2e-6)
    two = [gathered(1000, 3, ("slow",)), gathered(500, 2, ("slow",))]
    assert exchange_seconds(two, links) == pytest.approx(2e-3 + 5e-4)


def test_nothing_hides_in_one_bucket_and_most_in_many():
    parts = Parts(step=1.0, compress=0.1, exchange=0.8, decompress=0.2)
    assert step_seconds(parts) == pytest.approx(2.1)
    assert step_seconds(parts, buckets=8) == pytest.approx(1.1 + 0.1 + 0.2)
    slow = parts._replace(exchange=8.0)
    assert step_seconds(slow, buckets=8) == pytest.approx(7.0 + 1.0 + 0.2)
    assert step_seconds(slow, every=4) == step_seconds(slow, every=4, buckets=8)
    assert step_seconds(slow, every=4) == pytest.approx(1 + 8.3 / 4)


def test_dense_training_is_that_of_agarwal_et_al():
    """max(backward, (buckets - 1) · one) + the last, arXiv:2103.00543."""
    backward, one, buckets = 0.3, 0.05, 9
    parts = Parts(backward, 0.0, buckets * one, 0.0)
    assert step_seconds(parts, buckets=buckets) == pytest.approx(max(0.3, 8 * 0.05) + 0.05)


@pytest.mark.parametrize("workers", [2, 16, 128])
def test_redsync_is_the_model_with_trees(workers):
    p, elements, density, beta, alpha = workers, 10_000_000, 0.001, 4 / 1.25e8, 5e-5
    select, decode, add = 0.01, 0.002, 1e9
    sent, whole = 4 * elements * density, 4 * elements
    link = fg.planning.Link(1.25e8, alpha)
    gathered = collective_seconds("all-gather", sent, p, link, "tree")
    reduced = collective_seconds("all-reduce", whole, p, link, "tree")
    lg = math.log2(p)
    sparse = select + lg * alpha + (p - 1) * elements * density * beta + p * decode
    dense = 2 * lg * alpha + 2 * (p - 1) / p * elements * beta + (p - 1) / p * elements / add
    adding = (p - 1) / p * elements / add
    assert step_seconds(Parts(0.0, select, gathered, p * decode)) == pytest.approx(sparse)
    assert step_seconds(Parts(0.0, 0.0, reduced, adding)) == pytest.approx(dense)


@pytest.mark.parametrize(("gigabits", "pays"), [(10, 1.5), (56, 29.5), (60, math.inf)])
def test_the_fft_papers_ratio_is_that_of_two_workers_without_latency(gigabits, pays):
    """k > 1 / (1 - 2 T_comm (4 / T_m + 1 / T_f + 1 / T_p + 1 / T_s)), HPDC 2020, section 3.2."""
    size, comm = 1e9, gigabits / 8 * 1e9
    cost = 4 / 600e9 + 1 / 71e9 + 1 / 67e9 + 1 / 30e9
    share = 1 - 2 * comm * cost
    least = 1 / share if share > 0 else math.inf
    if math.isfinite(least):
        assert least <= pays * 1.01
    link = fg.planning.Link(comm, 0.0)

    def seconds(ratio):
        sent = collective_seconds("all-gather", size / ratio, 2, link)
        return step_seconds(Parts(0.0, size * cost, sent, size * cost))

    dense = step_seconds(Parts(0.0, 0.0, collective_seconds("all-reduce", size, 2, link), 0.0))
    if math.isfinite(least):
        assert seconds(1.01 * least) < dense < seconds(0.99 * least)
    else:
        assert seconds(1e9) > dense


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1gbit", 1.25e8),
        ("100 Mbit/s", 1.25e7),
        ("10Gbps", 1.25e9),
        ("25GB/s", 2.5e10),
        ("1.6Tbit", 2e11),
        ("25Gb/s", 3.125e9),
        ("1.5e3 kB/s", 1.5e6),
        ("1Gbit/s", 1.25e8),
        ("1GBIT", 1.25e8),
        ("1 GBps", 1e9),
        ("100Mbits/s", 1.25e7),
        ("8b/s", 1.0),
        (125e6, 125e6),
    ],
)
def test_rates(text, value):
    assert _link.bytes_per_second("link", text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("300ms", 0.3),
        ("50us", 5e-5),
        ("2 s", 2.0),
        ("20ns", 2e-8),
        ("1min", 60.0),
        (0.25, 0.25),
        (0, 0.0),
    ],
)
def test_times(text, value):
    assert _link.seconds("step", text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("make", "error", "remedy"),
    [
        (lambda: fg.planning.Link("fast"), ValueError, "use '1gbit'"),
        (lambda: fg.planning.Link("1gbit", "100"), ValueError, "use '300ms'"),
        (lambda: fg.planning.Link("1 g"), ValueError, "use '1gbit'"),
        (lambda: fg.planning.Link(0.0), ValueError, "positive and finite"),
        *(
            (
                lambda text=text: fg.planning.Link(text),
                ValueError,
                "may be bits or bytes; use",
            )
            for text in ("1gb", "1gB", "1Gb", "1GB", "1gb/s", "1gBps", "100mb", "8b")
        ),
        (lambda: fg.planning.Link("1Gbyte"), ValueError, "got '1Gbyte'; use"),
        (lambda: fg.planning.Link("0bit"), ValueError, "positive and finite"),
        (lambda: fg.planning.Link(math.inf), ValueError, "positive and finite"),
        (lambda: fg.planning.Link(math.nan), ValueError, "positive and finite"),
        (lambda: fg.planning.Link("1gbit", -1.0), ValueError, "not negative"),
        (lambda: fg.planning.Link(None), TypeError, "a number or a text"),
        (lambda: fg.planning.Link(True), TypeError, "a number or a text"),
    ],
)
def test_mistakes(make, error, remedy):
    with pytest.raises(error, match=remedy):
        make()


def test_a_link_is_a_value():
    assert fg.planning.Link("1gbit", "100us") == fg.planning.Link(1.25e8, 1e-4, residual=0.3)
    assert repr(fg.planning.Link("1gbit", "100us")) == "Link(bandwidth=125000000.0, latency=0.0001)"
    assert len({fg.planning.Link("1gbit"), fg.planning.Link(1.25e8)}) == 1
