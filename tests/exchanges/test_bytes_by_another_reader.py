"""`wire_bytes` against the results of collectives in compiled programs, by a reader of their own.

`fg.audit` reads what is handed to a collective; this reads what comes out of it.
"""

import itertools
import math
import re

import jax
import pytest
from cases import CODECS, SLOW, gradients
from parallel import AXIS, of_size, train_step

import fftgrad as fg

WIDTHS = {"pred": 1, "u8": 1, "s8": 1, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
LINE = re.compile(r"= (.*?) (all-reduce|all-gather|all-to-all|reduce-scatter)\(", re.ASCII)


def bytes_sent(text, workers):
    """What one worker hands over: of a gather it gets that of all, of a scatter a share."""
    total = 0
    for kinds, collective in LINE.findall(text):
        size = sum(
            WIDTHS[kind] * math.prod(int(n) for n in dims.split(",") if n)
            for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", kinds)
        )
        share = {"all-gather": 1 / workers, "reduce-scatter": workers}.get(collective, 1)
        total += size * share
    return total


EXCHANGES = {
    "dense": fg.AllReduce(),
    "gather": fg.AllGather(CODECS["blocked 4 bits"]),
    "two stages": fg.TwoStage(CODECS["top-k 6 bits"], workers=4),
    "support": fg.LeaderTopK(fg.TopK(fraction=0.1)),
    "integers": fg.QuantizedAllReduce(workers=4),
    "votes": fg.contrib.votes.TopVotes(workers=4, fraction=0.02),
    "low rank": fg.PowerSgd(rank=2),
    "low rank in turns": fg.AcpSgd(rank=2),
}
SHAPES = {
    "matrices": {"a": (40, 30), "b": (30,), "c": (30, 50)},
    "odd": {"a": (), "b": (1009,), "c": (3, 7, 5)},
}
ALL = itertools.product((4, 2, 8), EXCHANGES, SHAPES, ("model", "leaf"))
ROWS = [pytest.param(*row, marks=[SLOW] if number % 19 else []) for number, row in enumerate(ALL)]


@pytest.mark.parametrize(("workers", "name", "shapes", "scope"), ROWS)
def test_bytes_are_those_of_what_comes_out_of_the_collectives(workers, name, shapes, scope):
    like = {key: jax.ShapeDtypeStruct(s, "float32") for key, s in SHAPES[shapes].items()}
    exchange, bucketing = of_size(EXCHANGES[name], workers), fg.Bucketing(scope)
    tx = fg.compressed_pmean(exchange, fg.ErrorFeedback(), axis_name=AXIS, bucketing=bucketing)
    init, update = train_step(tx, workers, like=like)
    text = update.lower(gradients(like, workers), jax.eval_shape(init, like)).compile().as_text()
    assert bytes_sent(text, workers) == fg.wire_bytes(exchange, like, bucketing)
