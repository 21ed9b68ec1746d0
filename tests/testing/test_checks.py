"""The public checks pass for the library's own parts, and name the law that a broken one breaks."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import EXCHANGES, HIERARCHIES, MEMORIES, TILED, sample
from jax import lax
from parallel import mesh_of

import fftgrad as fg
from fftgrad import testing
from fftgrad.contrib import learned

frozen = dataclasses.dataclass(frozen=True)
LIKE = jax.ShapeDtypeStruct((150,), jnp.float32)


@pytest.mark.parametrize("codec", [TILED[10, 11], fg.Dct(block=4, shape=(10, 11))])
def test_a_codec_of_one_shape_passes(codec):
    testing.check_codec(codec, sizes=(110,), eager=False)


@pytest.mark.parametrize("name", sample(MEMORIES, always=["feedback"]))
def test_memories_of_the_library_pass(name):
    testing.check_memory(MEMORIES[name], telescopes=name == "feedback")


@pytest.mark.parametrize(
    "name",
    [
        "dense",
        "random sum",
        "shared frequencies",
        "two stages",
        "integer sum",
        "low rank",
        "low rank in turns",
    ],
)
def test_exchanges_of_the_library_pass(name):
    exchange = EXCHANGES[name]
    testing.check_exchange(exchange, LIKE, mean_of_sent=not isinstance(exchange, fg.TwoStage))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXCHANGES)
def test_all_exchanges_of_the_library_pass(name):
    exchange = EXCHANGES[name]
    again = isinstance(exchange, fg.TwoStage) or name == "votes, noise of each"
    untrained = isinstance(exchange, learned.LearnedCodes) and exchange.until == 0
    most = math.inf if untrained else 1.5
    testing.check_exchange(exchange, mean_of_sent=not again, max_error=most)


def test_an_exchange_of_two_axes_passes():
    mesh = jax.make_mesh((2, 4), ("slow", "fast"))
    testing.check_exchange(HIERARCHIES["slow all-reduce"], LIKE, mesh=mesh)


# Broken codecs, each in one way.


class Plain(fg.Quantizer):
    """float16, by hand: what the broken ones derive from."""

    def compress(self, x, state, step):
        bad = jnp.sum(x - x)
        return fg.Compressed(fg.Payload(jnp.clip(x + bad, -6e4, 6e4).astype(jnp.float16)))

    def decompress(self, payload, like, step):
        return payload.main.astype(like.dtype)


@dataclasses.dataclass
class Mutable(Plain):
    scale: float = 1.0


@dataclasses.dataclass(unsafe_hash=True)
class MutableWithHash(Plain):
    scale: float = 1.0


@frozen
class WrongShape(Plain):
    def decompress(self, payload, like, step):
        return payload.main.astype(like.dtype)[None]


@frozen
class WrongDtype(Plain):
    def decompress(self, payload, like, step):
        return payload.main


@frozen
class Branches(Plain):
    def compress(self, x, state, step):
        return super().compress(x if x[0] > 0 else -x, state, step)


@frozen
class NoPayload(Plain):
    def compress(self, x, state, step):
        return fg.Compressed(x)


@frozen
class GrowingState(Plain):
    def init(self, like):
        return jnp.zeros(1)

    def compress(self, x, state, step):
        out = super().compress(x, state, step)
        return out._replace(state=jnp.concatenate([state, state]))


@frozen
class Codes(Plain):
    """Codes, that something could follow."""

    @property
    def last(self):
        return False

    def compress(self, x, state, step):
        return fg.Compressed(fg.Payload(lax.bitcast_convert_type(x, jnp.uint32)))

    def decompress(self, payload, like, step):
        return lax.bitcast_convert_type(payload.main, jnp.float32)


@frozen
class Impure(Plain):
    def compress(self, x, state, step):
        return super().compress(x + np.random.default_rng().random(), state, step)


@frozen
class Local(Plain):
    """Adds a dither that the receiver takes off by another key."""

    def compress(self, x, state, step):
        noise = jax.random.uniform(step.local, x.shape)
        return super().compress(x + noise, state, step)

    def decompress(self, payload, like, step):
        y = super().decompress(payload, like, step)
        return y - jax.random.uniform(step.local, y.shape)


@frozen
class ByMean(Plain):
    """A sign with its magnitude; zeros over zeros are no numbers."""

    def compress(self, x, state, step):
        return fg.Compressed(fg.Payload(x / jnp.max(jnp.abs(x)), jnp.mean(jnp.abs(x))))

    def decompress(self, payload, like, step):
        return payload.main * payload.side


@frozen
class Booleans(Plain):
    def compress(self, x, state, step):
        return fg.Compressed(fg.Payload(x > 0, jnp.mean(jnp.abs(x))))

    def decompress(self, payload, like, step):
        return jnp.where(payload.main, payload.side, -payload.side)


@frozen
class WrongSparse(fg.Selector):
    """The first three, doubled in sums."""

    def compress(self, x, state, step):
        return fg.Compressed(fg.Payload(x[:3] + 0.0 * x.sum()))

    def positions(self, side, n, step):
        return jnp.arange(min(3, n), dtype=jnp.int32)

    def sparse(self, payload, like, step):
        (n,) = like.shape
        return fg.codecs.Sparse(self.positions(payload.side, n, step), 2 * payload.main)


@frozen
class WrongSum(Plain):
    """float16 is not summable, nor are its magnitudes."""

    @property
    def summable(self):
        return True

    def compress(self, x, state, step):
        return fg.Compressed(fg.Payload(jnp.abs(x), jnp.sign(x)))

    def decompress(self, payload, like, step):
        return payload.main * payload.side


@frozen
class Wraps(Plain):
    """Integers of 8 bits, of which a sum wraps."""

    @property
    def summable(self):
        return True

    def compress(self, x, state, step):
        codes = jnp.round(jnp.clip(x * 16, -127, 127)).astype(jnp.int8)
        return fg.Compressed(fg.Payload(codes, jnp.sum(x - x)))

    def decompress(self, payload, like, step):
        return payload.main / jnp.float32(16) + payload.side


@frozen
class Biased(Plain):
    @property
    def unbiased(self):
        return True


class First(fg.Selector):
    """The first half of the values, and a flag for the rest."""

    def compress(self, x, state, step):
        bad = jnp.sum(x - x)
        return fg.Compressed(fg.Payload(x[: (x.size + 1) // 2] + bad))

    def positions(self, side, n, step):
        return jnp.arange((n + 1) // 2, dtype=jnp.int32)


@frozen
class Descending(First):
    def positions(self, side, n, step):
        return super().positions(side, n, step)[::-1]


@frozen
class Twice(First):
    def positions(self, side, n, step):
        return super().positions(side, n, step) // 2


@frozen
class Elsewhere(First):
    def at(self, x, side, step):
        return x[-((x.size + 1) // 2) :]


@frozen
class Wrapping(First):
    """Eight positions, sent in 8 bits."""

    def compress(self, x, state, step):
        places = jnp.arange(8) * (x.size // 8)
        return fg.Compressed(fg.Payload(x[places] + fg.codecs.poison(x), places.astype(jnp.uint8)))

    def positions(self, side, n, step):
        return side.astype(jnp.int32)


@frozen
class FirstStepOnly(Plain):
    """Sends nothing later, and so hides what is bad."""

    def compress(self, x, state, step):
        return super().compress(jnp.where(step.number == 0, x, 0), state, step)


@frozen
class Remembers(Plain):
    """Adds what it has seen, and in the end is beyond its range."""

    def init(self, like):
        return jnp.zeros(like.shape)

    def compress(self, x, state, step):
        out = super().compress(jnp.where(state > 0, 0, x), state, step)
        return out._replace(state=state + jnp.abs(x))


@frozen
class Divides(Plain):
    """By a number that is zero in later steps."""

    def compress(self, x, state, step):
        return super().compress(x, state, step)._replace(overflow=0)

    def decompress(self, payload, like, step):
        return super().decompress(payload, like, step) / jnp.maximum(1.0 - step.number, 0)


@frozen
class SendsMore(fg.Transform):
    def compress(self, x, state, step):
        return fg.Compressed(fg.Payload(2 * x, jnp.float32(2)))

    def decompress(self, payload, like, step):
        return payload.main / payload.side


@frozen
class NoInverse(fg.Transform):
    def compress(self, x, state, step):
        return fg.Compressed(fg.Payload(jnp.cumsum(x)))

    def decompress(self, payload, like, step):
        return payload.main


@frozen
class Whole(Plain):
    """All values as they are: what is wrong with those below is what they do to them."""

    def compress(self, x, state, step):
        return fg.Compressed(fg.Payload(self.changed(x, step.number)))

    def decompress(self, payload, like, step):
        return payload.main

    def changed(self, x, number):
        return x


@frozen
class DeadZone(Whole):
    """Drops what is small beside the largest."""

    @property
    def unbiased(self):
        return True

    def changed(self, x, number):
        return jnp.where(jnp.abs(x) < jnp.max(jnp.abs(x)) / 20, 0.0, x) + fg.codecs.poison(x)


@frozen
class DeadZoneLater(DeadZone):
    def changed(self, x, number):
        return jnp.where(number == 0, x, super().changed(x, number))


@frozen
class Shrinks(Whole):
    @property
    def unbiased(self):
        return True

    def changed(self, x, number):
        return 0.99 * x


@frozen
class Flips(Whole):
    def changed(self, x, number):
        return -x


@frozen
class FlipsLater(Whole):
    def changed(self, x, number):
        return jnp.where(number == 3, -x, x)


@frozen
class Nothing(Whole):
    def changed(self, x, number):
        return jnp.zeros_like(x) + fg.codecs.poison(x)


@frozen
class NothingLater(Whole):
    def changed(self, x, number):
        return jnp.where(number % 7 == 0, x, 0.0) + fg.codecs.poison(x)


@frozen
class Triples(Whole):
    def changed(self, x, number):
        return 3 * x


@frozen
class Offset(Whole):
    """A constant, which a sum of payloads has once and a sum of gradients w times."""

    @property
    def summable(self):
        return True

    def decompress(self, payload, like, step):
        return payload.main + 1e-3


@frozen
class HidesMeanwhile(Whole):
    def changed(self, x, number):
        return jnp.where(number % 7 == 0, x, jnp.nan_to_num(x))


@frozen
class SummedOnce(Whole):
    """Squares in one step, whose sum is no square of a sum."""

    @property
    def summable(self):
        return True

    def changed(self, x, number):
        return jnp.where(number == 2, jnp.sign(x) * x * x, x)

    def decompress(self, payload, like, step):
        x = payload.main
        return jnp.where(step.number == 2, jnp.sign(x) * jnp.sqrt(jnp.abs(x)), x)


class Same(fg.Transform):
    """The values: what the wrong transforms derive from."""

    def compress(self, x, state, step):
        return fg.Compressed(fg.Payload(x))

    def decompress(self, payload, like, step):
        return payload.main


@frozen
class OffsetTransform(Same):
    def decompress(self, payload, like, step):
        return payload.main + 1e-4


@frozen
class DeadTransform(Same):
    def decompress(self, payload, like, step):
        x = payload.main
        return jnp.where(jnp.abs(x) < jnp.max(jnp.abs(x)) / 20, 0.0, x) + fg.codecs.poison(x)


@frozen
class TransformsOnce(Same):
    def decompress(self, payload, like, step):
        return jnp.where(step.number == 2, payload.main[::-1], payload.main)


@frozen
class HasState(Same):
    def init(self, like):
        return jnp.zeros(())

    def compress(self, x, state, step):
        return fg.Compressed(fg.Payload(x), state=state + 1)


@frozen
class SelectsOnce(First):
    """In a later step those at the positions are the other half."""

    def at(self, x, side, step):
        half = (x.size + 1) // 2
        return jnp.where(step.number == 3, x[-half:], x[:half])


BROKEN_CODECS = [
    (Mutable(), "value", "frozen=True"),
    (MutableWithHash(), "value", "frozen=True"),
    (WrongShape(), "shapes", "to `like`"),
    (WrongDtype(), "shapes", "to `like`"),
    (Branches(), "shapes", "no Python `if`"),
    (NoPayload(), "shapes", "wrap what is sent"),
    (GrowingState(), "shapes", "that init makes"),
    (Codes(), "shapes", "fg.Quantizer"),
    (Impure(), "jit", "the step's keys"),
    (Local(), "receiver", "step.shared"),
    (ByMean(), "finite", "that may be zero"),
    (Booleans(), "bytes", "pack what has fewer"),
    (fg.codecs.FixedRangeFloat(bits=8, mantissa=3, maximum=2.0, eps=0.125), "not hidden", "poison"),
    (WrongSparse(), "sparse", "leave `sparse` out"),
    (WrongSum(), "summable", "do not claim"),
    (Wraps(), "summable", "do not claim"),
    (Biased(), "unbiased", "do not claim"),
    (Descending(), "positions", "sort the positions"),
    (Twice(), "positions", "sort the positions"),
    (Elsewhere(), "positions", "leave `at` out"),
    (FirstStepOnly(), "not hidden", "poison"),
    (Remembers(), "not hidden", "poison"),
    (Divides(), "finite", "that may be zero"),
    (SendsMore(), "transform", "fg.Codec"),
    (NoInverse(), "transform", "fg.Codec"),
    (DeadZone(), "unbiased", "do not claim"),
    (DeadZoneLater(), "unbiased", "do not claim"),
    (Shrinks(), "unbiased", "do not claim"),
    (Flips(), "fidelity", "look at its signs"),
    (FlipsLater(), "fidelity", "look at its signs"),
    (Nothing(), "fidelity", "send some values"),
    (NothingLater(), "fidelity", "send some values"),
    (Triples(), "fidelity", "max_error=math.inf"),
    (Offset(), "fidelity", "add nothing to it"),
    (OffsetTransform(), "summable", "do not claim"),
    (HidesMeanwhile(), "not hidden", "poison"),
    (SummedOnce(), "summable", "do not claim"),
    (DeadTransform(), "transform", "fg.Codec"),
    (TransformsOnce(), "transform", "fg.Codec"),
    (HasState(), "transform", "fg.Codec"),
    (SelectsOnce(), "positions", "leave `at` out"),
]


@pytest.mark.parametrize(
    ("codec", "law", "remedy"), BROKEN_CODECS, ids=lambda value: type(value).__name__
)
def test_a_broken_codec_is_caught_by_its_law(codec, law, remedy):
    with pytest.raises(AssertionError, match=rf"check_codec\(.*law '{law}'.*, got .*; .*{remedy}"):
        testing.check_codec(codec, sizes=(90,), eager=law == "jit")


@frozen
class Signs(Plain):
    """A sign of size one, whatever the values are."""

    def compress(self, x, state, step):
        return fg.Compressed(fg.Payload(jnp.sign(x) + fg.codecs.poison(x)))


def test_an_answer_with_a_size_of_its_own_passes_where_that_is_said():
    testing.check_codec(Signs(), sizes=(90,), max_error=math.inf)
    with pytest.raises(AssertionError, match=r"law 'fidelity'.* for tiny values.*math\.inf"):
        testing.check_codec(Signs(), sizes=(90,))


def test_a_contraction_can_be_asked_for():
    with pytest.raises(AssertionError, match=r"law 'fidelity'.* at most 1 \|\|x\|\|"):
        testing.check_codec(fg.Ternary(), sizes=(90,), max_error=1.0, eager=False)


def test_what_only_large_vectors_hide_is_caught_at_the_default_sizes():
    testing.check_codec(ByMaximum(), sizes=(90,))
    with pytest.raises(AssertionError, match="65537"):
        testing.check_codec(ByMaximum(), sizes=(65_537,))


def test_positions_that_wrap_are_caught_at_the_default_sizes():
    testing.check_codec(Wrapping(), sizes=(90,))
    with pytest.raises(AssertionError, match=r"law 'positions'.*5000"):
        testing.check_codec(Wrapping(), sizes=(90, 5_000))


@frozen
class ByMaximum(Plain):
    """Levels of the largest magnitude, in which a maximum is the only witness."""

    def compress(self, x, state, step):
        top = jnp.max(jnp.abs(x))
        unit = jnp.maximum(top, jnp.finfo(jnp.float32).tiny) / 100
        return fg.Compressed(fg.Payload(jnp.nan_to_num(x / unit).astype(jnp.int8), unit))

    def decompress(self, payload, like, step):
        return payload.main.astype(jnp.float32) * payload.side


# Broken exchanges.


@frozen
class Dense(fg.Exchange):
    """What the broken ones derive from."""

    def mean(self, x, state, channel):
        mean = jax.tree.map(lambda a: lax.pmean(a, channel.axis_name), x)
        return fg.Reduced(mean, x, state)

    def wire_bytes(self, like):
        return 4 * sum(leaf.size for leaf in jax.tree.leaves(like))


@frozen
class Lies(Dense):
    def wire_bytes(self, like):
        return super().wire_bytes(like) // 2


@frozen
class Sums(Dense):
    def mean(self, x, state, channel):
        total = jax.tree.map(lambda a: lax.psum(a, channel.axis_name), x)
        return super().mean(x, state, channel)._replace(mean=total)


@frozen
class Drifts(Dense):
    def mean(self, x, state, channel):
        out = super().mean(x, state, channel)
        own = jax.random.uniform(channel.step.local)
        return out._replace(mean=jax.tree.map(lambda a: a + 1e-6 * own, out.mean))


@frozen
class Hides(Dense):
    def mean(self, x, state, channel):
        return super().mean(jax.tree.map(jnp.nan_to_num, x), state, channel)


@frozen
class Flattens(Dense):
    def mean(self, x, state, channel):
        out = super().mean(x, state, channel)
        return out._replace(sent=jax.tree.map(lambda a: a[:1], x))


@frozen
class NoVmap(Dense):
    def mean(self, x, state, channel):
        out = super().mean(x, state, channel)
        if not jax.typeof(jax.tree.leaves(x)[0]).manual_axis_type.varying:
            out = out._replace(mean=jax.tree.map(lambda a: 2 * a, out.mean))
        return out


@frozen
class DriftsLater(Dense):
    def mean(self, x, state, channel):
        out = super().mean(x, state, channel)
        own = jnp.where(channel.step.number == 0, 0, jax.random.uniform(channel.step.local))
        return out._replace(mean=jax.tree.map(lambda a: a + 1e-6 * own, out.mean))


@frozen
class HidesLater(Dense):
    def mean(self, x, state, channel):
        x = jax.tree.map(lambda a: jnp.where(channel.step.number == 0, a, jnp.nan_to_num(a)), x)
        return super().mean(x, state, channel)


@frozen
class OtherLater(Dense):
    """Another mean than that of what it says was sent."""

    def mean(self, x, state, channel):
        out = super().mean(x, state, channel)
        share = jnp.where(channel.step.number == 2, 0.9, 1.0)
        return out._replace(mean=jax.tree.map(lambda a: share * a, out.mean))


@frozen
class Scaled(Dense):
    """Of gradients times a number."""

    def mean(self, x, state, channel):
        share = self.share(channel.step)
        return super().mean(jax.tree.map(lambda a: share * a, x), state, channel)

    def share(self, step):
        return 0.0


@frozen
class ZerosLater(Scaled):
    def share(self, step):
        return jnp.where(step.number == 0, 1.0, 0.0)


@frozen
class Triple(Scaled):
    def share(self, step):
        return 3.0


@frozen
class Miscounts(Dense):
    def mean(self, x, state, channel):
        out = super().mean(x, state, channel)
        all_of_them = lax.psum(jnp.ones((), jnp.int32), channel.axis_name)
        some = channel.participates is not None
        tally = out.tally._replace(workers=all_of_them)
        return out._replace(tally=tally) if some else out


@frozen
class CountsAll(Dense):
    """Has no code for zero."""

    def mean(self, x, state, channel):
        x = jax.tree.map(lambda a: jnp.where(a == 0, 0.1, a), x)
        return super().mean(x, state, channel)


BROKEN_EXCHANGES = [
    (DriftsLater(), "replicas", "in the order of the workers"),
    (HidesLater(), "not hidden", "all_finite"),
    (OtherLater(), "mean", "mean_of_sent=False"),
    (Scaled(), "fidelity", "send some values"),
    (ZerosLater(), "fidelity", "send some values"),
    (Triple(), "fidelity", "divide by the workers"),
    (Miscounts(), "workers", "leave it out"),
    (CountsAll(), "workers", "send zeros for it"),
    (Lies(), "bytes", "correct wire_bytes"),
    (Sums(), "mean", "mean_of_sent=False"),
    (Drifts(), "replicas", "in the order of the workers"),
    (Hides(), "not hidden", "all_finite"),
    (Flattens(), "shapes", "reshape"),
    (NoVmap(), "vmap", "jax.lax"),
    (fg.TwoStage(fg.Sign(), workers=4), "mean", "mean_of_sent=False"),
    (fg.TwoStage(fg.Sign(), workers=3), "shapes", "collectives of the channel"),
]


@pytest.mark.parametrize(
    ("exchange", "law", "remedy"), BROKEN_EXCHANGES, ids=lambda value: type(value).__name__
)
def test_a_broken_exchange_is_caught_by_its_law(exchange, law, remedy):
    with pytest.raises(
        AssertionError, match=rf"check_exchange\(.*law '{law}'.*, got .*; .*{remedy}"
    ):
        testing.check_exchange(exchange, LIKE)


def test_the_unbroken_ones_pass():
    testing.check_codec(dataclasses.dataclass(frozen=True)(type("Half", (Plain,), {}))(), (90,))
    testing.check_codec(dataclasses.dataclass(frozen=True)(type("Half", (First,), {}))(), (90,))
    testing.check_exchange(Dense(), LIKE, mesh=mesh_of(2))
    testing.check_memory(Kept(), telescopes=True)


# Broken memories.


@frozen
class Fixed(fg.Memory):
    def init(self, like):
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), like)

    def compensate(self, grad, state):
        return jax.tree.map(jnp.add, grad, state), state

    def update(self, x, sent, mean, state):
        return jax.tree.map(jnp.subtract, x, sent)


@frozen
class Narrow(Fixed):
    def update(self, x, sent, mean, state):
        new = super().update(x, sent, mean, state)
        return jax.tree.map(lambda a: a.astype(jnp.bfloat16), new)


@frozen
class AcrossLeaves(Fixed):
    def compensate(self, grad, state):
        x, state = super().compensate(grad, state)
        total = sum(jnp.sum(a) for a in jax.tree.leaves(x))
        return jax.tree.map(lambda a: a + total, x), state


@frozen
class Clips(Fixed):
    def compensate(self, grad, state):
        x, state = super().compensate(grad, state)
        return jax.tree.map(jnp.nan_to_num, x), state


@frozen
class Normalizes(Fixed):
    def compensate(self, grad, state):
        x, state = super().compensate(grad, state)
        return jax.tree.map(lambda a: a / jnp.sqrt(jnp.sum(a * a)), x), state


@frozen
class Kept(Fixed):
    """Nothing is wrong with it."""

    def put_back(self, lost, state):
        return jax.tree.map(jnp.add, state, lost)


@frozen
class PutsBackOther(Kept):
    def put_back(self, lost, state):
        return jax.tree.map(lambda a: a.astype(jnp.bfloat16), super().put_back(lost, state))


@frozen
class Against(Kept):
    def compensate(self, grad, state):
        return jax.tree.map(jnp.subtract, state, grad), state


@frozen
class ClipsLater(Kept):
    def compensate(self, grad, state):
        x, state = super().compensate(grad, state)
        clip = lambda a, e: jnp.where(jnp.any(e != 0), jnp.nan_to_num(a), a)  # noqa: E731
        return jax.tree.map(clip, x, state), state


@frozen
class ForgetsLater(fg.Memory):
    """What is left of the sixth step."""

    def init(self, like):
        return Kept().init(like), jnp.zeros((), jnp.int32)

    def compensate(self, grad, state):
        return jax.tree.map(jnp.add, grad, state[0]), state

    def update(self, x, sent, mean, state):
        kept = jnp.where(state[1] == 5, 0.0, 1.0)
        return jax.tree.map(lambda a, b: kept * (a - b), x, sent), state[1] + 1

    def put_back(self, lost, state):
        return Kept().put_back(lost, state[0]), state[1]


BROKEN_MEMORIES = [
    (PutsBackOther(), "shapes", "that init makes"),
    (Against(), "fidelity", "look at its signs"),
    (ClipsLater(), "not hidden", "replace no NaN"),
    (ForgetsLater(), "telescopes", "keep x - sent"),
    (Narrow(), "shapes", "that init makes"),
    (AcrossLeaves(), "leaf by leaf", "jax.tree.map"),
    (Normalizes(), "finite", "that may be zero"),
    (Clips(), "not hidden", "replace no NaN"),
    (Fixed(), "telescopes", "what put_back is given"),
    (fg.NoMemory(), "telescopes", "keep x - sent"),
    (fg.ErrorFeedback(decay=0.9), "telescopes", "keep x - sent"),
]


@pytest.mark.parametrize(
    ("memory", "law", "remedy"), BROKEN_MEMORIES, ids=lambda value: type(value).__name__
)
def test_a_broken_memory_is_caught_by_its_law(memory, law, remedy):
    with pytest.raises(AssertionError, match=rf"check_memory\(.*law '{law}'.*, got .*; .*{remedy}"):
        testing.check_memory(memory, telescopes=law == "telescopes")


def test_too_few_devices_are_answered_with_the_remedy(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [None])
    with pytest.raises(ValueError, match="jax_num_cpu_devices"):
        testing.check_exchange(fg.AllReduce())
