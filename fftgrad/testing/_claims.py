"""What kinds of codecs promise, and what a codec claims."""

import jax
import jax.numpy as jnp
import numpy as np

from fftgrad._contracts import Codec, Payload, PyTree, Sparse, Step, Transform
from fftgrad.testing import _laws
from fftgrad.testing._laws import Laws

DRAWS = 4000
LOST = 5e-3
"""What a transform may lose, as one in half precision does."""
WORKERS = 8


def step_of(number: jax.Array | int = 0) -> Step:
    """The step of that number, in all checks."""
    return Step.of(3, number)


def start(codec: Codec, n: int) -> PyTree:
    """The state of a codec before its first step."""
    return codec.init(jax.ShapeDtypeStruct((n,), jnp.float32))


def transform(laws: Laws, codec: Transform, n: int) -> None:
    """Law: it sends coefficients only, is undone, and `at_blocks` returns what they stand for."""
    like = jax.ShapeDtypeStruct((n,), jnp.float32)
    out = jax.eval_shape(lambda x: codec.compress(x, start(codec, n), step_of()), like)
    more = jax.tree.leaves((out.payload.side, out.state))
    laws.need(
        not more, "transform", "it must have no state, and send nothing beside its coefficients",
        f"{more}", "derive what does from fg.Codec.",
    )  # fmt: skip

    @jax.jit
    def run(x: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        step = step_of(number)
        main = codec.compress(x, (), step).payload.main
        back = codec.decompress(Payload(main), like, step)
        if codec.reach(n) >= n:  # it has no blocks
            return back, back, back
        at = jnp.arange(0, main.size, 7)
        few = codec.at_blocks(Sparse(at, main[at]), like, step).put_into(jnp.zeros(n))
        sparse = jnp.zeros_like(main).at[at].set(main[at])
        return back, few, codec.decompress(Payload(sparse), like, step)

    inputs = {
        "heavy-tailed values": _laws.values(n),
        "values far below the maximum": _laws.far_below(n),
    }
    for number in _laws.STEPS:
        for name, x in inputs.items():
            where = f"for {name}, float32[{n}], step {number}"
            back, few, wanted = run(jnp.asarray(x), jnp.int32(number))
            remedy = "derive what loses values from fg.Codec or fg.Selector."
            laws.near("transform", "it must be undone", back, x, where, remedy, most=LOST)
            rule = "at_blocks must return what the coefficients stand for"
            remedy = "return n from `reach`, and it is not called."
            laws.near("transform", rule, few, wanted, where, remedy)


def summable(laws: Laws, codec: Codec, n: int) -> None:
    """Law: the sum of payloads decodes to the sum, and a NaN gets through it."""
    like = jax.ShapeDtypeStruct((n,), jnp.float32)

    @jax.jit
    def both(x: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        state, step = start(codec, n), step_of(number)
        out = jax.vmap(lambda row: codec.compress(row, state, step).payload)(x)
        each = jax.vmap(lambda payload: codec.decompress(payload, like, step))(out)
        total = jax.tree.map(lambda a: jnp.sum(a, 0, dtype=a.dtype), out)
        return codec.decompress(total, like, step), each.sum(0)

    own = np.stack([_laws.values(n, seed) for seed in range(WORKERS)])
    inputs = {
        "unrelated": own,
        "related": own + 4 * own[:1],
        "equal": np.repeat(own[:1], WORKERS, 0),
        "zero": np.zeros_like(own),  # which nothing that is added once for all payloads leaves zero
    }
    spoiled = own.copy()
    spoiled[3, n // 2] = np.nan
    remedy = "do not claim `summable`; AllGather takes codecs that are not."
    for number in _laws.STEPS:
        when = f"{WORKERS} rows, float32[{n}], step {number}"
        for name, x in inputs.items():
            whole, each = both(x, jnp.int32(number))
            rule = "the sum of payloads must decode to the sum"
            laws.near("summable", rule, whole, each, f"for {name} {when}", remedy, most=1e-2)
        laws.need(
            not _laws.all_finite(both(spoiled, jnp.int32(number))[0]), "summable",
            "a NaN must get through the sum of payloads",
            f"finite values for a NaN at position {n // 2} of one of {when}", remedy,
        )  # fmt: skip


def unbiased(laws: Laws, codec: Codec, n: int) -> None:
    """Law: the mean over many draws is x, of each value and of those far below the maximum."""
    like = jax.ShapeDtypeStruct((n,), jnp.float32)
    drawn = _laws.values(n)
    # No value is so small that it is drawn once in all draws, or never.
    large = np.sign(drawn) * np.maximum(np.abs(drawn), np.abs(drawn).max() / 10)
    # Those that are, all of one size together, are drawn often enough.
    small = _laws.far_below(n)
    sizes = [(np.abs(small) < 1) & (np.arange(n) % 2 == half) for half in (0, 1)]
    signs = np.stack([np.sign(small) * size for size in sizes]).astype(np.float32)

    def once(key: jax.Array, number: jax.Array) -> jax.Array:
        step = Step.of(key, number)

        def back(x: np.ndarray) -> jax.Array:
            out = codec.compress(jnp.asarray(x), start(codec, n), step)
            return codec.decompress(out.payload, like, step)

        return jnp.concatenate([back(large), jnp.asarray(signs) @ back(small)])

    batch = max(len(_laws.STEPS), min(DRAWS, 100 * DRAWS // n))  # which fits into memory
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
    # A few values may have none of a size.
    worst = int(np.argmax(np.where(x == 0, 0, error) / np.where(x == 0, 1, bound)))
    names = [f"position {i} of heavy-tailed values" for i in range(n)]
    names += [f"the sum of all that are 1/{below} of the maximum or less" for below in (300, 30)]
    laws.need(
        error[worst] <= bound[worst], "unbiased",
        f"the mean of {keys.size} draws must be x within 5 sigma, {bound[worst]:.3g}",
        f"{y[0, worst]:.5g} for {x[worst]:.5g}, {names[worst]}, float32[{n}]",
        "do not claim `unbiased`, or round up with a chance of the rest.",
    )  # fmt: skip
