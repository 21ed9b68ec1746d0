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
from parallel import AXIS, everywhere, mesh_of, train_step

import fftgrad as fg

TOP = fg.TopK(fraction=0.1)
GATHER = fg.AllGather(TOP)
GRADS = {"w": jnp.arange(480.0).reshape(4, 12, 10) - 200.0}
COMPLEX = jnp.ones(3, "complex64")


def pmean(exchange=GATHER, memory=fg.NoMemory(), **kwargs):
    return fg.compressed_pmean(exchange, memory, **{"axis_name": AXIS} | kwargs)


def step(tx, made_by=None, **extra):
    """An update by `tx` with the state of another transformation."""
    made_by = made_by or tx
    return everywhere("vmap", lambda g: tx.update(g, made_by.init(g), **extra)[0], 4)(GRADS)


def sharded(tx, check_vma=True):
    like = {"w": jnp.zeros((12, 10))}
    init, update = train_step(tx, 4, check_vma=check_vma, like=like)
    return update(GRADS, init(like))


def accumulated_by_optax():
    """Everything right, but for MultiSteps."""
    return sharded(optax.MultiSteps(pmean(), 2))


def missing(some):
    """An update with some of the gradients that the state is for."""
    tx, grads = pmean(GATHER, FEEDBACK), {**GRADS, "b": jnp.ones((4, 7))}
    return jax.vmap(lambda g: tx.update(some(g), tx.init(g)), axis_name=AXIS)(grads)


@dataclasses.dataclass(frozen=True)
class Half(fg.Quantizer):
    """A codec of one's own, with a slip in one of its functions."""

    slip: str = ""

    def compress(self, x, state, step):
        payload = fg.Payload(x.astype(jnp.bfloat16))
        slips = {"payload": payload, "nothing": None, "array": fg.Compressed(payload.main)}
        return slips.get(self.slip, fg.Compressed(payload))

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


@pytest.mark.parametrize("caller", CALLERS)
def test_without_a_slip_it_runs(caller):
    x = jax.tree.leaves(by_exchanges(Half())[caller]())[0]
    assert jnp.isfinite(x).all()


FEEDBACK = fg.ErrorFeedback()
MOMENTUM = fg.MomentumCorrection()

MISTAKES = {
    # One kind of part where another is expected.
    "a codec as the exchange": (lambda: pmean(TOP), TypeError, r"AllGather\(codec\)"),
    "a share of the values as the exchange": (
        lambda: fg.optimizers.feedback_adam(0.1, 0.04), TypeError, r"_pmean\(exchange\): .*got 0"
    ),
    "more than all as the average's share": (
        lambda: fg.optimizers.feedback_sgd(0.1, nu=1.5), ValueError, r"feedback_sgd\(nu\).*use 0.5"
    ),
    "a lead that goes back": (
        lambda: fg.optimizers.feedback_muon(0.1, lead=-0.5), ValueError, r"_muon\(lead\).*use 0.5"
    ),
    "an average that never moves": (
        lambda: fg.optimizers.feedback_adam(0.1, b1=1.0), ValueError, r"_adam\(b1\).*use 0.9"
    ),
    "a codec as a rung": (
        lambda: fg.Ladder((TOP, fg.AllReduce())), TypeError, r"exchanges\[0\].*AllGather\(codec"
    ),
    "a codec as a stage of a schedule": (
        lambda: fg.Scheduled({0: TOP}), TypeError, r"AllGather\(codec\)"
    ),
    "a codec as the slow exchange": (
        lambda: fg.Hierarchical("fast", 2, TOP), TypeError, r"AllGather\(codec\)"
    ),
    "a codec as the memory": (lambda: pmean(GATHER, TOP), TypeError, r"use ErrorFeedback\(\)"),
    "an exchange as the codec": (
        lambda: fg.AllGather(fg.AllReduce()), TypeError, "an exchange already; pass its codec"
    ),
    "a list as the ladder": (
        lambda: fg.Ladder([GATHER, fg.AllReduce()]), ValueError, "must be a tuple of"
    ),
    "a method behind a fast axis": (
        lambda: fg.Hierarchical("fast", 2, fg.methods.top_k()), TypeError, r"take its \.exchange"
    ),
    "the part behind what it is for": (
        lambda: fg.wire_bytes(jnp.ones(3), TOP), TypeError, r"wire_bytes\(part, like\)"
    ),
    "a short name of a dtype": (
        lambda: fg.Cast("bf16"), TypeError, "got 'bf16'; use bfloat16"
    ),
    "a tile without values to send": (
        lambda: fg.methods.demo(k=0), ValueError, r"must be at least 1, got 0; use k=32"
    ),
    "an exchange in a chain": (lambda: fg.chain(TOP, fg.AllReduce()), TypeError, "TopK"),
    "an exchange in a rule": (lambda: fg.SmallDense(fg.AllReduce()), TypeError, "TopK"),
    "an exchange from a rule": (
        lambda: step(pmean(fg.AllGather(lambda *_: fg.AllReduce()))),
        TypeError,
        r"return a codec",
    ),
    "an exchange in compress": (lambda: fg.compress(GATHER, jnp.ones(3)), TypeError, "TopK"),
    "a memory in wire_bytes": (
        lambda: fg.wire_bytes(FEEDBACK, jnp.ones(3)),
        TypeError,
        "pass a codec, an exchange or a method",
    ),
    "swapped": (lambda: pmean(FEEDBACK, GATHER), TypeError, "the exchange comes first"),
    # A class in place of a value.
    "a class as the exchange": (lambda: pmean(fg.AllReduce), TypeError, r"AllReduce\(\.\.\.\)"),
    "a class as the codec": (lambda: fg.AllGather(fg.TopK), TypeError, r"TopK\(\.\.\.\)"),
    "a class as the memory": (
        lambda: pmean(GATHER, fg.ErrorFeedback), TypeError, r"ErrorFeedback\(\.\.\.\)"
    ),
    "a list in a chain": (lambda: fg.chain([TOP, fg.Sign()]), TypeError, r"chain\(\*codecs\)"),
    "a list in a schedule": (lambda: fg.Scheduled([fg.AllReduce()]), TypeError, "{0: AllReduce"),
    "a method in a schedule": (
        lambda: fg.Scheduled({0: fg.methods.top_k(0.1)}),
        TypeError,
        r"\.exchange here.*\.memory and \.bucketing beside",
    ),
    "an axis before the loss": (
        lambda: fg.value_and_grad(AXIS, jnp.sum),
        TypeError,
        r"value_and_grad\(loss, axis_name\)",
    ),
    "the laws of an exchange, for a method": (
        lambda: fg.testing.check_exchange(fg.methods.top_k(0.01)), TypeError, r"take its \.exchange"
    ),
    "a word for the key of a mean": (lambda: pmean(key="a"), TypeError, "pmean.*key=0"),
    "half a seed": (lambda: pmean(key=1.5), TypeError, "pmean.*key=0"),
    "weights": (lambda: step(pmean(), weights=1.0), TypeError, "weight=weights"),
    "whole numbers to compress": (
        lambda: fg.compress(TOP, jnp.arange(3)),
        TypeError,
        "out of what is differentiated",
    ),
    "k that is no whole number": (lambda: fg.TopK(k=2.0), TypeError, "Python number"),
    "a class in a chain": (lambda: fg.chain(fg.Fft, TOP), TypeError, r"Fft\(\.\.\.\)"),
    # Names of axes.
    "a list of axes": (lambda: pmean(axis_name=["data"]), TypeError, "use 'data'"),
    "a list of two axes": (
        lambda: pmean(axis_name=["slow", "fast"]), TypeError, r"or \('slow', 'fast'\)"
    ),
    # Names of policies.
    "another policy for what is not finite": (
        lambda: pmean(non_finite="zero"), ValueError, "use 'propagate'"
    ),
    "no axis": (lambda: pmean(axis_name=None), TypeError, "use 'data'"),
    "a list of fast axes": (
        lambda: fg.Hierarchical(["fast"], 2, fg.AllReduce()), TypeError, "use 'data'"
    ),
    "a list of axes of specs": (
        lambda: fg.state_specs(pmean().init(jnp.ones(3)), ["data"]), TypeError, "use 'data'"
    ),
    "an axis that is not bound": (
        lambda: jax.vmap(lambda g: pmean().update(g, pmean().init(g)), axis_name="batch")(GRADS),
        ValueError,
        "inside jax.shard_map",
    ),
    # States of others.
    "the state of another exchange": (
        lambda: step(pmean(GATHER), pmean(fg.PowerSgd(2))), ValueError, "start from fg.init_state"
    ),
    "the state of another rank": (
        lambda: step(pmean(fg.PowerSgd(2)), pmean(fg.PowerSgd(4))),
        ValueError,
        r"got arrays of other shapes; start from",
    ),
    "the state of another memory": (
        lambda: step(pmean(GATHER, FEEDBACK), pmean(GATHER, MOMENTUM)), ValueError, "start from"
    ),
    "the state of other buckets": (
        lambda: step(pmean(), pmean(bucketing=fg.Bucketing("model", bucket_bytes=100))),
        ValueError,
        "start from fg.init_state",
    ),
    "a gradient is missing": (
        lambda: missing(lambda grads: {"w": grads["w"]}), ValueError, "pass zeros for missing"
    ),
    "outside of the axis": (
        lambda: pmean().update(GRADS, pmean().init(GRADS)),
        ValueError,
        r"got no such axis; make the step by fg\.data_parallel, or call it inside jax\.shard_map",
    ),
    "a key that is no key": (lambda: step(pmean(key=0.5)), TypeError, r"got 0\.5; use key=0"),
    "a word for a key": (lambda: fg.Step.of("seed"), TypeError, r"got 'seed'; use key=0"),
    "a state without the error that is measured": (
        lambda: step(pmean(track_error=True), pmean()), ValueError, "start from"
    ),
    "the state of another optimizer": (
        lambda: step(pmean(), optax.adam(0.1)), TypeError, "must be a CompressedPmeanState"
    ),
    "no state in metrics": (
        lambda: fg.metrics(optax.adam(0.1).init(jnp.ones(3))), ValueError, "pass the optimizer's"
    ),
    "half of the bytes in metrics": (
        lambda: fg.metrics(pmean().init(jnp.ones(3)), exchange=GATHER), ValueError, "pass both"
    ),
    "metrics of a codec": (
        lambda: fg.metrics(pmean().init(jnp.ones(3)), exchange=fg.Sign(), params=jnp.ones(3)),
        TypeError,
        r"metrics\(exchange\): must be .*; wrap a codec",
    ),
    # Compositions that do not work.
    "no memory of a method": (
        lambda: pmean(fg.methods.top_k(0.01), 0), TypeError, "use ErrorFeedback",
    ),
    "a text for a bucketing": (
        lambda: pmean(fg.methods.top_k(0.01), bucketing=""), TypeError, r"use Bucketing\('leaf'\)",
    ),
    "a weight of votes": (
        lambda: step(fg.methods.scale_by_majority_vote(), weight=3),
        ValueError,
        "leave it out, or use a",
    ),
    "a weight of several gradients": (
        lambda: step(fg.multi_steps(pmean(), 2), weight=3), ValueError, "has_weight=True"
    ),
    "a leaf frozen by optax": (
        lambda: step(optax.masked(pmean(fg.methods.sign_sgd()), {"w": False})),
        ValueError,
        r"use fg\.trainable\(tx, mask\)",
    ),
    "names in place of bools": (
        lambda: step(fg.trainable(pmean(), {"w": "lora"})), TypeError, "a tree of bools, or a"
    ),
    "shards of an optimizer of whole trees": (
        lambda: fg.optimizers.sharded(optax.polyak_sgd(), workers=4).init(jnp.ones(8)),
        ValueError,
        r"sharded\(inner\): .*use optax\.adamw",
    ),
    "MultiSteps": (accumulated_by_optax, ValueError, r"use.*fg\.multi_steps in place of optax"),
    "a sum of sparse payloads": (
        lambda: fg.AllReduce(TOP), ValueError, r"use AllGather\(TopK\(fraction=0\.1\)\)"
    ),
    "a sum of narrow values": (
        lambda: fg.AllReduce(fg.Cast("bfloat16")),
        ValueError,
        r"use TwoStage\(Cast\(dtype='bfloat16'\), workers=w\)",
    ),
    # Counts that are none.
    "half a step of delay": (
        lambda: fg.optimizers.diloco(optax.sgd(0.1), optax.sgd(1.0), 4, overlap_steps=2.5),
        TypeError,
        r"diloco\(overlap_steps\): must be a whole number, got 2\.5",
    ),
    "half a level": (
        lambda: fg.QuantizedAllReduce(4, levels=1.5), TypeError, r"\(levels\): must be a whole"
    ),
    "one value as a share": (lambda: fg.TopK(1), TypeError, r"use TopK\(k=1\), or fraction=1\.0"),
    "bits as a float": (lambda: fg.LogQuantizer(bits=4.0), TypeError, "a whole number, got 4.0"),
    "a block as a float": (lambda: fg.Dct(block=64.0), TypeError, "a whole number, got 64.0"),
    "workers as a float": (lambda: fg.TwoStage(fg.Sign(), 4.0), TypeError, "a whole number"),
    "a rule for no leaf": (
        lambda: fg.SmallDense(TOP, max_ndim=-1), ValueError, r"SmallDense\(max_ndim\): must be"
    ),
    "a method that is not called": (
        lambda: pmean(fg.methods.top_k), TypeError, r"call it, as top_k\(\.\.\.\)"
    ),
    "shards for half a worker": (
        lambda: fg.optimizers.sharded(optax.sgd(0.1), 4.0, axis_name=AXIS), TypeError, "whole"
    ),
    "a decay in quotes": (lambda: fg.ErrorFeedback("0.9"), TypeError, "must be a number, got"),
    # Arrays that cannot be sent.
    "complex in wire_bytes": (
        lambda: fg.wire_bytes(TOP, COMPLEX), TypeError, r"got complex64; cast it"
    ),
    "complex in a tree": (
        lambda: fg.wire_bytes(GATHER, {"a": jnp.ones(3), "b": COMPLEX}), TypeError, r"like\['b'\]"
    ),
    "float8 in wire_bytes": (
        lambda: fg.wire_bytes(TOP, jnp.ones(3, "float8_e4m3fn")), TypeError, "float8_e4m3fn; cast"
    ),
    "complex in compress": (lambda: fg.compress(TOP, COMPLEX), TypeError, "cast it"),
    "complex gradients": (
        lambda: jax.vmap(lambda g: pmean().update(g, pmean().init(jnp.ones(3))), axis_name=AXIS)(
            jnp.ones((4, 3), "complex64")
        ),
        TypeError,
        "cast it, or keep it out",
    ),
}  # fmt: skip


SGD = optax.sgd(0.1)
RING = fg.contrib.gossip.ring(4)
TAKE_ONE = {
    "multi_steps(tx)": lambda tx: fg.multi_steps(tx, 2),
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


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_with_the_remedy(name):
    make, error, remedy = MISTAKES[name]
    with pytest.raises(error, match=remedy) as caught:
        make()
    first = str(caught.value)
    assert re.match(r"[\w.]+\([^;]*\): .*, got .*; .*\.", first, re.DOTALL), first


@pytest.mark.parametrize(
    "swap",
    [
        lambda model: fg.wire_bytes(model, GATHER),
        lambda model: fg.init_state(model, pmean(), mesh_of(1), AXIS),
        lambda model: fg.link_bytes(GATHER, 8, model),
    ],
    ids=["wire_bytes", "init_state", "link_bytes"],
)
def test_a_whole_model_does_not_hide_the_remedy(swap):
    model = {f"layer {i}": {"w": np.ones((8, 8), np.float32)} for i in range(100)}
    with pytest.raises(TypeError) as error:
        swap(model)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


def keyed(owner, key):
    """A call of each function that takes a key."""
    gossip, x = fg.contrib.gossip, jnp.ones((2, 8))
    collectives = fg.optimizers.compressed_psum_scatter, fg.optimizers.compressed_all_gather
    arrays = {one.__name__: one for one in collectives} | {
        "gather_parameters": lambda x, axis, key: fg.optimizers.gather_parameters(
            x, axis, step=0, key=key
        )
    }
    if owner in arrays:
        return jax.vmap(lambda x: arrays[owner](x, AXIS, key=key), axis_name=AXIS)(x)
    inner, votes = optax.sgd(0.1), fg.contrib.votes
    return {
        "compressed_pmean": lambda: pmean(key=key),
        "sharded": lambda: fg.optimizers.sharded(inner, 2, key=key),
        "beer": lambda: gossip.beer(inner, TOP, gossip.ring(2), gamma=0.4, key=key),
        "choco_sgd": lambda: gossip.choco_sgd(inner, TOP, gossip.ring(2), gamma=0.4, key=key),
        "scale_by_datalens": lambda: votes.scale_by_datalens(
            votes.TopVotes(2, k=3), beta=0.1, key=key
        ),
        "Step.of": lambda: fg.Step.of(key),
        "Autoencoder": lambda: fg.contrib.learned.Autoencoder(seed=key),
    }[owner]()


KEYED = [
    "compressed_psum_scatter", "compressed_all_gather", "gather_parameters", "compressed_pmean",
    "sharded", "beer", "choco_sgd", "scale_by_datalens", "Step.of", "Autoencoder",
]  # fmt: skip


@pytest.mark.parametrize("seed", [-1, 1 << 32, 1 << 40, 1 << 64, np.int64(1 << 40)], ids=repr)
@pytest.mark.parametrize("owner", KEYED)
def test_a_seed_that_draws_as_another_is_refused(owner, seed):
    rule = r"\((key|seed)\): must be a seed from 0 to 2\*\*32 - 1.*got -?\d+; use key=0"
    with pytest.raises(ValueError, match=f"^{owner}{rule}"):
        keyed(owner, seed)


@pytest.mark.parametrize(
    "keys",
    [
        jax.random.split(jax.random.key(0), 2),
        jax.random.key_data(jax.random.split(jax.random.key(0), 2)),
        np.arange(2),
        jnp.zeros(3, jnp.uint32),
    ],
    ids=["typed", "raw", "seeds", "longer"],
)
@pytest.mark.parametrize("owner", KEYED[:-1])
def test_a_batch_of_keys_is_refused(owner, keys):
    rule = r"\(key\): must be one seed or one PRNG key, got an array of .* of shape .*; pass one of"
    with pytest.raises(ValueError, match=f"^{owner}{rule}"):
        keyed(owner, keys)


def test_the_largest_seed_is_one_of_its_own():
    largest = jax.random.key_data(fg.Step.of((1 << 32) - 1).shared)
    assert not np.array_equal(largest, jax.random.key_data(fg.Step.of(0).shared))


@pytest.mark.parametrize("seed", [np.int64(3), np.uint8(3), jnp.int32(3), np.array(3)], ids=repr)
def test_any_integer_is_a_seed(seed):
    same = [jax.random.key_data(fg.Step.of(s).shared) for s in (3, seed)]
    np.testing.assert_array_equal(*same)


def test_the_rank_that_is_sent_is_that_of_wire_bytes():
    """A state of rank 4 would have sent rank 4, whatever `wire_bytes` says of rank 2."""
    tx = pmean(fg.PowerSgd(2))
    update = everywhere("shard_map", lambda g: tx.update(g, tx.init(g))[0], 4)
    found = fg.audit(update.lower(GRADS).compile())
    like = {"w": jax.ShapeDtypeStruct((12, 10), "float32")}
    assert sum(c.bytes for c in found) == fg.wire_bytes(fg.PowerSgd(2), like)


def test_what_is_advised_in_place_of_a_sum_of_narrow_values_sends_less_than_dense():
    workers, n = 16, 10_000
    like = jax.ShapeDtypeStruct((n,), "float32")
    dense = 2 * (workers - 1) / workers * fg.wire_bytes(fg.AllReduce(), like)
    narrow = fg.Cast("bfloat16")
    gathered = (workers - 1) * fg.wire_bytes(fg.AllGather(narrow), like)
    two = fg.wire_bytes(fg.TwoStage(narrow, workers=workers), like)
    per_buffer = two / (workers + 1)
    advised = 2 * (workers - 1) * per_buffer
    assert gathered > 3 * dense
    assert advised < 0.51 * dense


def test_optax_accumulation_has_a_counterpart():
    updates, _ = sharded(fg.multi_steps(pmean(), every=1))
    assert np.any(np.asarray(updates["w"]))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    "exchange", [GATHER, fg.AllReduce(), fg.PowerSgd(2), fg.AcpSgd(2)], ids=repr
)
def test_one_worker_is_no_mistake(exchange, check_vma):
    """The mean is what it would have sent; compressing costs values and saves nothing."""
    tx = pmean(exchange, FEEDBACK)
    one = {"w": GRADS["w"][:1]}
    init, update = train_step(tx, 1, check_vma=check_vma, like={"w": jnp.zeros((12, 10))})
    mean, state = update(one, init({"w": jnp.zeros((12, 10))}))
    residual = state.memory.worker_rows.residual["w"][0]
    np.testing.assert_allclose(mean["w"] + residual, one["w"][0], rtol=1e-5, atol=1e-3)
    assert mesh_of(1).size == 1
