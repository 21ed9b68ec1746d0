"""The laws of codecs."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fftgrad._contracts import Codec, Compressed, Payload, PyTree, Selector, Step, Transform
from fftgrad.codecs import _sum
from fftgrad.ops import _wire
from fftgrad.testing import _claims, _laws
from fftgrad.testing._claims import start, step_of
from fftgrad.testing._laws import Laws
from fftgrad.tools._wire_bytes import wire_bytes

ORDINARY = "heavy-tailed values"

SIZES = (1, 90, 5_000, 65_537)
"""XLA's vectorized maximum drops a NaN from some thousand values on."""


PURE = "use no random numbers but those of the step's keys, and nothing outside the arguments."
PACKED = "send numbers of 8, 16 or 32 bits: pack what has fewer."
DEFAULT = "leave `{}` out: the default is right."


class Trip(NamedTuple):
    """What a codec makes of a vector, and back; `places` and `there` are a selector's."""

    payload: Payload
    overflow: jax.Array
    state: PyTree
    back: jax.Array
    buffer: jax.Array
    from_buffer: jax.Array
    elsewhere: jax.Array
    added: jax.Array
    places: jax.Array | None
    there: jax.Array | None


Run = Callable[[jax.Array, PyTree, jax.Array], Trip]
"""From a vector, a state and a step's number."""


def check_codec(
    codec: Codec,
    sizes: Sequence[int] = SIZES,
    *,
    max_error: float = _laws.MAX_ERROR,
    eager: bool = True,
) -> None:
    """Function: run the laws of the contract on a codec of one's own.

    For pytest: `def test_half(): fg.testing.check_codec(Half())`. The laws, by the names that an
    error gives: "value" (compares, hashes, frozen), "shapes" (static, also of the state), "jit",
    "vmap", "bytes" (of the buffer = `fg.wire_bytes`, and it decodes to the same), "receiver"
    (decompressing uses no local key), "finite" (zeros, one value, huge and tiny ones stay finite),
    "not hidden" (a NaN or an infinity is seen at every size), "fidelity" (what comes back points
    along x, and is no further off than `max_error`), "sparse" (what decompress returns),
    "positions" (ascend and differ), "transform" (invertible, without state and side), and the
    claims, if it makes them: "summable", "unbiased". Those about values hold in the first eight
    steps, each with the state that the steps before it left.

    Args:
      codec: a codec, or a chain of codecs. One that follows `Fft`, and so sees complex values, is
        checked in its chain.
      sizes: the lengths n of the vectors; for a codec that is made for one shape, that alone.
      max_error: the most that ||x - C(x)|| / ||x|| may be, where the codec does not claim to be
        unbiased; 1.0 for a contraction, which error feedback needs; inf for one whose answer has a
        size that does not come from the values, as that of a sign without a scale.
      eager: whether to run it outside `jax.jit` too, for the law "jit". Each of its operations is
        compiled for that, which takes most of the time of a check.

    Raises:
      AssertionError: if it breaks a law: which, for what input, and what to do.

    Example:
      >>> import dataclasses
      >>> @dataclasses.dataclass(frozen=True)
      ... class Half(fg.Quantizer):
      ...     def compress(self, x, state, step):
      ...         return fg.Compressed(fg.Payload(x.astype("bfloat16")))
      ...
      ...     def decompress(self, payload, like, step):
      ...         return payload.main.astype(like.dtype)
      >>> fg.testing.check_codec(Half(), sizes=(1, 90))
    """
    laws = Laws("check_codec", codec)
    laws.value(Codec)
    for n in sizes:
        _shapes(laws, codec, n)
    small = min((n for n in sizes if n > 8), default=max(sizes))
    trips = {n: _compiled(codec, n) for n in sizes}
    _programs(laws, codec, trips[small], small, eager)
    if isinstance(codec, Transform):
        _claims.transform(laws, codec, small)
    for n, trip in trips.items():
        _values(laws, codec, trip, n, max_error)
    if codec.summable:
        _claims.summable(laws, codec, small)
    if codec.unbiased:
        _claims.unbiased(laws, codec, small)


def _compiled(codec: Codec, n: int) -> Run:
    """One step of a vector of that length, compiled."""
    return jax.jit(
        lambda x, state, number: _trip(codec, x, state, step_of(number)),
        compiler_options=_laws.options(n),
    )


def _trip(codec: Codec, x: jax.Array, state: PyTree, step: Step) -> Trip:
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    out = codec.compress(x, state, step)
    buffer = _wire.pack(_wire.Header(True, out.overflow), out.payload)
    received = _wire.unpack(buffer, out.payload)[1]
    other = step._replace(local=jax.random.key(77))
    selector, side = codec if isinstance(codec, Selector) else None, out.payload.side
    return Trip(
        payload=out.payload,
        overflow=jnp.asarray(out.overflow),
        state=out.state,
        back=codec.decompress(out.payload, like, step),
        buffer=buffer,
        from_buffer=codec.decompress(received, like, step),
        elsewhere=codec.decompress(out.payload, like, other),
        added=_sum.add(codec, jnp.linspace(-1.0, 1.0, x.size), out.payload, 0.5, step),
        places=selector.positions(side, x.size, step) if selector else None,
        there=selector.at(x, side, step) if selector else None,
    )


def _shapes(laws: Laws, codec: Codec, n: int) -> None:
    like = jax.ShapeDtypeStruct((n,), jnp.float32)
    rule = f"it must trace, so that shapes alone decide, for float32[{n}]"
    remedy = "use jax.numpy, no Python `if` on values and no sizes that depend on them."
    with laws.running("shapes", rule, remedy):
        out = jax.eval_shape(lambda x: codec.compress(x, start(codec, n), step_of()), like)
        given = isinstance(out, Compressed) and isinstance(out.payload, Payload)
        laws.need(
            given, "shapes", "compress must return Compressed(Payload(main, side), ...)", f"{out}",
            "wrap what is sent as fg.Compressed(fg.Payload(main)).",
        )  # fmt: skip
    with laws.running("shapes", rule, remedy):
        back: Any = jax.eval_shape(lambda p: codec.decompress(p, like, step_of()), out.payload)
    same = "reshape and cast what decompress returns to `like`."
    laws.same_spec(f"decompress for float32[{n}]", back, like, same)
    with laws.running("bytes", f"a payload for float32[{n}] must fit into uint32 words", PACKED):
        jax.eval_shape(lambda p: _wire.pack(_wire.NOTHING, p), out.payload)
    with laws.running("shapes", rule, remedy):
        trip: Any = jax.eval_shape(lambda x: _trip(codec, x, start(codec, n), step_of()), like)
    laws.same_state(trip.state, jax.eval_shape(lambda: start(codec, n)))
    counted = "count in one int32, as jnp.sum(bad, dtype=jnp.int32), or return 0."
    laws.same_spec("overflow", trip.overflow, jax.ShapeDtypeStruct((), jnp.int32), counted)
    laws.need(
        codec.last or jnp.issubdtype(out.payload.main.dtype, jnp.inexact), "shapes",
        "`main` must hold values, unless the codec comes last", f"{out.payload.main.dtype}",
        "derive it from fg.Quantizer, or return True from `last`.",
    )  # fmt: skip
    laws.need(
        trip.buffer.size * 4 == wire_bytes(codec, like), "bytes",
        f"the buffer for float32[{n}] must have the {wire_bytes(codec, like)} bytes of wire_bytes",
        f"{trip.buffer.size * 4}", "let the shapes of a payload depend on the input's shape alone.",
    )  # fmt: skip
    with laws.running("shapes", "shard(4) must be a codec for a quarter", "return self."):
        quarter = codec.shard(4)
        laws.need(isinstance(quarter, Codec), "shapes", rule, f"{quarter!r}", "return self.")


def _programs(laws: Laws, codec: Codec, trip: Run, n: int, eager: bool) -> None:
    """Laws: jit changes nothing, vmap is a loop, and a state keeps its shapes."""
    x, state = jnp.stack([_laws.values(n, seed) for seed in range(3)]), start(codec, n)
    rows = [trip(row, state, jnp.int32(0)) for row in x]
    where = f"for heavy-tailed values, float32[{n}]"

    def back(row: jax.Array) -> jax.Array:
        payload = codec.compress(row, state, step_of()).payload
        return codec.decompress(payload, jax.ShapeDtypeStruct((n,), jnp.float32), step_of())

    if eager:
        plain, again = np.asarray(back(x[0])), np.asarray(back(x[0]))
        same, rule = plain.tobytes() == again.tobytes(), "two calls must give the same bits"
        laws.need(same, "jit", rule, f"others {where}", PURE)
        laws.near("jit", "jit must change nothing", rows[0].back, plain, where, PURE)
    each = jnp.stack([row.back for row in rows])
    laws.near("vmap", "vmap must be a loop", jax.jit(jax.vmap(back))(x), each, where, PURE)
    laws.same_state(jax.eval_shape(trip, x[1], rows[0].state, jnp.int32(1)).state, state)


def _values(laws: Laws, codec: Codec, trip: Run, n: int, max_error: float) -> None:
    """Laws on the values that all codecs see, in each of the first steps, as the state goes on."""
    state = start(codec, n)
    for number in range(_laws.STEPS[-1] + 1):
        good, bad = _laws.finite_values(n), _laws.bad_values(n)
        if 0 < number < _laws.STEPS[-1]:  # a few, so that eight steps take little longer than two
            good, bad = {}, dict(list(bad.items())[:1])
        good[ORDINARY] = _laws.values(n, seed=number)
        found = {name: trip(jnp.asarray(x), state, jnp.int32(number)) for name, x in good.items()}
        when = f"float32[{n}], step {number}"
        for name, x in good.items():
            _good(laws, codec, x, found[name], f"for {name}, {when}")
        for name, x in bad.items():
            back = trip(jnp.asarray(x), state, jnp.int32(number)).back
            laws.not_hidden(
                back, "some value of decompress(compress(x))", f"for {name}, {when}",
                "add fg.codecs.poison(x) (0, or NaN) to the scale or to the values sent; a maximum "
                "or minimum is no evidence.",
            )  # fmt: skip
        if n > 8:  # of fewer, one side may be all there is
            where = f"for {ORDINARY}, {when}"
            laws.along("what comes back", good[ORDINARY], found[ORDINARY].back, where)
        for name, x in good.items() if not codec.unbiased else ():
            laws.bounded(
                "what comes back", x, found[name].back, max_error, f"for {name}, {when}",
                "take the scale from the values and add nothing to it; claim `unbiased`, if the "
                "mean of many draws is x; or say max_error=math.inf, if the answer has a size of "
                "its own.",
            )  # fmt: skip
        state = found[ORDINARY].state


def _good(laws: Laws, codec: Codec, x: np.ndarray, out: Trip, where: str) -> None:
    """Laws: finite, bytes, receiver, sparse, positions; of what was made of finite values."""
    divided = "divide by no scale that may be zero or overflow, and clip before casting."
    laws.finite(out.back, where, divided)
    rule = "what comes out of the buffer must decode to the same"
    laws.near("bytes", rule, out.from_buffer, out.back, where, PACKED, most=1e-5)
    rule = "decompress must not use step.local, which the receiver has not"
    remedy = "use step.shared for what both sides draw, step.local in compress only."
    laws.near("receiver", rule, out.elsewhere, out.back, where, remedy, most=1e-5)
    if out.places is not None:
        _positions(laws, codec, x, out, where)
    if np.abs(x).max() < 1e6:
        wanted = np.linspace(-1.0, 1.0, x.size) + 0.5 * np.asarray(out.back, np.float64)
        rule, remedy = "sparse must return what decompress returns", DEFAULT.format("sparse")
        laws.near("sparse", rule, out.added, wanted, where, remedy, most=1e-4)


def _positions(laws: Laws, codec: Codec, x: np.ndarray, out: Trip, where: str) -> None:
    """Law: a selector's positions ascend and differ, and the values of main belong there."""
    places, there, back = map(np.asarray, (out.places, out.there, out.back))
    main = None if codec.last else np.asarray(out.payload.main)
    shape = places.shape if main is None else main.shape
    inside = places < x.size
    remedy = "sort the positions, and give what is nowhere n, n + 1, ..."
    laws.need(
        places.dtype == np.int32 and places.shape == shape, "positions",
        f"they must be int32{list(shape)}, one for each value of main",
        f"{places.dtype}{list(places.shape)} {where}", remedy,
    )  # fmt: skip
    laws.need(
        np.all(np.diff(places.astype(np.int64)) > 0) and np.all(places >= 0), "positions",
        "they must be at least 0, ascend and differ", f"{places[:8].tolist()}... {where}", remedy,
    )  # fmt: skip
    laws.need(
        main is None or np.array_equal(back[places[inside]], main[inside]), "positions",
        "decompress must put the values of main there", f"other values {where}",
        DEFAULT.format("decompress"),
    )  # fmt: skip
    laws.need(
        np.array_equal(there, np.where(inside, x[np.minimum(places, x.size - 1)], 0)), "positions",
        "at(x) must be the values of x there", f"{there[:4].tolist()}... {where}",
        DEFAULT.format("at"),
    )  # fmt: skip
