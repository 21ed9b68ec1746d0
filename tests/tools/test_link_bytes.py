"""Bytes over a link: for any number of workers, without any of them."""

import importlib
import json

import jax
import numpy as np
import pytest
from cases import HIERARCHIES, sample
from processes import ROOT

import fftgrad as fg

BENCHMARKS = ROOT / "benchmarks"
AUDITED = json.loads((BENCHMARKS / "results/exchange/cpu.json").read_text())
"""What `benchmarks/exchange.py` read off programs for 2 to 64 workers."""


@pytest.mark.parametrize("workers", sample([2, 4, 8, 16, 32, 64], lambda w: {w > 8}))
def test_what_was_audited_for_2_to_64_workers(monkeypatch, workers):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    exchanges = importlib.import_module("exchange").exchanges
    side = int(AUDITED["values"] ** 0.5)
    like = jax.ShapeDtypeStruct((side, side), np.float32)
    audited = {r["name"]: r["link"] for r in AUDITED["rows"] if r["workers"] == workers}
    for name, exchange in exchanges(workers).items():
        if isinstance(exchange, fg.Scheduled):
            exchange = exchange.at(1)
        found = fg.link_bytes(exchange, like, workers, fg.Bucketing("leaf"))
        assert found == pytest.approx(audited.pop(name), abs=0.5), name  # files keep whole bytes
    assert not audited


def test_buckets_and_parts_add_up():
    like = {"w": np.ones((40, 30), np.float32), "b": np.ones(30, np.float32)}
    bucketing = fg.Bucketing("leaf", bucket_bytes=4 * 500)
    codec = fg.Sign()
    assert fg.link_bytes(codec, like, 3, bucketing) == 2 * fg.wire_bytes(codec, like, bucketing)
    assert fg.link_bytes(codec, like, 1) == 0


def test_another_number_of_workers_is_refused():
    with pytest.raises(ValueError, match="use workers=8"):
        fg.link_bytes(fg.TwoStage(fg.Sign(), 4), np.ones(9, np.float32), 8)
    with pytest.raises(ValueError, match="count all workers"):
        fg.link_bytes(HIERARCHIES["slow gather"], np.ones(9, np.float32), 6)
