"""Mistakes of a first hour: each is answered where it is made, with the remedy.

An error reads: object(argument): rule, what was got; remedy. All of them come from making a part or
a transformation, or while tracing.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parallel import AXIS, everywhere, mesh_of

import fftgrad as fg

TOP = fg.TopK(fraction=0.1)
GATHER = fg.AllGather(TOP)
GRADS = {"w": np.arange(480, dtype=np.float32).reshape(4, 12, 10) - 200}
COMPLEX = np.ones(3, "complex64")


def pmean(exchange=GATHER, memory=fg.NoMemory(), **kwargs):
    return fg.compressed_pmean(exchange, memory, **{"axis_name": AXIS} | kwargs)


def step(tx, made_by=None, **extra):
    """An update by `tx` with the state of another transformation."""
    made_by = made_by or tx
    return everywhere("vmap", lambda g: tx.update(g, made_by.init(g), **extra)[0], 4)(GRADS)


def missing(some):
    """An update with some of the gradients that the state is for."""
    tx, grads = pmean(GATHER, FEEDBACK), {**GRADS, "b": jnp.ones((4, 7))}
    return jax.vmap(lambda g: tx.update(some(g), tx.init(g)), axis_name=AXIS)(grads)


@dataclasses.dataclass(frozen=True)
class Half(fg.codecs.Quantizer):
    """A codec of one's own, with a slip in one of its functions."""

    slip: str = ""

    def compress(self, x, state, step):
        payload = fg.codecs.Payload(x.astype(jnp.bfloat16))
        slips = {"payload": payload, "nothing": None, "array": fg.codecs.Compressed(payload.main)}
        return slips.get(self.slip, fg.codecs.Compressed(payload))

    def decompress(self, payload, like, step):
        x = payload.main.astype(like.dtype)
        return {"dtype": payload.main, "row": x[None], "one": x[:1], "pair": (x, x)}.get(
            self.slip, x
        )


def by_exchanges(codec):
    """What first calls a codec: each exchange, alone and in a chain, and the tools."""
    chained = fg.chain(fg.Hadamard(block=4), fg.TopK(k=4), codec)
    return {
        "gather": lambda: step(pmean(fg.AllGather(codec))),
        "two stages": lambda: step(pmean(fg.TwoStage(codec, workers=4))),
        "rule": lambda: step(pmean(fg.AllGather(lambda *_: codec))),
        "warm-up": lambda: step(pmean(fg.Scheduled({0: fg.AllReduce(), 2: fg.AllGather(codec)}))),
        "chain": lambda: step(pmean(fg.AllGather(chained))),
        "one array": lambda: fg.decompress(codec, fg.compress(codec, jnp.ones(9)), jnp.ones(9)),
    }


CALLERS = list(by_exchanges(TOP))
SLIPS = {
    "a payload": (Half("payload"), r"Half\.compress\(\): must return a Com.*, got Payload\("),
    "nothing": (Half("nothing"), r"Half\.compress\(\): must return a Compressed.*, got None; "),
    "an array": (Half("array"), r"Half\.compress\(\): .* with a Payload, got .*; .*Payload\(main"),
    "another dtype": (
        Half("dtype"), r"Half\.decompress\(\): .*float32\[\d+\].*got bfloat16\[\d+\]; .*astype"
    ),
    "another shape": (
        Half("row"), r"Half\.decompress\(\): .*float32\[(\d+)\].*got float32\[1, \1\]; "
    ),
    "a shape that would be broadcast": (
        Half("one"), r"Half\.decompress\(\): .*float32\[\d+\].*got float32\[1\]; "
    ),
    "a pair": (Half("pair"), r"Half\.decompress\(\): .*float32\[\d+\].*got tuple; "),
}  # fmt: skip


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize(("codec", "answer"), SLIPS.values(), ids=SLIPS)
def test_a_slip_in_a_codec_of_ones_own_is_answered(codec, answer, caller):
    with pytest.raises(TypeError, match=answer) as caught:
        by_exchanges(codec)[caller]()
    assert re.match(r"[\w.]+\([^;]*\): .*, got .*; .*\.", str(caught.value), re.DOTALL)


SGD, LADDER = optax.sgd(0.1), fg.exchanges.Ladder((GATHER, fg.AllReduce()))
FEEDBACK = fg.ErrorFeedback()
MOMENTUM = fg.memories.MomentumCorrection()

MISTAKES = [
    # One kind of part where another is expected.
    (lambda: pmean(TOP), r"AllGather\(codec\)"),
    (lambda: fg.optimizers.feedback_adam(0.1, 0.04), r"_pmean\(exchange\): .*got 0"),
    (lambda: fg.optimizers.feedback_adam(0.1, lead=1.5), r"feedback_adam\(lead\).*use 0.5"),
    (lambda: fg.optimizers.feedback_muon(0.1, lead=-0.5), r"_muon\(lead\).*use 0.5"),
    (lambda: fg.optimizers.feedback_adam(0.1, b1=1.0), r"_adam\(b1\).*use 0.9"),
    (lambda: fg.exchanges.Ladder((TOP, fg.AllReduce())), r"exchanges\[0\].*AllGather\(codec"),
    (lambda: fg.Scheduled({0: TOP}), r"AllGather\(codec\)"),
    (lambda: fg.Hierarchical("fast", 2, TOP), r"AllGather\(codec\)"),
    (lambda: pmean(GATHER, TOP), r"use ErrorFeedback\(\)"),
    (lambda: fg.AllGather(fg.AllReduce()), "an exchange already; pass its codec"),
    (lambda: fg.exchanges.Ladder([GATHER, fg.AllReduce()]), "must be a tuple of"),
    (lambda: fg.Hierarchical("fast", 2, fg.methods.top_k()), r"take its \.exchange"),
    (lambda: fg.wire_bytes(jnp.ones(3), TOP), r"wire_bytes\(part, like\)"),
    (lambda: fg.Cast("bf16"), "got 'bf16'; use bfloat16"),
    (lambda: fg.methods.demo(k=0), r"must be at least 1, got 0; use k=32"),
    (lambda: fg.chain(TOP, fg.AllReduce()), "TopK"),
    (lambda: step(pmean(fg.AllGather(lambda *_: fg.AllReduce()))), r"return a codec"),
    (lambda: fg.compress(GATHER, jnp.ones(3)), "TopK"),
    (lambda: fg.wire_bytes(FEEDBACK, jnp.ones(3)), "pass a codec, an exchange or a method"),
    (lambda: pmean(FEEDBACK, GATHER), "the exchange comes first"),
    # A class in place of a value.
    (lambda: pmean(fg.AllReduce), r"AllReduce\(\.\.\.\)"),
    (lambda: fg.AllGather(fg.TopK), r"TopK\(\.\.\.\)"),
    (lambda: pmean(GATHER, fg.ErrorFeedback), r"ErrorFeedback\(\.\.\.\)"),
    (lambda: fg.chain([TOP, fg.Sign()]), r"chain\(\*codecs\)"),
    (lambda: fg.Scheduled([fg.AllReduce()]), "{0: AllReduce"),
    (
        lambda: fg.Scheduled({0: fg.methods.top_k(0.1)}),
        r"\.exchange here.*\.memory and \.bucketing beside",
    ),
    (lambda: fg.value_and_grad(AXIS, jnp.sum), r"value_and_grad\(loss, axis_name\)"),
    (lambda: fg.testing.check_exchange(fg.methods.top_k(0.01)), r"take its \.exchange"),
    (lambda: pmean(key="a"), "pmean.*key=0"),
    (lambda: pmean(key=1.5), "pmean.*key=0"),
    (lambda: step(pmean(), weights=1.0), "weight=weights"),
    (lambda: step(pmean(fg.TwoStage(fg.Sign(), workers=3))), "use workers=4"),
    (lambda: step(pmean(fg.exchanges.QuantizedAllReduce(workers=3))), "use workers=4"),
    (lambda: fg.compress(TOP, jnp.arange(3)), "out of what is differentiated"),
    (lambda: pmean().init({"w": np.arange(3)}), "differentiated"),
    (lambda: fg.chain(fg.Fft, TOP), r"Fft\(\.\.\.\)"),
    # Names of axes.
    (lambda: pmean(axis_name=["data"]), "use 'data'"),
    (lambda: pmean(axis_name=["slow", "fast"]), r"or \('slow', 'fast'\)"),
    # Names of policies.
    (lambda: pmean(non_finite="zero"), "use 'propagate'"),
    (lambda: pmean(axis_name=None), "use 'data'"),
    (lambda: fg.Hierarchical(["fast"], 2, fg.AllReduce()), "use 'data'"),
    (lambda: fg.state_specs(pmean().init(jnp.ones(3)), ["data"]), "use 'data'"),
    (
        lambda: jax.vmap(lambda g: pmean().update(g, pmean().init(g)), axis_name="batch")(GRADS),
        "inside jax.shard_map",
    ),
    (
        lambda: fg.data_parallel(jnp.sum, jax.make_mesh((1,), (AXIS,)), "date"),
        "got 'date' for a mesh",
    ),
    (
        lambda: step(fg.optimizers.feedback_muon(0.1, share_axis="fast", axis_name=AXIS)),
        r"feedback_muon\(axis_name='fast'\)",
    ),
    (lambda: fg.init_state(pmean(), jnp.ones(3), mesh_of(2), "date"), r"'date'.*use one of these"),
    # States of others.
    (lambda: step(pmean(GATHER), pmean(fg.PowerSgd(2))), "start from fg.init_state"),
    (
        lambda: step(pmean(fg.PowerSgd(2)), pmean(fg.PowerSgd(4))),
        r"got arrays of other shapes; start from",
    ),
    (lambda: step(pmean(GATHER, FEEDBACK), pmean(GATHER, MOMENTUM)), "start from"),
    (
        lambda: step(pmean(), pmean(bucketing=fg.Bucketing("model", bucket_bytes=100))),
        "start from fg.init_state",
    ),
    (lambda: missing(lambda grads: {"w": grads["w"]}), "pass zeros for missing"),
    (
        lambda: pmean().update(GRADS, pmean().init(GRADS)),
        r"got no such axis; make the step by fg\.data_parallel, or call it inside jax\.shard_map",
    ),
    (lambda: step(pmean(track_error=True), pmean()), "start from"),
    (lambda: step(pmean(), optax.adam(0.1)), "must be a CompressedPmeanState"),
    (lambda: fg.metrics(optax.adam(0.1).init(jnp.ones(3))), "pass the optimizer's"),
    (
        lambda: fg.wire_bytes(fg.Scheduled({0: fg.AllReduce(), 5: GATHER}), jnp.ones(30)),
        r"exchange\.at\(step\)",
    ),
    # Compositions that do not work.
    (lambda: pmean(fg.methods.top_k(0.01), 0), "use ErrorFeedback"),
    (lambda: pmean(fg.methods.top_k(0.01), bucketing=""), r"use Bucketing\('leaf'\)"),
    (lambda: step(fg.methods.scale_by_majority_vote(), weight=3), "leave it out, or use a"),
    (lambda: step(fg.training.multi_steps(pmean(), 2), weight=3), r"steps.*pmean\(weight"),
    (lambda: step(fg.trainable(pmean(), {"w": "lora"})), "a tree of bools, or a"),
    (
        lambda: fg.optimizers.sharded(optax.polyak_sgd(), workers=4).init(jnp.ones(8)),
        r"sharded\(inner\): .*use optax\.adamw",
    ),
    (lambda: fg.AllReduce(TOP), r"use AllGather\(TopK\(fraction=0\.1\)\)"),
    (
        lambda: fg.AllReduce(fg.Cast("bfloat16")),
        r"use TwoStage\(Cast\(dtype='bfloat16'\), workers=w\)",
    ),
    (lambda: step(fg.methods.recover_by_loss(pmean(LADDER))), "value=loss"),
    (
        lambda: fg.methods.recover_by_loss(optax.chain(pmean(LADDER), SGD)).init(jnp.ones(9)),
        "chain the others after recover_by_loss",
    ),
    # Counts that are none.
    (
        lambda: fg.optimizers.diloco(optax.sgd(0.1), optax.sgd(1.0), 4, overlap_steps=2.5),
        r"diloco\(overlap_steps\): must be a whole number, got 2\.5",
    ),
    (lambda: fg.TwoStage(fg.Sign(), 4.0), "a whole number"),
    (lambda: pmean(fg.methods.top_k), r"call it, as top_k\(\.\.\.\)"),
    (lambda: fg.optimizers.sharded(optax.sgd(0.1), 4.0, axis_name=AXIS), "whole"),
    (lambda: fg.ErrorFeedback("0.9"), "must be a number, got"),
    # Arrays that cannot be sent.
    (lambda: fg.wire_bytes(TOP, COMPLEX), r"got complex64; cast it"),
    (lambda: fg.wire_bytes(GATHER, {"a": jnp.ones(3), "b": COMPLEX}), r"like\['b'\]"),
    (lambda: fg.wire_bytes(TOP, jnp.ones(3, "float8_e4m3fn")), "float8_e4m3fn; cast"),
    (lambda: fg.compress(TOP, COMPLEX), "cast it"),
    (
        lambda: jax.vmap(lambda g: pmean().update(g, pmean().init(jnp.ones(3))), axis_name=AXIS)(
            jnp.ones((4, 3), "complex64")
        ),
        "cast it, or keep it out",
    ),
]


RING = fg.contrib.gossip.ring(4)
TAKE_ONE = {
    "multi_steps(tx)": lambda tx: fg.training.multi_steps(tx, 2),
    "beer(inner)": lambda tx: fg.contrib.gossip.beer(tx, TOP, RING, gamma=0.1),
    "choco_sgd(inner)": lambda tx: fg.contrib.gossip.choco_sgd(tx, TOP, RING, gamma=0.1),
    "diloco(inner)": lambda tx: fg.optimizers.diloco(tx, SGD, 4),
    "diloco(outer)": lambda tx: fg.optimizers.diloco(SGD, tx, 4),
    "init_state(tx)": lambda tx: fg.init_state(tx, jnp.ones(3), mesh_of(4), AXIS),
    "local_state(tx)": fg.training.local_state,
    "predict_step(tx)": lambda tx: fg.planning.predict_step(
        tx, jnp.ones(3), step=0.1, link="1gbit", axes={AXIS: 4}
    ),
    "scale_by_dion(others)": lambda tx: fg.methods.scale_by_dion(others=tx),
    "sharded(inner)": lambda tx: fg.optimizers.sharded(tx, 4),
    "time_exchange(tx)": lambda tx: fg.planning.time_exchange(tx, jnp.ones(3), {AXIS: 4}),
    "trainable(tx)": lambda tx: fg.trainable(tx, {"w": True}),
}
"""What takes a transformation of optax."""


@pytest.mark.parametrize("argument", TAKE_ONE)
def test_what_is_no_transformation_is_refused(argument):
    makers = [optax.sgd] if argument != "init_state(tx)" else []  # which takes functions, too
    for wrong in (0.1, fg.methods.top_k(), fg.TopK(k=1), fg.NoMemory(), *makers):
        with pytest.raises(TypeError) as error:
            TAKE_ONE[argument](wrong)
        assert f"{argument}: must be an optax transformation, got {wrong!r}; pass one such" in str(
            error.value
        )


@pytest.mark.parametrize(("make", "remedy"), MISTAKES, ids=[row[1] for row in MISTAKES])
def test_a_mistake_is_answered_with_the_remedy(make, remedy):
    with pytest.raises((TypeError, ValueError), match=remedy) as caught:
        make()
    first = str(caught.value)
    assert re.match(r"[\w.]+\([^;]*\): .*, got .*; .*\.", first, re.DOTALL), first


def on_an_axis(function):
    return jax.vmap(function, axis_name=AXIS)(jnp.ones((2, 8)))


PAIR, VOTES = fg.contrib.gossip.ring(2), fg.contrib.votes
OPTIMIZERS = fg.optimizers
KEYED = {
    "gather_parameters": lambda key: on_an_axis(
        lambda x: OPTIMIZERS.gather_parameters(x, AXIS, step=0, key=key)
    ),
    "compressed_pmean": lambda key: pmean(key=key),
    "sharded": lambda key: OPTIMIZERS.sharded(SGD, 2, key=key),
    "beer": lambda key: fg.contrib.gossip.beer(SGD, TOP, PAIR, gamma=0.4, key=key),
    "choco_sgd": lambda key: fg.contrib.gossip.choco_sgd(SGD, TOP, PAIR, gamma=0.4, key=key),
    "scale_by_datalens": lambda key: VOTES.scale_by_datalens(
        VOTES.TopVotes(2, k=3), beta=0.1, key=key
    ),
    "Step.of": fg.Step.of,
    "Autoencoder": lambda seed: fg.contrib.learned.Autoencoder(seed=seed),
}
"""What takes a key or a seed."""


@pytest.mark.parametrize("owner", KEYED)
def test_a_seed_that_draws_as_another_is_refused(owner):
    rule = r"\((key|seed)\): must be a seed from 0 to 2\*\*32 - 1.*got -?\d+; use key=0"
    for seed in (-1, 1 << 32, 1 << 40, 1 << 64, np.int64(1 << 40)):
        with pytest.raises(ValueError, match=f"^{owner}{rule}"):
            KEYED[owner](seed)


def test_any_integer_is_a_seed_and_the_largest_is_one_of_its_own():
    seeds = 3, np.int64(3), np.uint8(3), jnp.int32(3), np.array(3), 0, (1 << 32) - 1
    keys = [jax.random.key_data(fg.Step.of(seed).shared).tobytes() for seed in seeds]
    assert len({*keys[:5]}) == 1
    assert len({*keys}) == 3
