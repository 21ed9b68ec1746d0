"""Wrappers around compressed_pmean, each inside each other: the table in docs/api/wrappers.md."""

import functools

import jax
import numpy as np
import optax
import pytest
from cases import CODECS, gradients
from parallel import AXIS, assert_close, train_step, zeros

import fftgrad as fg

LIKE = {"w": jax.ShapeDtypeStruct((10, 11), "float32"), "b": jax.ShapeDtypeStruct((7,), "float32")}
ZEROS = zeros(LIKE)
EXCHANGE = fg.AllGather(CODECS["top-k 6 bits"])
SIGNS = fg.AllGather(fg.Sign())
CHECKED = pytest.mark.parametrize("check_vma", [True, False])


def compressed(exchange=EXCHANGE, **options):
    return fg.compressed_pmean(exchange, fg.ErrorFeedback(), axis_name=AXIS, **options)


GRADS = [gradients(LIKE, 4, seed=seed) for seed in range(4)]


def run(tx, grads=GRADS, *, check_vma=True):
    """The updates of some steps, and what their program sends."""
    init, update = train_step(tx, 4, check_vma=check_vma, like=LIKE)
    state, out = init(ZEROS), []
    compiled = update.lower(grads[0], state).compile()
    for rows in grads:
        updates, state = compiled(rows, state)
        out.append(jax.device_get(updates))
    return out, fg.audit(compiled)


@functools.cache
def plain():
    return run(in_chain())[0]


def in_chain():
    return optax.chain(compressed(), optax.sgd(0.1))


def in_wrappers():
    """Each around the one before."""
    groups = {"all": compressed(allow_masked=True), "none": optax.identity()}
    mean = optax.partition(groups, {"w": "all", "b": "all"})
    return optax.inject_hyperparams(
        lambda learning_rate: optax.chain(mean, optax.apply_if_finite(optax.sgd(learning_rate), 3))
    )(learning_rate=0.1)


@CHECKED
@pytest.mark.parametrize("make", [in_chain, in_wrappers], ids=lambda make: make.__name__)
def test_it_is_as_without_the_wrapper(make, check_vma):
    assert_close(run(make(), check_vma=check_vma)[0], plain())


@pytest.mark.parametrize("reverse", [False, True])
def test_a_bucket_waits_for_its_own_leaves_only(reverse):
    """Leaves come in the order b, w; buckets from the last one on."""
    options = {"bucketing": fg.Bucketing(bucket_bytes=4 * 110)} if reverse else {}
    tx = compressed(SIGNS, **options)
    assert [reads_gradient(tx, leaf)[0] for leaf in ("b", "w")] == [not reverse, True]


def test_a_bucket_waits_for_the_one_before_it():
    """By more than a barrier, or a scheduler would put all collectives at the end."""
    tx = compressed(SIGNS, bucketing=fg.Bucketing("leaf", bucket_bytes=4 * 110))
    more = {**ZEROS, "x": ZEROS["w"]}
    found = {leaf: reads_gradient(tx, leaf, more) for leaf in more}
    assert found == {"b": [False] * 2 + [True], "w": [False, True, True], "x": [True] * 3}


def reads_gradient(tx, leaf, zeros=ZEROS):
    """Whether what each all-gather sends depends on a leaf of the gradient."""

    def update(value):
        return tx.update({**zeros, leaf: value}, tx.init(zeros))[0]

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

    follow(jax.make_jaxpr(update, axis_env=[(AXIS, 4)])(zeros[leaf]).jaxpr, [True])
    return found


def mean_of(pair):
    return jax.tree.map(lambda a, b: (a + b) / 2, *pair)


@CHECKED
def test_accumulating_exchanges_once_for_all(check_vma):
    updates, found = run(fg.training.multi_steps(in_chain(), every=2), check_vma=check_vma)
    for early in updates[0::2]:
        assert all(np.all(leaf == 0) for leaf in early.values())
    wanted, _ = run(in_chain(), [mean_of(GRADS[:2]), mean_of(GRADS[2:])], check_vma=check_vma)
    assert_close(updates[1::2], wanted)
    assert {c.branch for c in found} == {(1,)}
    assert sum(c.bytes for c in found) == fg.wire_bytes(EXCHANGE, LIKE)


@pytest.mark.parametrize("every", [3, 4])
def test_accumulating_keeps_its_period_after_the_largest_int32_step(every):
    tx = fg.training.multi_steps(optax.sgd(1.0), every=every)
    ones, start = np.ones(2, np.float32), 2**31 - 4
    update, state = jax.jit(tx.update), jax.jit(tx.init)(ones)
    state = state._replace(step=np.int32(start))
    for number in range(start + 1, start + 12):
        out, state = update(ones, state)
        assert bool(np.any(out)) == (number % every == 0)
        assert int(state.step) > 2**29


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_accumulated_mean_loses_nothing_to_a_narrow_dtype(dtype):
    tx = fg.training.multi_steps(optax.sgd(1.0), every=2)
    update, state = jax.jit(tx.update), jax.jit(tx.init)(np.zeros(9, dtype))
    applied, wanted = np.zeros(9), np.zeros(9)
    for number in range(40):
        grad = np.linspace(0.3, 0.4 + number / 100, 9).astype(dtype)
        out, state = update(grad, state)
        assert out.dtype == dtype
        applied -= np.asarray(out, np.float64)
        wanted += np.asarray(grad, np.float64) / 2
    left = np.asarray(state.total.worker_rows).ravel()
    np.testing.assert_allclose(applied + left, wanted, atol=1e-5)
    for number in range(4):
        out, state = update(np.full(9, np.nan if number < 2 else 0.5, dtype), state)
    np.testing.assert_array_equal(out, np.full(9, -0.5, dtype))


def test_multi_steps_is_refused_or_exchanges_in_every_step():
    tx = optax.MultiSteps(in_chain(), 2)
    with pytest.raises(
        (TypeError, ValueError), match=r"fg\.training\.multi_steps in place of optax"
    ):
        run(tx, GRADS[:1])
    updates, found = run(tx, GRADS[:2], check_vma=False)
    assert {c.branch for c in found} == {()}  # in every step, whatever becomes of it
    expected, _ = run(in_chain(), [mean_of(GRADS[:2])], check_vma=False)
    assert_close(updates[1:], expected)


def test_what_an_update_needs_besides_reaches_the_transformation_of_a_worker():
    """The loss of each worker makes its own rate."""
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=0)
    tx = fg.training.local_state(plateau)
    zeros = np.zeros(3, np.float32)

    @jax.jit
    def both(state, alone, value):
        _, state = tx.update(zeros, state, zeros, value=value)
        _, alone = plateau.update(zeros, alone, zeros, value=value)
        return state, alone

    state, alone = jax.jit(lambda: (tx.init(zeros), plateau.init(zeros)))()
    for value in (1.0, 2.0, 3.0):
        state, alone = both(state, alone, np.float32(value))
    assert state.worker_rows.scale.tolist() == [float(alone.scale)] != [1.0]
    clip = fg.training.local_state(optax.clip(1.0))  # which takes none
    jax.eval_shape(lambda z: clip.update(z, clip.init(z), value=np.float32(1)), zeros)
