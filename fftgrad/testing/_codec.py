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
    if eager:
        _eager(laws, codec, trips[small], small)
    _programs(laws, codec, trips[small], small)
    if isinstance(codec, Transform):
        _claims.no_state_and_no_side(laws, codec, small)
    for n, trip in trips.items():
        _values(laws, codec, trip, n, max_error)
    if isinstance(codec, Transform):
        _claims.transform(laws, codec, small)
    if codec.summable:
        _claims.summable(laws, codec, small)
    if codec.unbiased:
        _claims.unbiased(laws, codec, small)


def _trip(codec: Codec, x: jax.Array, state: PyTree, step: Step) -> Trip:
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    out: Compressed = codec.compress(x, state, step)
    back = codec.decompress(out.payload, like, step)
    made_by = _wire.configuration((codec,), (like,))
    seed = _wire.seed(made_by, step.number, step.skipped)
    buffer = _wire.pack(_wire.Header(jnp.ones((), bool), out.overflow), out.payload, seed)
    received = _wire.unpack(buffer, out.payload, seed)[1]
    other = step if step.local is None else step._replace(local=jax.random.key(77))
    total = jnp.linspace(-1.0, 1.0, x.size)
    selector, side = codec if isinstance(codec, Selector) else None, out.payload.side
    return Trip(
        payload=out.payload,
        overflow=jnp.asarray(out.overflow),
        state=out.state,
        back=back,
        buffer=buffer,
        from_buffer=codec.decompress(received, like, step),
        elsewhere=codec.decompress(out.payload, like, other),
        added=_sum.add(codec, total, out.payload, 0.5, step),
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
    laws.same_spec(
        "shapes", f"decompress for float32[{n}]", back, like,
        "reshape and cast what decompress returns to `like`.",
    )  # fmt: skip
    with laws.running(
        "bytes", f"a payload for float32[{n}] must fit into a buffer of uint32",
        "send numbers of 8, 16 or 32 bits: pack what has fewer.",
    ):  # fmt: skip
        jax.eval_shape(
            lambda payload: _wire.pack(_wire.NOTHING, payload, jnp.uint32(0)), out.payload
        )
    with laws.running("shapes", rule, remedy):
        trip: Any = jax.eval_shape(lambda x: _trip(codec, x, start(codec, n), step_of()), like)
    laws.same_spec(
        "shapes", "the next state", trip.state, jax.eval_shape(lambda: start(codec, n)),
        "return a state of the structure, shapes and dtypes that init makes.",
    )  # fmt: skip
    laws.same_spec(
        "shapes", "overflow", trip.overflow, jax.ShapeDtypeStruct((), jnp.int32),
        "count in one int32, as jnp.sum(bad, dtype=jnp.int32), or return 0.",
    )  # fmt: skip
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


def _compiled(codec: Codec, n: int) -> Run:
    """One step of a vector of that length, compiled."""

    def run(x: jax.Array, state: PyTree, number: jax.Array) -> Trip:
        return _trip(codec, x, state, step_of()._replace(number=number))

    return jax.jit(run, compiler_options=_laws.options(n))


def _back(codec: Codec, x: jax.Array, state: PyTree) -> jax.Array:
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return codec.decompress(codec.compress(x, state, step_of()).payload, like, step_of())


PURE = "use no random numbers but those of the step's keys, and nothing outside the arguments."


def _eager(laws: Laws, codec: Codec, trip: Run, n: int) -> None:
    """Law: jit changes nothing."""
    x, state = jnp.asarray(_laws.values(n)), start(codec, n)
    name = f"heavy-tailed values, float32[{n}]"
    plain, again = _back(codec, x, state), _back(codec, x, state)
    laws.need(
        _laws.bits_equal(plain, again), "jit", "two calls must give the same bits",
        f"others for {name}", PURE,
    )  # fmt: skip
    compiled = trip(x, state, jnp.int32(0)).back
    laws.near("jit", f"jit must change nothing for {name}", compiled, plain, PURE)


def _programs(laws: Laws, codec: Codec, trip: Run, n: int) -> None:
    """Laws: vmap is a loop, and a state keeps its shapes."""
    x, state = jnp.stack([_laws.values(n, seed) for seed in range(3)]), start(codec, n)
    rows = [trip(row, state, jnp.int32(0)) for row in x]
    each = jnp.stack([row.back for row in rows])
    together = jax.jit(jax.vmap(lambda row: _back(codec, row, state)))(x)
    laws.near(
        "vmap", f"vmap must be a loop for heavy-tailed values, float32[{n}]", together, each,
        PURE,
    )  # fmt: skip
    after = jax.eval_shape(trip, x[1], rows[0].state, jnp.int32(1)).state
    laws.same_spec(
        "shapes", "the state after two steps", after, state, "keep its shapes from step to step."
    )


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
            laws.need(
                not _laws.all_finite(back), "not hidden",
                "a value that is not finite must make some value of decompress(compress(x)) not "
                "finite", f"finite values only, for {name}, step {number}",
                "add fg.codecs.poison(x) (0, or NaN) to the scale or to the values sent; a maximum "
                "or "
                "minimum is no evidence.",
            )  # fmt: skip
        if n > 8:  # of fewer, one side may be all there is
            laws.along(
                "what comes back", good[ORDINARY], found[ORDINARY].back, f"for {ORDINARY}, {when}"
            )
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
    laws.need(
        _laws.all_finite(out.back), "finite", "what was finite must stay finite",
        f"a value that is not, {where}",
        "divide by no scale that may be zero or overflow, and clip before casting.",
    )  # fmt: skip
    laws.need(
        _laws.relative(out.from_buffer, out.back) <= 1e-5, "bytes",
        "what comes out of the buffer must decode to the same", f"other values {where}",
        "send numbers of 8, 16 or 32 bits: pack what has fewer.",
    )  # fmt: skip
    laws.need(
        _laws.relative(out.elsewhere, out.back) <= 1e-5, "receiver",
        "decompress must not use step.local, which the receiver has not", f"it used {where}",
        "use step.shared for what both sides draw, step.local in compress only.",
    )  # fmt: skip
    if out.places is not None:
        main = None if codec.last else out.payload.main
        _claims.positions(laws, x, main, out.places, out.there, out.back, where)
    if np.abs(x).max() < 1e6:
        wanted = np.linspace(-1.0, 1.0, x.size) + 0.5 * np.asarray(out.back, np.float64)
        distance = _laws.relative(out.added, wanted)
        laws.need(
            distance <= 1e-4, "sparse", "sparse must return what decompress returns",
            f"a relative difference of {distance:.3g} {where}",
            "leave `sparse` out: the default is right.",
        )  # fmt: skip
