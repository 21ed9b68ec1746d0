"""What each method sends, byte by byte, and the dither of its parts."""

import jax
import numpy as np
import pytest
from cases import METHODS, one_of_each, values
from parallel import AXIS, everywhere

import fftgrad as fg
from fftgrad.ops import _collectives

WORKERS = 4
LIKE = {
    "conv": jax.ShapeDtypeStruct((3, 3, 4, 8), "float32"),
    "head": jax.ShapeDtypeStruct((20, 30), "float32"),
    "last": jax.ShapeDtypeStruct((7,), "float32"),
}
DENSE = 4 * (288 + 600 + 7)


def sent_by(tx):
    """The bytes of each branch of a traced step; what is outside of branches is in ()."""

    def update(grads, state):
        # The parameters themselves do not matter: some methods ask for them.
        return tx.update(grads, state, grads)

    sums = {}
    state = jax.eval_shape(tx.init, LIKE)
    for collective in _collectives.collectives(update, {AXIS: WORKERS}, LIKE, state):
        sums[collective.branch] = sums.get(collective.branch, 0) + collective.bytes
    return sums


# Of 895 values in leaves of 288, 600 and 7, on 4 workers. Each step, or each branch in order.
GOLDEN = {
    "fft_sparsification": [224],
    "fft_sparsification blocked": [136],
    "fft_sparsification diminishing": [160, 624, DENSE],
    "fft_sparsification recovery": [224, 624, DENSE],
    "feedback_adam": [204],
    "feedback_muon": [204],
    "acp_sgd": [476],
    "adacomp": [192],
    "beer": [808],
    "beer one bit": [456],
    "choco_sgd": [360],
    "demo": [348],
    "scale_by_datalens": [88],
    "diloco": [56],
    "scale_by_dion": [780],
    "dgc": [456],
    "eden": [284],
    "lgc": [DENSE, 208, 312, 456],
    "scale_by_majority_vote": [120],
    "scale_by_one_bit_adam": [180, DENSE],
    "power_sgd": [780],
    "qsgd": [564],
    "random_k": [360],
    "redsync": [860],
    "redsync quantized": [156],
    "scalecom": [436],
    "sharded": [1092],
    "sign_sgd": [132],
    "sparse_loco": [232],
    "terngrad": [200],
    "terngrad summed": [372],
    "top_k": [436],
}


@pytest.mark.parametrize("name", one_of_each(METHODS))
def test_a_method_sends_as_many_bytes_as_it_did(name):
    found = sent_by(METHODS[name](AXIS))
    assert [found[branch] for branch in sorted(found)] == GOLDEN[name]


@pytest.mark.parametrize("name", ["feedback_adam", "feedback_muon"])
def test_an_optimizer_fills_a_hundredth_or_sends_what_it_is_given(name):
    make = getattr(fg.optimizers, name)
    exchange = fg.AllGather(fg.Budget(ratio=20))
    for given, sent in (((), fg.AllGather(fg.Budget(ratio=100))), ((exchange,), exchange)):
        tx = make(0.1, **dict(zip(("exchange",), given, strict=False)), axis_name=AXIS)
        assert list(sent_by(tx).values()) == [fg.wire_bytes(sent, LIKE)]


# Dither

STOCHASTIC = fg.UniformQuantizer(bits=4)


def sent(exchange, x, **options):
    """What the others got of each worker's values in one step: what the residual lacks."""
    tx = fg.compressed_pmean(exchange, fg.ErrorFeedback(), axis_name=AXIS, **options)
    workers = jax.tree.leaves(x)[0].shape[0]
    state = everywhere("vmap", lambda g: tx.update(g, tx.init(g))[1], workers)(x)
    residual = state.memory.worker_rows.residual
    return jax.tree.map(lambda a, r: a - np.asarray(r).reshape(a.shape), x, residual)


def different(rows):
    return len({row.tobytes() for row in rows})


def test_no_two_shards_of_two_stages_share_a_dither():
    workers = 24
    shard = values((40,))
    x = np.broadcast_to(np.tile(shard, workers), (workers, 40 * workers))
    got = sent(fg.TwoStage(STOCHASTIC, workers=workers), x)
    for row in got:
        assert different(row.reshape(workers, 40)) == workers
    assert different(got) == workers


# And how many different rows three equal parts of two equal workers make: all, or one a part where
# the support is drawn for all workers.
DRAWING = {
    "gather": (fg.AllGather(STOCHASTIC), 6),
    "two stages": (fg.TwoStage(STOCHASTIC, workers=2), 6),
    "integer sum": (fg.exchanges.QuantizedAllReduce(workers=2), 6),
    "random sum": (fg.AllReduce(fg.codecs.RandomK(k=9)), 3),
}


SIZES = {
    "equal": ((40, 40, 40), None),
    "a bucket each": ((40, 40, 40), 160),
    "unlike": ((40, 42, 44), None),
    "two alike": ((40, 44, 44), None),
}


@pytest.mark.parametrize(("sizes", "bucket_bytes"), SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(("exchange", "rows"), DRAWING.values(), ids=DRAWING)
def test_no_two_parts_or_buckets_share_what_is_drawn(exchange, rows, sizes, bucket_bytes):
    """Parts start with the same values, of which one is the largest, and go on with zeros."""
    x = {name: np.zeros((2, size), np.float32) for name, size in zip("abc", sizes, strict=True)}
    for leaf in x.values():
        leaf[:, :20] = values((20,), seed=1)
    got = sent(exchange, x, bucketing=fg.Bucketing("leaf", bucket_bytes))
    assert different(row[:20] for rows in got.values() for row in rows) == rows
