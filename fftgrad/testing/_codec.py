"""Laws of codecs."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fftgrad._contracts import Codec, Compressed, Payload, PyTree, Selector, Sparse, Step, Transform
from fftgrad.codecs import _sum
from fftgrad.ops import _wire
from fftgrad.testing import _laws
from fftgrad.testing._laws import Laws
from fftgrad.tools._bytes import wire_bytes

ORDINARY = "heavy-tailed values"

SIZES = (1, 90, 5_000, 65_537)
"""Lengths of vectors. XLA's vectorized maximum drops a NaN only in long vectors."""

DRAWS = 4000
LOST = 5e-3
"""Maximum relative error of a transform. It admits half precision."""
WORKERS = 8

PURE = "use only the arguments, and draw random numbers only from the step's keys."
PACKED = "send numbers of 8, 16 or 32 bits, and pack narrower ones."
DEFAULT = "leave `{}` out: the default is right."


class Trip(NamedTuple):
    """Results of encoding and decoding one vector. `places` are a selector's positions."""

    payload: Payload
    overflow: jax.Array
    state: PyTree
    back: jax.Array
    buffer: jax.Array
    from_buffer: jax.Array
    elsewhere: jax.Array
    added: jax.Array
    sent: jax.Array
    places: jax.Array | None


def check_codec(
    codec: Codec,
    sizes: Sequence[int] = SIZES,
    *,
    max_error: float = _laws.MAX_ERROR,
    eager: bool = True,
) -> None:
    """Function: check that your own codec obeys the laws of the contract.

    For pytest: `def test_half(): fg.testing.check_codec(Half())`. The laws are: "value" (the codec
    compares, hashes and is frozen), "shapes" (fixed for each length), "jit", "vmap", "bytes" (the
    buffer has `fg.wire_bytes` and decodes to the same vector), "receiver" (decompress uses no local
    key), "finite" (the decoded vector is finite for zeros, huge and tiny values), "not hidden" (it
    is not finite for a NaN or infinity), "fidelity" (it is within `max_error` of x, with a positive
    inner product), "sparse" (sparse and dense decoding agree), "positions" (in ascending order),
    and "transform" (invertible, without state and side). "summable" and "unbiased" are checked if
    the codec claims them. Laws on values are checked in the first eight steps.

    Args:
      codec: a codec, or a chain of codecs. If a codec gets complex values from `Fft`, check the
        whole chain.
      sizes: lengths n of the vectors. If a codec has a fixed length, pass only this length.
      max_error: bound of ||x - C(x)|| / ||x|| for a codec that does not claim to be unbiased. Pass
        1.0 for a contraction, which error feedback needs, or inf for a codec without a scale.
      eager: True to run the codec also outside `jax.jit`, for the law "jit". Then a check takes
        much longer, because each operation is compiled separately.

    Raises:
      AssertionError: if a law does not hold. The error names the law, the input and the remedy.

    Example:
      >>> import dataclasses
      >>> @dataclasses.dataclass(frozen=True)
      ... class Half(fg.codecs.Quantizer):
      ...     def compress(self, x, state, step):
      ...         return fg.codecs.Compressed(fg.codecs.Payload(x.astype("bfloat16")))
      ...
      ...     def decompress(self, payload, like, step):
      ...         return payload.main.astype(like.dtype)
      >>> fg.testing.check_codec(Half(), sizes=(1, 90))
    """
    laws = Laws("check_codec", codec)
    laws.value(Codec)
    small = min((n for n in sizes if n > 8), default=max(sizes))
    trips = {n: _compiled(codec, n) for n in sizes}
    for n, trip in trips.items():
        _shapes(laws, codec, trip, n)

    def back(x: jax.Array) -> jax.Array:
        payload = codec.compress(x, _start(codec, x.size), _step()).payload
        return codec.decompress(payload, _like(x.size), _step())

    inputs, where = [_laws.values(small, seed) for seed in range(3)], f"for {ORDINARY}"
    laws.programs(back, inputs, f"{where}, float32[{small}]", PURE, eager)
    if isinstance(codec, Transform):
        _transform(laws, codec, small)
    for n, trip in trips.items():
        _values(laws, codec, trip, n, max_error)
    if codec.summable:
        _summable(laws, codec, small)
    if codec.unbiased:
        _unbiased(laws, codec, small)


def _compiled(codec: Codec, n: int) -> Callable[..., Trip]:
    like = _like(n)

    def trip(x: jax.Array, state: PyTree, number: jax.Array) -> Trip:
        step = _step(number)
        out = codec.compress(x, state, step)
        buffer = _wire.pack(out.payload, overflow=out.overflow)
        received = _wire.unpack(buffer, out.payload)[0]
        other = step._replace(local=jax.random.key(77))
        selector = codec if isinstance(codec, Selector) else None
        back, few = codec.decompress(out.payload, like, step), out.sparse
        return Trip(
            payload=out.payload,
            overflow=jnp.asarray(out.overflow),
            state=out.state,
            back=back,
            buffer=buffer,
            from_buffer=codec.decompress(received, like, step),
            elsewhere=codec.decompress(out.payload, like, other),
            added=_sum.add(codec, jnp.linspace(-1.0, 1.0, n), out.payload, 0.5, step),
            sent=few.put_into(jnp.zeros_like(back)) if few else back,
            places=selector and selector.positions(out.payload.side, n, step),
        )

    return jax.jit(trip, compiler_options=_laws.options(n))


def _shapes(laws: Laws, codec: Codec, run: Callable[..., Trip], n: int) -> None:
    like = _like(n)
    rule = f"compress and decompress must trace for float32[{n}]"
    remedy = "use jax.numpy, no Python `if` on values, and no sizes that depend on values."
    with laws.running("shapes", rule, remedy):
        out = jax.eval_shape(lambda x: codec.compress(x, _start(codec, n), _step()), like)
        laws.need(
            isinstance(out, Compressed) and isinstance(out.payload, Payload), "shapes",
            "compress must return Compressed(Payload(main, side), ...)", f"{out}",
            "return fg.codecs.Compressed(fg.codecs.Payload(main)).",
        )  # fmt: skip
        back: Any = jax.eval_shape(lambda p: codec.decompress(p, like, _step()), out.payload)
    same = "reshape and cast what decompress returns to `like`."
    laws.same_spec(f"decompress for float32[{n}]", back, like, same)
    with laws.running("bytes", f"a payload for float32[{n}] must fit into uint32 words", PACKED):
        jax.eval_shape(_wire.pack, out.payload)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    with laws.running("shapes", rule, remedy):
        state = jax.eval_shape(lambda: _start(codec, n))
        trip: Any = jax.eval_shape(run, like, state, number)
    laws.same_state(trip.state, state)
    counted = "count in one int32, as jnp.sum(bad, dtype=jnp.int32), or return 0."
    laws.same_spec("overflow", trip.overflow, number, counted)
    main, wanted = out.payload.main.dtype, wire_bytes(codec, like)
    laws.need(
        codec.last or jnp.issubdtype(main, jnp.inexact), "shapes",
        "`main` must hold values, unless the codec comes last", f"{main}",
        "derive the codec from fg.codecs.Quantizer, or return True from `last`.",
    )  # fmt: skip
    laws.need(
        trip.buffer.size * 4 == wanted, "bytes",
        f"the buffer for float32[{n}] must have the {wanted} bytes of wire_bytes",
        f"{trip.buffer.size * 4}", "let the shapes of a payload depend on the input's shape alone.",
    )  # fmt: skip
    rule = "shard(4) must be a codec for a quarter"
    with laws.running("shapes", rule, "return self."):
        laws.need(isinstance(codec.shard(4), Codec), "shapes", rule, "another", "return self.")


def _values(laws: Laws, codec: Codec, trip: Callable[..., Trip], n: int, max_error: float) -> None:
    """Check the laws on values in eight steps, each with the state of the step before."""
    state = _start(codec, n)
    for number in range(_laws.STEPS[-1] + 1):
        good, bad = _laws.finite_values(n), _laws.bad_values(n)
        if 0 < number < _laws.STEPS[-1]:  # fewer inputs, to save time
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
                "add fg.codecs.poison(x) (0, or NaN) to the scale or to the values sent; XLA may "
                "drop a NaN from a maximum.",
            )  # fmt: skip
        if n > 8:  # a few values may all have the same sign
            where = f"for {ORDINARY}, {when}"
            laws.along("the decoded vector", good[ORDINARY], found[ORDINARY].back, where)
        for name, x in good.items() if not codec.unbiased else ():
            laws.bounded(
                "the decoded vector", x, found[name].back, max_error, f"for {name}, {when}",
                "take the scale from the values, decode zeros to about zero; claim `unbiased` if "
                "the mean of many draws is x; or pass max_error=math.inf if there is no scale.",
            )  # fmt: skip
        state = found[ORDINARY].state


def _good(laws: Laws, codec: Codec, x: np.ndarray, out: Trip, where: str) -> None:
    """Laws for finite inputs: finite, bytes, receiver, sparse, positions."""
    divided = "divide by no scale that may be zero or overflow, and clip before a cast."
    laws.finite(out.back, where, divided)
    rule = "the payload in the buffer must decode to the same"
    laws.near("bytes", rule, out.from_buffer, out.back, where, PACKED, most=1e-5)
    rule = "decompress must not use step.local, which the receiver lacks"
    remedy = "use step.shared for draws of both sides, and step.local in compress only."
    laws.near("receiver", rule, out.elsewhere, out.back, where, remedy, most=1e-5)
    rule, remedy = "Compressed.sparse must be what the payload decodes to", "leave it out."
    laws.near("sparse", rule, out.sent, out.back, where, remedy, most=0.0)
    if out.places is not None:
        _positions(laws, codec, x, out, where)
    if np.abs(x).max() < 1e6:
        wanted = np.linspace(-1.0, 1.0, x.size) + 0.5 * np.asarray(out.back, np.float64)
        rule, remedy = "sparse must return what decompress returns", DEFAULT.format("sparse")
        laws.near("sparse", rule, out.added, wanted, where, remedy, most=1e-4)


def _positions(laws: Laws, codec: Codec, x: np.ndarray, out: Trip, where: str) -> None:
    """Law: a selector's positions strictly ascend, and decompress puts `main` at them."""
    places, back = map(np.asarray, (out.places, out.back))
    main = None if codec.last else np.asarray(out.payload.main)
    shape = places.shape if main is None else main.shape
    inside = places < x.size
    ascend = np.all(np.diff(places.astype(np.int64)) > 0) and np.all(places >= 0)
    rule = f"positions must be int32{list(shape)}, one for each value of main, and ascend from 0 on"
    got = f"{places.dtype}{list(places.shape)}, {places[:8].tolist()}... {where}"
    remedy = "sort the positions, and use n, n + 1, ... for unused ones."
    is_right = places.dtype == np.int32 and places.shape == shape and ascend
    laws.need(is_right, "positions", rule, got, remedy)
    rule, remedy = "decompress must put the values of main there", DEFAULT.format("decompress")
    is_there = main is None or np.array_equal(back[places[inside]], main[inside])
    laws.need(is_there, "positions", rule, f"different values {where}", remedy)


def _like(n: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((n,), jnp.float32)


def _step(number: jax.Array | int = 0) -> Step:
    return Step.of(3, number)


def _start(codec: Codec, n: int) -> PyTree:
    return codec.init(_like(n))


def _transform(laws: Laws, codec: Transform, n: int) -> None:
    """Law: a transform is invertible and stateless, and `at_blocks` decodes as decompress does."""
    like = _like(n)
    out = jax.eval_shape(lambda x: codec.compress(x, _start(codec, n), _step()), like)
    more, remedy = jax.tree.leaves((out.payload.side, out.state)), "derive it from fg.codecs.Codec."
    rule = "a transform must have no state and no side"
    laws.need(not more, "transform", rule, f"{more}", remedy)

    @jax.jit
    def run(x: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        step = _step(number)
        main = codec.compress(x, (), step).payload.main
        back = codec.decompress(Payload(main), like, step)
        if codec.reach(n) >= n:  # no blocks
            return back, back, back
        at = jnp.arange(0, main.size, 7)
        few = codec.at_blocks(Sparse(at, main[at]), like, step).put_into(jnp.zeros(n))
        sparse = jnp.zeros_like(main).at[at].set(main[at])
        return back, few, codec.decompress(Payload(sparse), like, step)

    inputs = {ORDINARY: _laws.values(n), "values far below the maximum": _laws.far_below(n)}
    for number in _laws.STEPS:
        for name, x in inputs.items():
            where = f"for {name}, float32[{n}], step {number}"
            back, few, wanted = run(jnp.asarray(x), jnp.int32(number))
            remedy = "derive a codec that loses values from fg.codecs.Codec or fg.codecs.Selector."
            laws.near("transform", "decompress must invert it", back, x, where, remedy, most=LOST)
            rule = "at_blocks must decode the coefficients as decompress does"
            remedy = "return n from `reach` if there are no blocks."
            laws.near("transform", rule, few, wanted, where, remedy)


def _summable(laws: Laws, codec: Codec, n: int) -> None:
    """Law: the sum of payloads decodes to the sum of vectors, and is not finite for a NaN."""
    like = _like(n)

    @jax.jit
    def both(x: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        state, step = _start(codec, n), _step(number)
        out = jax.vmap(lambda row: codec.compress(row, state, step).payload)(x)
        each = jax.vmap(lambda payload: codec.decompress(payload, like, step))(out)
        total = jax.tree.map(lambda a: jnp.sum(a, 0, dtype=a.dtype), out)
        return codec.decompress(total, like, step), each.sum(0)

    own = np.stack([_laws.values(n, seed) for seed in range(WORKERS)])
    inputs = {
        "unrelated": own,
        "related": own + 4 * own[:1],
        "equal": np.repeat(own[:1], WORKERS, 0),
        "zero": np.zeros_like(own),  # detects a constant that is added once for all payloads
    }
    spoiled = own.copy()
    spoiled[3, n // 2] = np.nan
    rule = "the sum of payloads must decode to the sum, and to no number with a NaN"
    remedy = "do not claim `summable`, and use AllGather."
    for number in _laws.STEPS:
        when = f"{WORKERS} rows, float32[{n}], step {number}"
        for name, x in inputs.items():
            whole, each = both(x, jnp.int32(number))
            laws.near("summable", rule, whole, each, f"for {name} {when}", remedy, most=1e-2)
        hidden = _laws.all_finite(both(spoiled, jnp.int32(number))[0])
        got = f"finite values for a NaN at position {n // 2} of one of {when}"
        laws.need(not hidden, "summable", rule, got, remedy)


def _unbiased(laws: Laws, codec: Codec, n: int) -> None:
    """Law: the mean of many decoded draws is x, also for values far below the maximum."""
    like = _like(n)
    drawn = _laws.values(n)
    # Sum many small values, because a single one is nonzero in too few draws.
    large = np.sign(drawn) * np.maximum(np.abs(drawn), np.abs(drawn).max() / 10)
    small = _laws.far_below(n)
    sizes = [(np.abs(small) < 1) & (np.arange(n) % 2 == half) for half in (0, 1)]
    signs = np.stack([np.sign(small) * size for size in sizes]).astype(np.float32)

    def once(key: jax.Array, number: jax.Array) -> jax.Array:
        step = Step.of(key, number)

        def back(x: np.ndarray) -> jax.Array:
            out = codec.compress(jnp.asarray(x), _start(codec, n), step)
            return codec.decompress(out.payload, like, step)

        return jnp.concatenate([back(large), jnp.asarray(signs) @ back(small)])

    batch = max(len(_laws.STEPS), min(DRAWS, 100 * DRAWS // n))  # limited by memory
    keys = jax.random.split(jax.random.key(11), (-(-DRAWS // batch), batch))
    numbers = jnp.asarray(_laws.STEPS)[jnp.arange(batch) % len(_laws.STEPS)]
    draw = jax.jit(jax.vmap(once))
    y = np.zeros((2, n + 2))
    for row in keys:
        got = np.asarray(draw(row, numbers), np.float64)
        y += np.stack([got.sum(0), np.square(got).sum(0)]) / keys.size
    x = np.concatenate([large, signs @ small]).astype(np.float64)
    slack = np.concatenate([np.full(n, 1e-4 * np.abs(large).max()), 1e-2 * x[n:]])
    bound = 5 * np.sqrt(np.maximum(y[1] - y[0] ** 2, 0) / keys.size) + slack
    error = np.abs(y[0] - x)
    # In a short vector, a sum of small values may have no terms.
    worst = int(np.argmax(np.where(x == 0, 0, error) / np.where(x == 0, 1, bound)))
    where = f"position {worst} of {ORDINARY}" if worst < n else "a sum of small values"
    rule = f"the mean of {keys.size} draws must be x within 5 sigma, {bound[worst]:.3g}"
    got = f"{y[0, worst]:.5g} for {x[worst]:.5g}, {where}, float32[{n}]"
    remedy = "do not claim `unbiased`, or round stochastically."
    laws.need(error[worst] <= bound[worst], "unbiased", rule, got, remedy)
