"""The public checks pass for the library's own parts, and name the law that a broken one breaks."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import EXCHANGES, HIERARCHIES, MEMORIES, TILED, sample
from jax import lax
from parallel import mesh_of, zeros

import fftgrad as fg
from fftgrad import testing
from fftgrad.contrib import learned

frozen = dataclasses.dataclass(frozen=True)


def unseen(default):
    """A function of a part, which its repr leaves out: it has an address."""
    return dataclasses.field(default=default, repr=False)


LIKE = jax.ShapeDtypeStruct((150,), jnp.float32)
FULL = pytest.mark.full
ALIKE = {"a": LIKE, "b": LIKE}
"""Leaves of one shape share the programs of single operations."""


@pytest.mark.parametrize("codec", [TILED[10, 11], fg.Dct(block=4, shape=(10, 11))])
def test_a_codec_of_one_shape_passes(codec):
    testing.check_codec(codec, sizes=(110,), eager=False)


NARROW = "narrow feedback"  # which rounds by chance: 45 programs


@pytest.mark.parametrize(
    "name",
    [
        *sample([name for name in MEMORIES if name != NARROW], always=["feedback"]),
        pytest.param(NARROW, marks=FULL),
    ],
)
def test_memories_of_the_library_pass(name):
    testing.check_memory(MEMORIES[name], ALIKE, telescopes=name == "feedback")


@pytest.mark.parametrize("name", sample(EXCHANGES))
def test_exchanges_of_the_library_pass(name):
    exchange = EXCHANGES[name]
    untrained = isinstance(exchange, learned.LearnedCodes) and exchange.until == 0
    like = {"b": np.zeros(37, np.float32), "w": np.zeros((12, 10), np.float32)}
    testing.check_exchange(exchange, like, max_error=math.inf if untrained else 1.5)


def test_an_exchange_of_two_axes_passes():
    mesh = jax.make_mesh((2, 4), ("slow", "fast"))
    testing.check_exchange(HIERARCHIES["slow all-reduce"], LIKE, mesh=mesh)


# Parts that functions make. Each of those below is one that is right, wrong in one way.


def claims(name):
    return property(lambda self: name in self.claimed)


def put(main, *more):
    """A message without a state."""
    return fg.codecs.Compressed(fg.codecs.Payload(main, *more))


def float16(x):
    return put(jnp.clip(x + jnp.sum(x - x), -6e4, 6e4).astype(jnp.float16))


def poisoned(x, of):
    return x + fg.codecs.poison(of)


def without_small(x):
    return poisoned(jnp.where(jnp.abs(x) < jnp.max(jnp.abs(x)) / 20, 0.0, x), x)


@frozen
class Made(fg.codecs.Quantizer):
    """float16, if nothing else is said."""

    name: str
    send: Callable = unseen(lambda x, *_: float16(x))
    read: Callable = unseen(lambda payload, like, _: payload.main.astype(like.dtype))
    claimed: str = "last"
    start: Callable = unseen(lambda _like: ())
    last = claims("last")
    summable = claims("summable")
    unbiased = claims("unbiased")

    def init(self, like):
        return self.start(like)

    def compress(self, x, state, step):
        return self.send(x, state, step)

    def decompress(self, payload, like, step):
        return self.read(payload, like, step)


def changed(name, change, claimed="last"):
    """All values as they are, but for what is done to them."""
    return Made(name, lambda x, *_: put(change(x)), claimed=claimed)


@frozen
class Chosen(fg.codecs.Selector):
    """The first half of the values, and a flag for the rest."""

    name: str
    send: Any = unseen(None)
    places: Any = unseen(None)

    def compress(self, x, state, step):
        return put(poisoned(x[: (x.size + 1) // 2], x)) if self.send is None else self.send(x)

    def positions(self, side, n, step):
        first = jnp.arange((n + 1) // 2, dtype=jnp.int32)
        return first if self.places is None else self.places(first, side)


@frozen
class Doubled(Chosen):
    """What sums see is another value."""

    def sparse(self, payload, like, step):
        return fg.codecs.Sparse(self.positions((), like.size, step), 2 * payload.main)


@frozen
class Basis(fg.codecs.Transform):
    name: str

    def compress(self, x, state, step):
        return put(x)

    def decompress(self, payload, like, step):
        return without_small(payload.main)


@dataclasses.dataclass(unsafe_hash=True)
class Mutable(fg.codecs.Quantizer):
    compress = Made.compress
    decompress = Made.decompress


def dithered(x, _, step):
    return float16(x + jax.random.uniform(step.local, x.shape))


def without_dither(payload, like, step):
    return payload.main.astype(jnp.float32) - jax.random.uniform(step.local, like.shape)


def eighths(x):
    """Eight positions, sent in 8 bits."""
    places = jnp.arange(8) * (x.size // 8)
    return put(poisoned(x[places], x), places.astype(jnp.uint8))


def by_maximum(x, _, _step):
    """Levels of the largest magnitude, in which a maximum is the only witness."""
    unit = jnp.maximum(jnp.max(jnp.abs(x)), jnp.finfo(jnp.float32).tiny) / 100
    return put(jnp.nan_to_num(x / unit).astype(jnp.int8), unit)


def times_side(payload, _like, _step):
    return payload.main.astype(jnp.float32) * payload.side


WRAPPING = Chosen("wrapping", eighths, lambda _, side: side.astype(jnp.int32))
BY_MAXIMUM = Made("by maximum", by_maximum, times_side)
SIGNS = changed("signs", lambda x: poisoned(jnp.sign(x), x))
HIDING = fg.RangeFloat(bits=8, mantissa=3, limits=(-2.0, 2.0))

BROKEN_CODECS = [
    (Mutable(), "value", "frozen=True"),
    (Made("shape", read=lambda p, like, _: p.main.astype(like.dtype)[None]), "shapes", "`like`"),
    (Made("branches", lambda x, *_: float16(x if x[0] > 0 else -x)), "shapes", "no Python `if`"),
    (
        Made(
            "growing state",
            lambda x, state, _: float16(x)._replace(state=jnp.concatenate([state, state])),
            start=lambda _like: jnp.zeros(1),
        ),
        "shapes",
        "that init makes",
    ),
    (
        Made("impure", lambda x, *_: float16(x + np.random.default_rng().random())),
        "jit",
        "the step's keys",
    ),
    (Made("local dither", dithered, without_dither), "receiver", "step.shared"),
    (
        Made(
            "zeros over zeros",
            lambda x, *_: put(x / jnp.max(jnp.abs(x)), jnp.mean(jnp.abs(x))),
            times_side,
        ),
        "finite",
        "that may be zero",
    ),
    (
        Made(
            "booleans",
            lambda x, *_: put(x > 0, jnp.mean(jnp.abs(x))),
            lambda payload, *_: jnp.where(payload.main, payload.side, -payload.side),
        ),
        "bytes",
        "pack narrower ones",
    ),
    (HIDING, "not hidden", "poison"),
    (Doubled("sparse"), "sparse", "leave `sparse` out"),
    (
        Made(
            "8 bits, which wrap in a sum",
            lambda x, *_: put(
                jnp.round(jnp.clip(x * 16, -127, 127)).astype(jnp.int8), jnp.sum(x - x)
            ),
            lambda payload, *_: payload.main / jnp.float32(16) + payload.side,
            "last summable",
        ),
        "summable",
        "do not claim",
    ),
    (Chosen("descending", None, lambda first, _: first[::-1]), "positions", "sort the positions"),
    (
        Made("first step only", lambda x, _, s: float16(jnp.where(s.number == 0, x, 0))),
        "not hidden",
        "poison",
    ),
    (changed("dead zone", without_small, "last unbiased"), "unbiased", "do not claim"),
    (changed("shrinks", lambda x: 0.99 * x, "last unbiased"), "unbiased", "do not claim"),
    (changed("flips", jnp.negative), "fidelity", "look at its signs"),
    (
        Made("offset", lambda x, *_: put(x), lambda p, *_: p.main + 1e-3, "last summable"),
        "fidelity",
        "zeros to about zero",
    ),
    (Basis("dead zone"), "transform", "fg.codecs.Codec"),
]


def named(value):
    """The id of a row: the name of the part."""
    return getattr(value, "name", type(value).__name__).replace(" ", "_")


@pytest.mark.parametrize(("codec", "law", "remedy"), BROKEN_CODECS, ids=named)
def test_a_broken_codec_is_caught_by_its_law(codec, law, remedy):
    with pytest.raises(AssertionError, match=rf"check_codec\(.*law '{law}'.*, got .*; .*{remedy}"):
        testing.check_codec(codec, sizes=(90,), eager=law == "jit")


def test_an_answer_with_a_size_of_its_own_passes_where_that_is_said():
    testing.check_codec(SIGNS, sizes=(90,), max_error=math.inf)
    with pytest.raises(AssertionError, match=r"law 'fidelity'.* for tiny values.*math\.inf"):
        testing.check_codec(SIGNS, sizes=(90,))


@pytest.mark.parametrize(
    ("codec", "error", "size"), [(BY_MAXIMUM, "not hidden", 65_537), (WRAPPING, "positions", 5_000)]
)
def test_what_only_large_vectors_hide_is_caught_at_the_default_sizes(codec, error, size):
    testing.check_codec(codec, sizes=(90,), eager=False)
    with pytest.raises(AssertionError, match=rf"law '{error}'.*{size}"):
        testing.check_codec(codec, sizes=(size,), eager=False)
    assert size in testing._codec.SIZES


# Exchanges.


@frozen
class Dense(fg.exchanges.Exchange):
    """The mean, but for what is done to what goes in, or to what comes out."""

    name: str = "dense"
    into: Callable = unseen(lambda a, _comm: a)
    out: Callable = unseen(lambda reduced, _comm: reduced)
    share: float = 1.0

    def mean(self, x, state, comm):
        changed = jax.tree.map(lambda a: self.into(a, comm), x)
        mean = jax.tree.map(lambda a: lax.pmean(a, comm.axis_name), changed)
        error = jax.tree.map(jnp.subtract, x, changed)
        return self.out(fg.exchanges.Averaged(mean, error, state), comm)

    def wire_bytes(self, like):
        return int(self.share * 4 * sum(leaf.size for leaf in jax.tree.leaves(like)))


def with_mean(change):
    """The mean, changed leaf by leaf."""
    return lambda reduced, comm: reduced._replace(
        mean=jax.tree.map(lambda a: change(a, comm), reduced.mean)
    )


def own(comm, first=0):
    """Something else on each worker, from that step on."""
    draw = 1e-6 * jax.random.uniform(comm.step.local)
    return jnp.where(comm.step.number < first, 0, draw)


def twice_under_vmap(reduced, comm):
    varies = jax.typeof(jax.tree.leaves(reduced.error)[0]).manual_axis_type.varying
    return reduced if varies else with_mean(lambda a, _: 2 * a)(reduced, comm)


def flattens(reduced, _comm):
    return reduced._replace(error=jax.tree.map(lambda a: a[:1], reduced.error))


def first_only(right, later):
    """Something else after the first step."""
    return lambda a, comm: jnp.where(comm.step.number == 0, right(a), later(a))


BROKEN_EXCHANGES = [
    (
        Dense("drifts later", out=with_mean(lambda a, comm: a + own(comm, 1))),
        "replicas",
        "in the order of the workers",
    ),
    (Dense("hides later", first_only(jnp.asarray, jnp.nan_to_num)), "not hidden", "stats.poison"),
    (
        Dense("other later", out=with_mean(first_only(lambda a: a, lambda a: 0.9 * a))),
        "mean",
        "x minus the sent values",
    ),
    (Dense("zeros later", first_only(lambda a: a, lambda a: 0.0 * a)), "fidelity", "some values"),
    (Dense("triple", lambda a, _: 3 * a), "fidelity", "divide by the workers"),
    (Dense("lies", share=0.5), "bytes", "correct wire_bytes"),
    (Dense("flattens", out=flattens), "shapes", "reshape"),
    (Dense("forgets", out=lambda got, _: got._replace(error=None)), "mean", "x minus the sent"),
    (Dense("no vmap", out=twice_under_vmap), "vmap", "jax.lax"),
    (fg.TwoStage(fg.Sign(), workers=3), "shapes", "collectives of `comm`"),
]


@pytest.mark.parametrize(("exchange", "law", "remedy"), BROKEN_EXCHANGES, ids=named)
def test_a_broken_exchange_is_caught_by_its_law(exchange, law, remedy):
    rule = rf"check_exchange\(.*law '{law}'.*, got .*; .*{remedy}"
    with pytest.raises(AssertionError, match=rule):
        testing.check_exchange(exchange, LIKE)


def test_the_unbroken_ones_pass():
    testing.check_codec(Made("half"), (90,), eager=False)
    testing.check_codec(Chosen("half"), (90,), eager=False)
    testing.check_exchange(Dense(), LIKE, mesh=mesh_of(2))
    testing.check_memory(Kept("kept"), ALIKE, telescopes=True)


# Memories.


@frozen
class Kept(fg.memories.Memory):
    """What is left, and what is put back."""

    name: str
    start: Callable = unseen(zeros)
    plus: Callable = unseen(lambda grad, state: jax.tree.map(jnp.add, grad, state))
    keep: Callable = unseen(lambda left, _state: left)
    back: Callable = unseen(lambda state, lost: jax.tree.map(jnp.add, state, lost))

    def init(self, like):
        return self.start(like)

    def add(self, grad, state):
        return self.plus(grad, state), state

    def update(self, x, error, mean, state):
        return self.keep(error, state)

    def restore(self, lost, state):
        return self.back(state, lost)


def narrow(tree, *_):
    return jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)


def leaves(change):
    """What a memory adds up, changed leaf by leaf."""
    return lambda grad, state: jax.tree.map(lambda g, e: change(g + e, e), grad, state)


def across(grad, state):
    total = sum(map(jnp.sum, jax.tree.leaves(grad)))
    return jax.tree.map(lambda g, e: g + e + total, grad, state)


def clips_later(x, e):
    return jnp.where(jnp.any(e != 0), jnp.nan_to_num(x), x)


FORGETFUL = Kept(
    "forgets later",
    lambda like: (zeros(like), jnp.zeros((), jnp.int32)),
    lambda grad, state: jax.tree.map(jnp.add, grad, state[0]),
    lambda left, state: (jax.tree.map(lambda a: a * (state[1] != 5), left), state[1] + 1),
    lambda state, lost: (jax.tree.map(jnp.add, state[0], lost), state[1]),
)

BROKEN_MEMORIES = [
    (Kept("against", plus=leaves(lambda x, e: 2 * e - x)), "fidelity", "look at its signs"),
    (Kept("clips later", plus=leaves(clips_later)), "not hidden", "replace no NaN"),
    (FORGETFUL, "telescopes", "keep x - sent"),
    (Kept("narrow", keep=narrow, back=lambda state, _: state), "shapes", "that init makes"),
    (Kept("across leaves", plus=across), "leaf by leaf", "jax.tree.map"),
    (
        Kept("normalizes", plus=leaves(lambda x, _: x / jnp.sqrt(jnp.sum(x * x)))),
        "finite",
        "that may be zero",
    ),
    (
        Kept("puts nothing back", back=lambda state, _lost: state),
        "telescopes",
        "what restore is given",
    ),
    (fg.NoMemory(), "telescopes", "keep x - sent"),
]


@pytest.mark.parametrize(("memory", "law", "remedy"), BROKEN_MEMORIES, ids=named)
def test_a_broken_memory_is_caught_by_its_law(memory, law, remedy):
    with pytest.raises(AssertionError, match=rf"check_memory\(.*law '{law}'.*, got .*; .*{remedy}"):
        testing.check_memory(memory, ALIKE, telescopes=law == "telescopes")


def test_too_few_devices_are_answered_with_the_remedy(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [None])
    with pytest.raises(ValueError, match="jax_num_cpu_devices"):
        testing.check_exchange(fg.AllReduce())
