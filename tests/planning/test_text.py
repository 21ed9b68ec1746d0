"""Numbers as people write and read them."""

import argparse
import json
import math
from typing import NamedTuple

import pytest

from fftgrad.planning.commands._bench import number_of_values
from fftgrad.planning.commands._text import (
    bits_per_second,
    count,
    counts,
    quantity,
    rate,
    three_digits,
    time,
    whole,
    write_json,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("250000", 250_000),
        ("25M", 25_000_000),
        ("1.5G", 1_500_000_000),
        ("7B", 7_000_000_000),
        ("10k", 10_000),
        ("64Ki", 65_536),
        ("16Mi", 16_777_216),
        ("0.5Ki", 512),
        ("1.5T", 1_500_000_000_000),
        ("999999999999999", 999_999_999_999_999),
    ],
)
def test_counts(text, value):
    assert count(text) == value


@pytest.mark.parametrize("text", ["", "0", "-3", "1.5", "M", "3m", "1e6", "2 M", "0.1Ki", "nan"])
def test_what_is_no_count(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be a number of values"):
        count(text)


def test_several_counts():
    assert counts("1Mi,16Mi") == (2**20, 2**24)


def test_times_and_rates_have_units():
    assert (time("300ms"), time("1.5 s"), rate("1Gbit/s")) == (0.3, 1.5, 1.25e8)
    for read, text in ((time, "300"), (rate, "1.25e8"), (time, "nan"), (rate, "inf")):
        with pytest.raises(argparse.ArgumentTypeError, match=r"must have a unit, got .*; use "):
            read(text)
    with pytest.raises(argparse.ArgumentTypeError, match=r"^must be finite and not negative"):
        time("-1ms")
    assert rate("50mbps") == rate("50 Mbps") == rate("50mbit/s")
    assert time("5\u03bcs") == time("5\u00b5s") == time("5us")


@pytest.mark.parametrize("text", ["1", "0", "-3", "2.0", "2k", "", "two"])
def test_what_is_not_as_many_as_there_must_be(text):
    assert whole(2)("2") == 2
    with pytest.raises(argparse.ArgumentTypeError, match="a whole number, 2 to 1000000, got"):
        whole(2)(text)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.3123, "s", "312 ms"),
        (4e6, "B", "4 MB"),
        (999.6, "B", "1 kB"),
        (0.00099996, "s", "1 ms"),
        (18_220, "B", "18.2 kB"),
        (1.2e-5, "s", "12 µs"),
        (3e-12, "s", "0.003 ns"),
        (5e15, "B", "5,000 TB"),
        (0, "s", "0 s"),
        (math.inf, "s", "inf s"),
        (-0.02, "s", "-20 ms"),
    ],
)
def test_quantities(value, unit, text):
    assert quantity(value, unit) == text


def test_the_other_numbers():
    assert bits_per_second(1.25e8) == "1 Gbit/s"
    assert [three_digits(x) for x in (1976.3, 0.51234, 31.97, 12345)] == [
        "1,980",
        "0.512",
        "32",
        "12,300",
    ]
    sizes = (2**20, 3 * 2**29, 2**16, 607, 25_000_000)
    assert [number_of_values(n) for n in sizes] == ["1Mi", "1536Mi", "64Ki", "607", "25,000,000"]


class Row(NamedTuple):
    name: str
    below: float | None


def test_json_has_no_number_that_is_none(tmp_path):
    record = {"rows": (Row("a", math.inf), Row("b", 0.5)), 3: [math.nan, None, True]}
    write_json(record, tmp_path / "x.json", None)
    text = (tmp_path / "x.json").read_text()
    rows = [{"name": "a", "below": None}, {"name": "b", "below": 0.5}]
    assert json.loads(text) == {"rows": rows, "3": [None, None, True]}
