"""Configurations are values: of Python numbers, and whole after a copy and a pickle."""

import copy
import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import CODECS, EXCHANGES, HIERARCHIES, MEMORIES, RECIPES

import fftgrad as fg
from fftgrad.contrib import learned, votes
from fftgrad.islands import Settings
from fftgrad.ops import _wire

LIKE = jax.ShapeDtypeStruct((200,), jnp.float32)
F, I, B = np.float64, np.int64, np.bool_
METHODS = RECIPES | {
    "demo": fg.methods.demo(),
    "dgc": fg.methods.dgc(warm_up_steps=40),
    "top_k": fg.methods.top_k(0.01),
}


@dataclasses.dataclass(frozen=True)
class Own(fg.codecs.Quantizer):
    """A codec of one's own."""

    scale: float = 1.0
    levels: tuple[int, ...] = ()

    def compress(self, x, state, step):
        return fg.codecs.Compressed(fg.codecs.Payload(x * self.scale))

    def decompress(self, payload, like, step):
        return payload.main / self.scale


def by_size(_, like):
    return fg.TopK(k=3) if like.size > 9 else fg.codecs.Identity()


def prefix(path, _):
    return path.partition("/")[0]


POLICIES = {
    "named": by_size,
    "own": Own(2.0, (1, 2)),
}
VALUES = {
    **{f"codec {name}": codec for name, codec in CODECS.items()},
    **{f"memory {name}": memory for name, memory in MEMORIES.items()},
    **{f"exchange {name}": exchange for name, exchange in (EXCHANGES | HIERARCHIES).items()},
    **{f"method {name}": method for name, method in METHODS.items()},
    **{f"policy {name}": fg.AllGather(policy) for name, policy in POLICIES.items()},
    "bucketing": fg.Bucketing("leaf", bucket_bytes=400),
    "named bucketing": fg.Bucketing(prefix),
    "settings": Settings(fg.AllGather(fg.Budget(ratio=50)), sync_every=7),
    "link": fg.planning.Link("1gbit", shares=(("all-to-all", 0.5),)),
    "candidate": fg.planning.Candidate(
        "top-k", METHODS["top_k"], optimizer=fg.optimizers.feedback_adam
    ),
}
ROOMS = (learned, votes, fg.exchanges, fg.memories, fg.codecs, fg)
NAMES = {name: value for room in ROOMS for name, value in vars(room).items()}
NAMES |= {"SGD": optax.sgd(0.1), "TARGET": np.ones((5, 5), np.float32)}


@pytest.mark.parametrize("name", VALUES)
def test_a_copy_is_equal_and_a_part_is_what_its_repr_makes(name):
    value = VALUES[name]
    made = [copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))]
    if name.split()[0] in ("codec", "memory", "exchange"):
        made.append(eval(repr(value), NAMES))
    for one in made:
        assert one == value
        assert hash(one) == hash(value)
        assert repr(one) == repr(value)


def test_every_method_is_copied():
    made = {name for name in fg.methods.__all__ if not name.startswith("scale_by_")}
    schedules = {"diminishing_theta", "recover_by_loss"}
    assert {name.split()[0] for name in METHODS} - {"lgc"} == made - schedules


EQUAL = [
    (fg.Budget(ratio=10.0), fg.Budget(ratio=10)),
    (fg.TopK(fraction=jnp.bfloat16(0.5)), fg.TopK(fraction=0.5)),
    (fg.Hadamard(block=64, signs=0), fg.Hadamard(block=64, signs=False)),
    (fg.Dct(block=4, shape=(I(10), 11)), fg.Dct(block=4, shape=(10, 11))),
    (fg.UniformQuantizer(norm=np.str_("max")), fg.UniformQuantizer(norm="max")),
    (Own(F(2.0), (I(1), 2)), Own(2.0, (1, 2))),
    (Own(-0.0), Own(0.0)),
    (fg.chain(fg.Fft(16), Own(F(2.0))), fg.chain(fg.Fft(16), Own(2))),
    (
        fg.Scheduled({I(0): fg.AllReduce(), I(9): fg.AllGather(Own(F(2.0)))}),
        fg.Scheduled({0: fg.AllReduce(), 9: fg.AllGather(Own(2.0))}),
    ),
    (votes.TopVotes(I(4), k=I(3), sigma=1), votes.TopVotes(4, k=3, sigma=1.0)),
    (
        Settings(fg.AllGather(Own(F(2.0))), sync_every=I(3), rate=1, limit=np.float32(2.0)),
        Settings(fg.AllGather(Own(2.0)), sync_every=3, rate=1.0, limit=2.0),
    ),
    (
        fg.planning.Link(np.float32(1e8), F(0.5), (("all-to-all", F(0.5)),)),
        fg.planning.Link(1e8, 0.5, (("all-to-all", 0.5),)),
    ),
]


def test_equal_values_print_alike_and_equal_codecs_have_one_configuration_number():
    for one, other in EQUAL:
        assert one == other
        assert hash(one) == hash(other)
        if not isinstance(one, Own):  # its repr is that of any dataclass
            assert repr(one) == repr(other)
            assert "np." not in repr(one)
        if isinstance(one, fg.codecs.Codec):
            numbers = (_wire.configuration(codec, LIKE) for codec in (one, other))
            assert len(set(numbers)) == 1, one


REFUSED = """
chain(TopK)
Fft(block=48)
TopK(fraction=0.1, k=2)
TopK(fraction=85)
TopK(k=0)
TopK(k=True)
Cast("float32")
RangeFloat(bits=1)
RangeFloat(bits=8, mantissa=9)
RangeFloat(bits=8, rounding="up")
RangeFloat(8, limits=(-1.0, 0.0))
RangeFloat(4, limits=(-1e-9, 1.0))
chain(RangeFloat(8), TopK(k=1))
Budget(ratio=0.5)
chain(Budget(ratio=9), Sign())
Threshold(0.1, search="exact", reuse=2)
Ternary(clip=float("inf"))
LeaderTopK(Budget(ratio=9))
Scheduled({})
Scheduled({3: AllReduce()})
Scheduled({-1: AllReduce(), 0: AllReduce()})
PowerSgd(0)
AcpSgd(0)
Eigenbasis(PowerSgd(2))
Eigenbasis(AllReduce(), decay=1.0)
Eigenbasis(AllReduce(), every=0)
Bucketing("layer")
Bucketing(bucket_bytes=2)
Bucketing(bucket_bytes=25e6)
Bucketing(bucket_bytes="25MB")
compressed_pmean(AllReduce(), axis_name="a", bucketing="leaf")
methods.fft_sparsification(theta=15)
methods.fft_sparsification(theta_schedule={}, recover=(0.5,))
methods.diminishing_theta(0.1, 0.0, 5)
methods.recover_by_loss(compressed_pmean(AllReduce(), axis_name="a"), 0.0)
methods.scale_by_one_bit_adam(0, 4)
methods.terngrad(dense=("x",), workers=4)
methods.scale_by_dion(decay=1.0)
training.clip_by_local_norm(0.0)
optimizers.diloco(SGD, SGD, 0)
optimizers.diloco(SGD, SGD, 6, fragments=4)
optimizers.diloco(SGD, SGD, 6, fragments=0)
optimizers.diloco(SGD, SGD, 6, overlap_steps=6)
optimizers.diloco(SGD, SGD, 6, overlap_steps=-1)
optimizers.diloco(SGD, SGD, 6, mixing=1.0)
optimizers.diloco(SGD, SGD, 6, mixing=-0.1)
optimizers.sparse_loco(SGD, block=48)
optimizers.sparse_loco(SGD, k=0)
optimizers.sparse_loco(SGD, bits=8).init([TARGET])
"""


@pytest.mark.parametrize("call", REFUSED.strip().splitlines())
def test_an_argument_that_makes_no_sense_is_refused_with_a_remedy(call):
    with pytest.raises((TypeError, ValueError), match=r"(?s)^[\w.]+\(.*: .*; .*\.$"):
        eval(call, NAMES)


def test_what_is_given_stays_as_it_is():
    """A part of one's own without numbers of NumPy is not copied, and none is changed in place."""
    whole, numbers = Own(2.0, (1, 2)), Own(F(2.0))
    assert fg.AllGather(whole).codec is whole
    assert fg.AllGather(numbers).codec is not numbers
    assert type(numbers.scale) is F


def test_one_as_a_share_is_refused_as_an_int_of_any_kind():
    for one in (1, I(1), jnp.int32(1)):
        with pytest.raises(TypeError, match=r"use TopK\(k=1\), or fraction=1\.0"):
            fg.TopK(fraction=one)


@pytest.mark.parametrize("number", [F(2.0), jnp.float32(2.0), B(True)], ids=repr)
def test_a_count_is_no_float_and_no_bool(number):
    with pytest.raises(TypeError, match=r"whole number|Python number"):
        fg.TopK(k=number)
    with pytest.raises(TypeError, match="whole number"):
        fg.Dct(block=number)


def test_a_traced_number_is_refused():
    with pytest.raises(TypeError, match=r"must be a Python number.*use Scheduled"):
        jax.jit(lambda share: fg.compress(fg.TopK(fraction=share), jnp.ones(9)))(0.5)
    with pytest.raises(TypeError, match=r"a whole number, got .*Tracer"):
        jax.jit(lambda block: fg.compress(fg.Fft(block=block), jnp.ones(9)))(4)


def test_numbers_of_numpy_are_in_the_code_of_a_plan():
    optimizer = functools.partial(fg.optimizers.feedback_adam, lead=np.float32(0.5))
    row = fg.planning.Candidate("row", fg.methods.top_k(F(0.5)), optimizer=optimizer, steps=2)
    assert "np." not in row.code("data")
    assert "lead=0.5" in row.code("data")
    assert type(row.steps) is float
