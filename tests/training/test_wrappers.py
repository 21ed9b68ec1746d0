"""Wrappers around compressed_pmean, each inside each other: the table in docs/api/wrappers.md."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import CODECS, gradients
from jax.sharding import PartitionSpec as P
from parallel import AXIS, everywhere, mesh_of, train_step

import fftgrad as fg

LIKE = {"w": jax.ShapeDtypeStruct((10, 11), "float32"), "b": jax.ShapeDtypeStruct((7,), "float32")}
ZEROS = {"w": jnp.zeros((10, 11)), "b": jnp.zeros(7)}
EXCHANGE = fg.AllGather(CODECS["top-k 6 bits"])
CHECKED = pytest.mark.parametrize("check_vma", [True, False])


def compressed(**options):
    return fg.compressed_pmean(EXCHANGE, fg.ErrorFeedback(), axis_name=AXIS, **options)


def run(tx, steps, *, check_vma=True, seed=0):
    """The updates of some steps, and the last state."""
    init, update = train_step(tx, 4, check_vma=check_vma, like=LIKE)
    state, out = init(ZEROS), []
    for step in range(steps):
        updates, state = update(gradients(LIKE, 4, seed=seed + step), state)
        out.append(jax.tree.map(np.asarray, updates))
    assert update._cache_size() == 1
    return out, state


def assert_close(some, others):
    for a, b in zip(jax.tree.leaves(some), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@functools.cache
def plain():
    return run(optax.chain(compressed(), optax.sgd(0.1)), 4)[0]


def in_chain():
    return optax.chain(compressed(), optax.sgd(0.1))


def in_inject_hyperparams():
    return optax.inject_hyperparams(
        lambda learning_rate: optax.chain(compressed(), optax.sgd(learning_rate))
    )(learning_rate=0.1)


def in_apply_if_finite_after_it():
    return optax.chain(compressed(), optax.apply_if_finite(optax.sgd(0.1), 3))


def in_partition():
    groups = {"all": compressed(allow_masked=True), "none": optax.identity()}
    return optax.chain(optax.partition(groups, {"w": "all", "b": "all"}), optax.sgd(0.1))


def in_accumulate():
    return fg.multi_steps(in_chain(), every=1)


AS_PLAIN = [
    in_chain,
    in_inject_hyperparams,
    in_apply_if_finite_after_it,
    in_partition,
    in_accumulate,
]


@CHECKED
@pytest.mark.parametrize("make", AS_PLAIN, ids=lambda make: make.__name__)
def test_it_is_as_without_the_wrapper(make, check_vma):
    assert_close(run(make(), 4, check_vma=check_vma)[0], plain())


@CHECKED
def test_delayed_it_is_a_step_late(check_vma):
    delayed = optax.chain(fg.training.delay(), compressed(), optax.sgd(0.1))
    updates, _ = run(delayed, 4, check_vma=check_vma)
    assert all(np.all(leaf == 0) for leaf in updates[0].values())
    assert_close(updates[1:], plain()[:3])


@CHECKED
@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32")], ids=str)
def test_a_delayed_gradient_keeps_its_bits_and_the_state_its_dtype(dtypes, check_vma):
    """Also where parameters and gradients have different dtypes, so that a step can be scanned."""
    of_params, of_grads = dtypes
    params = {"w": jnp.zeros((10, 11), of_params), "b": jnp.zeros(7, of_params)}
    grads = [
        jax.tree.map(lambda g: g.astype(of_grads), gradients(LIKE, 4, seed=seed)) for seed in (1, 2)
    ]
    run = everywhere(
        "shard_map" if check_vma else "shard_map unchecked", fg.training.delay().update, 4
    )
    start = jax.tree.map(lambda a: jnp.stack([a] * 4), fg.training.delay().init(params))
    _, state = run(grads[0], start)
    assert jax.tree.map(lambda a: a.dtype, state) == jax.tree.map(lambda a: a.dtype, start)
    late, _ = run(grads[1], state)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype, late, grads[0]))
    assert jax.tree.all(jax.tree.map(np.array_equal, late, grads[0]))


def test_delayed_no_collective_waits_for_the_gradient():
    """Nothing that is sent depends on this step's gradients, nor they on what is received."""
    tx = optax.chain(fg.training.delay(), compressed(), optax.sgd(0.1))
    assert not reads_gradient(tx, leaf="w")
    assert reads_gradient(optax.chain(compressed(), optax.sgd(0.1)), leaf="w")


@pytest.mark.parametrize("reverse", [False, True])
def test_a_bucket_waits_for_its_own_leaves_only(reverse):
    """Leaves come in the order b, w; buckets from the last one on."""
    tx = compressed(bucketing=fg.Bucketing(bucket_bytes=4 * 110)) if reverse else compressed()
    assert [reads_gradient(tx, leaf, nth=0) for leaf in ("b", "w")] == [not reverse, True]


def test_a_bucket_waits_for_the_one_before_it():
    """By more than a barrier, or a scheduler would put all collectives at the end."""
    tx = compressed(bucketing=fg.Bucketing("leaf", bucket_bytes=4 * 110))
    assert [reads_gradient(tx, leaf, nth=0) for leaf in ("b", "w")] == [False, True]
    assert [reads_gradient(tx, leaf, nth=1) for leaf in ("b", "w")] == [True, True]
    more = {**ZEROS, "x": ZEROS["w"]}
    assert [reads_gradient(tx, leaf, nth=2, zeros=more) for leaf in more] == [True, True, True]


def reads_gradient(tx, leaf, nth=0, zeros=ZEROS):
    """Whether what the n-th all-gather sends depends on a leaf of the gradient."""
    state = jax.tree.map(jnp.asarray, tx.init(zeros))

    def sent(value):
        def update(value):
            return tx.update({**zeros, leaf: value}, state)[0]

        return jax.make_jaxpr(update, axis_env=[(AXIS, 4)])(value)

    found = []

    def follow(jaxpr, touched):
        """Which results depend on the arguments that are touched."""
        tainted = {v for v, own in zip(jaxpr.invars, touched, strict=True) if own}
        for eqn in jaxpr.eqns:
            inputs = [not hasattr(v, "val") and v in tainted for v in eqn.invars]
            outputs = [any(inputs)] * len(eqn.outvars)
            if eqn.primitive.name == "all_gather":
                found.append(any(inputs))
            elif eqn.primitive.name == "optimization_barrier":
                outputs = inputs  # XLA drops what goes through one and is not read behind it
            elif eqn.primitive.name in ("jit", "pjit"):
                outputs = follow(eqn.params["jaxpr"].jaxpr, inputs)
            tainted |= {v for v, own in zip(eqn.outvars, outputs, strict=True) if own}
        return [not hasattr(v, "val") and v in tainted for v in jaxpr.outvars]

    follow(sent(zeros[leaf]).jaxpr, [True])
    return found[nth]


@CHECKED
def test_accumulating_exchanges_once_for_all(check_vma):
    tx = fg.multi_steps(in_chain(), every=2)
    updates, _ = run(tx, 4, check_vma=check_vma)
    for early in updates[0::2]:
        assert all(np.all(leaf == 0) for leaf in early.values())
    init, update = train_step(in_chain(), 4, check_vma=check_vma, like=LIKE)
    state, wanted = init(ZEROS), []
    for first in (0, 2):
        pair = [gradients(LIKE, 4, seed=first + i) for i in range(2)]
        mean = jax.tree.map(lambda a, b: (a + b) / 2, *pair)
        out, state = update(mean, state)
        wanted.append(out)
    assert_close(updates[1::2], wanted)
    init, update = train_step(tx, 4, check_vma=check_vma, like=LIKE)
    found = fg.audit(update.lower(gradients(LIKE, 4), init(ZEROS)).compile())
    assert {c.branch for c in found} == {(1,)}
    assert sum(c.bytes for c in found) == fg.wire_bytes(EXCHANGE, LIKE)


@pytest.mark.parametrize("every", [3, 4])
def test_accumulating_keeps_its_period_after_the_largest_int32_step(every):
    tx = fg.multi_steps(optax.sgd(1.0), every=every)
    update, state, start = jax.jit(tx.update), tx.init(jnp.zeros(2)), 2**31 - 4
    state = state._replace(step=jnp.int32(start))
    for number in range(start + 1, start + 12):
        out, state = update(jnp.ones(2), state)
        assert bool(out[0] != 0) == (number % every == 0)
        assert int(state.step) > 2**29


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_accumulated_mean_loses_nothing_to_a_narrow_dtype(dtype):
    tx = fg.multi_steps(optax.sgd(1.0), every=2)
    update, state = jax.jit(tx.update), tx.init(jnp.zeros(9, dtype))
    applied, wanted = np.zeros(9), np.zeros(9)
    for number in range(40):
        grad = jnp.linspace(0.3, 0.4 + number / 100, 9).astype(dtype)
        out, state = update(grad, state)
        assert out.dtype == dtype
        applied -= np.asarray(out, np.float64)
        wanted += np.asarray(grad, np.float64) / 2
    left = np.asarray(state.total.worker_rows).ravel()
    np.testing.assert_allclose(applied + left, wanted, atol=1e-5)
    for number in range(4):
        out, state = update(jnp.full(9, np.nan if number < 2 else 0.5, dtype), state)
    np.testing.assert_array_equal(out, jnp.full(9, -0.5, dtype))


def test_multi_steps_is_refused_or_exchanges_in_every_step():
    tx = optax.MultiSteps(in_chain(), 2)
    with pytest.raises(ValueError, match=r"fg\.multi_steps in place of optax"):
        run(tx, 1)
    init, update = train_step(tx, 4, check_vma=False, like=LIKE)
    found = fg.audit(update.lower(gradients(LIKE, 4), init(ZEROS)).compile())
    assert {c.branch for c in found} == {()}  # in every step, whatever becomes of it
    updates, _ = run(tx, 2, check_vma=False)
    grads = [gradients(LIKE, 4, seed=step) for step in range(2)]
    init, update = train_step(in_chain(), 4, check_vma=False, like=LIKE)
    expected, _ = update(jax.tree.map(lambda a, b: (a + b) / 2, *grads), init(ZEROS))
    assert_close(updates[1], expected)


def test_what_an_update_needs_besides_reaches_the_transformation_of_a_worker():
    """The loss of each worker makes its own rate."""
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=0)
    tx = fg.local_state(plateau)
    state, alone = tx.init(ZEROS), plateau.init(ZEROS)
    for value in (1.0, 2.0, 3.0):
        _, state = tx.update(ZEROS, state, ZEROS, value=jnp.float32(value))
        _, alone = plateau.update(ZEROS, alone, ZEROS, value=jnp.float32(value))
    assert state.worker_rows.scale.tolist() == [float(alone.scale)] != [1.0]
    clip = fg.local_state(optax.clip(1.0))  # which takes none
    clip.update(ZEROS, clip.init(ZEROS), value=jnp.float32(1))


@CHECKED
def test_accumulation_in_a_scan_and_a_checkpointed_loss(check_vma):
    tx = in_chain()
    mesh, target = mesh_of(4), jnp.linspace(-1.0, 1.0, 9)
    params = jnp.zeros(9)
    specs = fg.state_specs(jax.eval_shape(tx.init, params), AXIS)

    @jax.checkpoint
    def loss(p, x):
        return jnp.mean(jnp.tanh(x @ (p - target)) ** 2)

    def step(params, state, x, scanned):
        own = jax.lax.pcast(params, AXIS, to="varying") if check_vma else params
        if scanned:

            def add(total, part):
                return total + jax.grad(loss)(own, part) / 2, None

            grad, _ = jax.lax.scan(add, 0 * own, x.reshape(2, -1, 9))
        else:
            grad = jax.grad(loss)(own, x)
        updates, state = tx.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    results = []
    for scanned in (False, True):
        wrap = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)
        body = functools.partial(step, scanned=scanned)
        update = jax.jit(wrap(body, in_specs=(P(), specs, P(AXIS)), out_specs=(P(), specs)))
        state = jax.jit(wrap(tx.init, in_specs=P(), out_specs=specs))(params)
        out = params
        for seed in range(3):
            x = np.random.default_rng(seed).standard_normal((32, 9)).astype(np.float32)
            out, state = update(out, state, x)
        results.append(out)
    np.testing.assert_allclose(*results, rtol=1e-3, atol=1e-5)
    assert np.linalg.norm(results[0]) > 0
