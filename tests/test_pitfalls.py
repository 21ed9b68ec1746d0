"""Mistakes that implementations of these methods have made, each as a test.

What is not here is a law elsewhere: gradients that are summed already, and a step that is skipped
(test_pmean), a codec that hides a NaN (test_exchanges), replicas that drift (test_exchanges).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import CODECS, EXCHANGES, MEMORIES, METHODS, SLOW, gradients, values
from parallel import AXIS, everywhere, flat, of_size
from stepwise import once

import fftgrad as fg

STEP = fg.Step.of(3)


@functools.partial(jax.jit, static_argnums=0)
def round_trip(codec, x):
    return fg.decompress(codec, fg.compress(codec, x, step=STEP), x, step=STEP)


def test_positions_do_not_take_the_width_of_values():
    codec = fg.chain(fg.TopK(k=2), fg.Cast("float16"))
    x = np.zeros(200_000, np.float32)
    x[[70_000, 199_999]] = 1.0, -2.0
    np.testing.assert_array_equal(round_trip(codec, x), x)


def test_long_shards_are_selected_from_where_axes_are_tracked():
    """Under jax.vmap the branches of a selector are typed anew, and must not hold constants."""
    exchange = fg.TwoStage(fg.TopK(fraction=0.01), workers=2)
    rows = jax.ShapeDtypeStruct((2, 3 * 32_768), "float32")
    mean = everywhere("shard_map", lambda row: once(exchange, row).mean, 2)
    assert jax.eval_shape(mean, rows) == rows


def test_an_axis_of_prime_length_is_transformed():
    transform = fg.Dct(block=64, shape=(127, 3))
    y = np.asarray(jax.jit(lambda x: fg.compress(transform, x).main)(np.ones(381, np.float32)))
    # Two tiles, one of them with a row of padding: a few large coefficients, not 381.
    assert np.sum(np.sort(np.square(y))[-8:]) > 0.97 * 381


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1.0, 1e20, 3e38])
def test_a_norm_of_any_size_is_clipped(size):
    """The squares of 1e20 are no float32, and those of 1e-30 are zero."""
    size = np.float32(size)
    grads = {"w": values((100,)) / 100 * size, "b": np.full(1, size)}
    bound = size / 2
    tx = fg.training.clip_by_local_norm(bound)
    given, found = flat(grads), flat(jax.jit(lambda g: tx.update(g, tx.init(g))[0])(grads))
    norm = np.linalg.norm(given)
    assert norm > bound
    np.testing.assert_allclose(found, given * (bound / norm), rtol=1e-5, atol=1e-6 * size)


@pytest.mark.parametrize("size", [3, 5_000])
def test_clipping_hides_nothing_that_is_not_finite(size):
    tx = fg.training.clip_by_local_norm(1.0)
    clip = jax.jit(lambda g: tx.update(g, tx.init(g))[0])
    for bad in (np.nan, np.inf, -np.inf):
        w = np.ones(size, np.float32)
        w[size // 2] = bad
        clipped = clip({"w": w, "b": np.full(2, 1e20, np.float32)})
        assert not np.isfinite(np.asarray(clipped["w"])).all()


@pytest.mark.parametrize("search", ["binary", "exact"])
def test_a_search_for_a_threshold_ends(search):
    """It lowers the threshold by steps that no difference between the values decides."""
    codec = fg.Threshold(fraction=0.1, search=search)
    compress = jax.jit(lambda x: fg.compress(codec, x))
    for first, last in (
        (0, 0),
        (-3, -3),
        (1e-45, 1e-45),
        (1, 1.0000001),
        (np.inf,) * 2,
        (np.nan,) * 2,
    ):
        payload = compress(np.array([first] * 39 + [last], np.float32))
        assert int(payload.side.length[0]) <= 8
        if np.isfinite(first) and abs(first) > 1e-30:
            assert int(payload.side.length[0]) >= 4


def in_64_bits_too(run, *args):
    narrow = jax.jit(run)(*args)
    with jax.enable_x64(True):
        wide = jax.jit(lambda *args: run(*args))(*args)
    jax.tree.map(np.testing.assert_array_equal, narrow, wide)


@pytest.mark.full
def test_64_bits_change_nothing():
    """Sums of small integers become wide with them, and branches then differ in dtype."""
    codecs = fg.Threshold(0.1), fg.chain(fg.TopK(k=9), fg.RangeFloat(6)), fg.Budget(ratio=300)
    in_64_bits_too(lambda x: [round_trip(codec, x) for codec in codecs], values((70_000,)))


@pytest.mark.parametrize("exchange", [fg.PowerSgd(2), fg.exchanges.AcpSgd(2)], ids=repr)
def test_64_bits_change_no_dtype_of_a_factor(exchange):
    like = {"matrix": jax.ShapeDtypeStruct((9, 8), "float32")}
    narrow = jax.eval_shape(lambda: exchange.init(like))
    with jax.enable_x64(True):
        assert jax.eval_shape(lambda: exchange.init(like)) == narrow


@pytest.mark.usefixtures("every_platform")
def test_64_bits_change_nothing_of_many_leaves():
    tx = fg.compressed_pmean(fg.AllGather(fg.Sign()), axis_name=AXIS)
    mean = jax.vmap(lambda own: tx.update(own, tx.init(own))[0], axis_name=AXIS)
    in_64_bits_too(mean, {str(i): values((2, 30), i) for i in range(10)})


LIKE = {
    "w": jax.ShapeDtypeStruct((4, 10, 15), "float32"),
    "b": jax.ShapeDtypeStruct((4, 5), "bfloat16"),
}
WIDE = {name: leaf.update(dtype="float32") for name, leaf in LIKE.items()}
UPDATES = {
    name: (fg.compressed_pmean(fg.AllGather(fg.TopK(k=3)), memory, axis_name=AXIS), LIKE)
    for name, memory in MEMORIES.items()
} | {name: (METHODS[name](AXIS), WIDE) for name in ("beer", "choco_sgd", "diloco", "sparse_loco")}
"""Updates whose laws elsewhere run without strict promotion; optax has narrow leaves of its own."""


@pytest.mark.parametrize("name", UPDATES)
def test_strict_promotion_of_dtypes_is_enough(name):
    tx, like = UPDATES[name]

    def step(params):
        return tx.update(params, tx.init(params), params)[0]

    with jax.numpy_dtype_promotion("strict"):
        assert jax.eval_shape(jax.vmap(step, axis_name=AXIS), like) == like


DEBUG = {"nans": jax.debug_nans, "infs": jax.debug_infs, "disable_jit": jax.disable_jit}
"""Settings of JAX under which a healthy step has to run."""
SEEN = {
    ("nans", "update", "diloco"): (),
    ("disable_jit", "codec", "top-k"): pytest.mark.full,  # 200 programs
}
"""Rows that once failed: the others are slow."""
ROWS = [*(("codec", name) for name in CODECS), *(("update", n) for n in [*EXCHANGES, *METHODS])]
RUNS = [(how, *row) for how in DEBUG for row in ROWS]


@pytest.mark.parametrize(
    ("how", "kind", "name"), [pytest.param(*r, marks=SEEN.get(r, SLOW)) for r in RUNS]
)
def test_debug_settings_are_survived(how, kind, name):
    """By a codec alone, and by an update from a new state and from the next one."""
    run = codec_in_debug if kind == "codec" else update_in_debug
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run(how, name)))


def codec_in_debug(how, name):
    x, step = values((150,)), fg.Step.of(0)
    with DEBUG[how](True):
        payload = fg.compress(CODECS[name], jnp.asarray(x), step=step)
        return fg.decompress(CODECS[name], payload, like=x, step=step)


def update_in_debug(how, name):
    tx = (
        METHODS[name](AXIS)
        if name in METHODS
        else fg.compressed_pmean(of_size(EXCHANGES[name], 4), fg.ErrorFeedback(), axis_name=AXIS)
    )
    like = {"w": np.zeros((10, 15), np.float32), "scalar": np.zeros((), np.float32)}
    grads = gradients(like, 4)
    params = jax.tree.map(lambda g: np.ones(g.shape, np.float32), grads)

    def update(grads, state, params):
        run = optax.with_extra_args_support(tx).update
        return run(grads, state, params, value=jnp.float32(1.0))

    init, update = jax.vmap(tx.init), jax.vmap(update, axis_name=AXIS)
    with DEBUG[how](True):
        if how == "disable_jit":
            return update(grads, init(params), params)[0]
        init, update = jax.jit(init), jax.jit(update)
        return update(grads, update(grads, init(params), params)[1], params)[0]
