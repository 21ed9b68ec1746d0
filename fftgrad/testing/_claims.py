"""What kinds of codecs promise, and what a codec claims."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fftgrad._contracts import Codec, Payload, PyTree, Sparse, Step, Transform
from fftgrad.testing import _laws
from fftgrad.testing._laws import Laws

DRAWS = 4000
WORKERS = 8


def step_of(seed: Any = 3) -> Step:
    """The step of all checks."""
    return Step.of(seed)


def start(codec: Codec, n: int) -> PyTree:
    """The state of a codec before its first step."""
    return codec.init(jax.ShapeDtypeStruct((n,), jnp.float32))


def positions(
    laws: Laws, x: np.ndarray, main: Any, places: Any, there: Any, back: Any, where: str
) -> None:
    """Law: a selector's positions ascend and differ, and the values of main belong there.

    Args:
      laws: of the selector.
      x: what was compressed.
      main: the values of the payload; None for codes.
      places: the positions.
      there: what `at(x)` returned.
      back: what was decompressed.
      where: which values these are, for the error.
    """
    places, there, back = map(np.asarray, (places, there, back))
    n, shape = x.size, places.shape if main is None else np.shape(main)
    remedy = "sort the positions, and give what is nowhere n, n + 1, ..."
    laws.need(
        places.dtype == np.int32 and places.shape == shape, "positions",
        f"they must be int32{list(shape)}, one for each value of main",
        f"{places.dtype}{list(places.shape)} {where}", remedy,
    )  # fmt: skip
    laws.need(
        np.all(np.diff(places.astype(np.int64)) > 0) and np.all(places >= 0),
        "positions", "they must be at least 0, ascend and differ",
        f"{places[:8].tolist()}... {where}", remedy,
    )  # fmt: skip
    inside = places < n
    laws.need(
        main is None or np.array_equal(back[places[inside]], np.asarray(main)[inside]),
        "positions", "decompress must put the values of main there", f"other values {where}",
        "leave `decompress` out: the default is right.",
    )  # fmt: skip
    laws.need(
        np.array_equal(there, np.where(inside, x[np.minimum(places, n - 1)], 0)),
        "positions", "at(x) must be the values of x there", f"{there[:4].tolist()}... {where}",
        "leave `at` out: the default is right.",
    )  # fmt: skip


def no_state_and_no_side(laws: Laws, codec: Transform, n: int) -> None:
    """Law: all that a transform makes of a vector is its coefficients."""
    x = jax.ShapeDtypeStruct((n,), jnp.float32)
    out = jax.eval_shape(lambda x: codec.compress(x, start(codec, n), step_of()), x)
    more = jax.tree.leaves((out.payload.side, out.state))
    laws.need(
        not more, "transform", "it must have no state, and send nothing beside its coefficients",
        f"{more}", "derive what does from fg.Codec.",
    )  # fmt: skip


def transform(laws: Laws, codec: Transform, n: int) -> None:
    """Law: it is undone, and `at_blocks` returns what coefficients stand for."""
    like = jax.ShapeDtypeStruct((n,), jnp.float32)
    x = _laws.values(n)
    main = codec.compress(jnp.asarray(x), (), step_of()).payload.main
    back = codec.decompress(Payload(main), like, step_of())
    laws.near(
        "transform", f"it must be undone, for heavy-tailed values, float32[{n}]", back, x,
        "derive what loses values from fg.Codec or fg.Selector.",
    )  # fmt: skip
    if codec.reach(n) < n:
        at = jnp.arange(0, main.size, 7)
        sparse = jnp.zeros_like(main).at[at].set(main[at])
        few = codec.at_blocks(Sparse(at, main[at]), like, step_of())
        wanted = codec.decompress(Payload(sparse), like, step_of())
        laws.near(
            "transform", "at_blocks must return what the coefficients stand for",
            few.put_into(jnp.zeros(n)), wanted, "return n from `reach`, and it is not called.",
        )  # fmt: skip


def summable(laws: Laws, codec: Codec, n: int) -> None:
    """Law: the sum of payloads decodes to the sum, and a NaN gets through it."""
    like = jax.ShapeDtypeStruct((n,), jnp.float32)

    @jax.jit
    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = start(codec, n)
        out = jax.vmap(lambda row: codec.compress(row, state, step_of()).payload)(x)
        each = jax.vmap(lambda payload: codec.decompress(payload, like, step_of()))(out)
        total = jax.tree.map(lambda a: jnp.sum(a, 0, dtype=a.dtype), out)
        return codec.decompress(total, like, step_of()), each.sum(0)

    own = np.stack([_laws.values(n, seed) for seed in range(WORKERS)])
    remedy = "do not claim `summable`; AllGather takes codecs that are not."
    inputs = {
        "unrelated": own,
        "related": own + 4 * own[:1],
        "equal": np.repeat(own[:1], WORKERS, 0),
    }
    for name, x in inputs.items():
        whole, each = both(x)
        distance = _laws.relative(whole, each)
        laws.need(
            distance <= 1e-2, "summable", "the sum of payloads must decode to the sum",
            f"a relative difference of {distance:.3g} for {WORKERS} {name} rows, float32[{n}]",
            remedy,
        )  # fmt: skip
    x = own.copy()
    x[3, n // 2] = np.nan
    laws.need(
        not _laws.all_finite(both(x)[0]), "summable", "a NaN must get through the sum of payloads",
        f"finite values only, for a NaN at position {n // 2} of one of {WORKERS} rows", remedy,
    )  # fmt: skip


def unbiased(laws: Laws, codec: Codec, n: int) -> None:
    """Law: the mean over many draws is x."""
    like = jax.ShapeDtypeStruct((n,), jnp.float32)
    # No value is so small that it is drawn once in all draws, or never.
    drawn_from = _laws.values(n)
    x = np.sign(drawn_from) * np.maximum(np.abs(drawn_from), np.abs(drawn_from).max() / 10)

    def once(key: jax.Array) -> jax.Array:
        step = Step.of(key)
        out = codec.compress(jnp.asarray(x), start(codec, n), step)
        return codec.decompress(out.payload, like, step)

    drawn = jax.jit(jax.vmap(once))(jax.random.split(jax.random.key(11), DRAWS))
    y = np.asarray(drawn, np.float64)
    bound = 5 * np.std(y, axis=0) / math.sqrt(DRAWS) + 1e-4 * np.abs(x).max()
    error = np.abs(y.mean(0) - x.astype(np.float64))
    worst = int(np.argmax(error / bound))
    laws.need(
        error[worst] <= bound[worst], "unbiased",
        f"the mean of {DRAWS} draws must be x within 5 sigma, {bound[worst]:.3g}",
        f"{y.mean(0)[worst]:.5g} for {x[worst]:.5g} at position {worst} of heavy-tailed values, "
        f"float32[{n}]",
        "do not claim `unbiased`, or round up with a chance of the rest.",
    )  # fmt: skip
