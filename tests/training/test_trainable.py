"""Frozen leaves: what is not trained has no bytes, no residual, and no say."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import METHODS, SLOW, gradients
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from parallel import AXIS, everywhere, mesh_of

import fftgrad as fg

WORKERS = 4
LIKE = {
    "base": {"w": jax.ShapeDtypeStruct((10, 11), "float32"), "table": None},
    "layers": [
        {
            "scalar": jax.ShapeDtypeStruct((4,), "float32"),
            "lora": jax.ShapeDtypeStruct((6, 8), "float32"),
        },
        {"scalar": jax.ShapeDtypeStruct((9,), "float32")},
    ],
}
MASK = {"base": False, "layers": [{"scalar": True, "lora": True}, {"scalar": False}]}
EXCHANGE = fg.AllGather(fg.TopK(k=26))


def split(tree):
    """The trained leaves, as a tree that has no others."""
    return {"layers": [dict(tree["layers"][0])]}


def by_names(tree):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "[0]" in jax.tree_util.keystr(path), tree
    )


HALVES = jax.tree.map(lambda s: np.full(s.shape, 0.5, np.float32), LIKE)


def optimizer():
    return optax.chain(
        fg.compressed_pmean(EXCHANGE, fg.ErrorFeedback(), axis_name=AXIS), optax.rmsprop(0.1)
    )


QUICK = {"diloco", "scale_by_dion", "feedback_adam", "sharded"}


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=SLOW) for n in METHODS]
)
def test_every_method_does_what_it_does_without_the_frozen_leaves(name):
    """Updates and states to the bit, while the gradients of the frozen leaves are NaN."""
    tx = METHODS[name](AXIS)
    frozen = fg.trainable(tx, MASK)
    grads = gradients(LIKE, WORKERS)

    def two(tx, grads):
        params = jax.tree.map(jnp.ones_like, grads)
        state = tx.init(params)
        for _ in range(2):
            moves, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, moves)
        return params, state

    bad = jax.tree.map(lambda g: np.full_like(g, np.nan), grads)
    bad["layers"][0] = grads["layers"][0]
    both = everywhere("vmap", lambda bad, own: (two(frozen, bad), two(tx, own)), WORKERS)
    (params, state), expected = both(bad, split(grads))
    jax.tree.map(np.testing.assert_array_equal, split(params), expected[0])
    for found, wanted in zip(*map(jax.tree.leaves, (state, expected[1])), strict=True):
        np.testing.assert_array_equal(found, wanted)
    for leaf in (params["base"]["w"], params["layers"][1]["scalar"]):
        np.testing.assert_array_equal(leaf, 1)


@pytest.mark.parametrize(
    ("mask", "check_vma"), [(MASK, True), (by_names, False)], ids=["tree", "by names"]
)
def test_a_training_step_sends_and_keeps_the_trained_leaves_alone(check_vma, mask):
    """By `init`, `data_parallel`, `metrics` and `wire_bytes`; the frozen leaves keep their bits."""
    mesh, tx = mesh_of(WORKERS), fg.trainable(optimizer(), mask)
    params = HALVES
    batch = gradients(LIKE, WORKERS)

    def loss(params, batch):
        terms = jax.tree.map(lambda p, b: jnp.sum((p - b[0]) ** 2), params, batch)
        return sum(jax.tree.leaves(terms))

    def step(params, state, batch):
        _, grads = fg.value_and_grad(loss, AXIS)(params, batch)
        moves, state = tx.update(grads, state, params)
        return optax.apply_updates(params, moves), state

    state = fg.init_state(tx, params, mesh, AXIS)
    train = fg.data_parallel(step, mesh, AXIS, check_vma=check_vma)
    trained = jax.tree.map(lambda keep, leaf: leaf if keep else None, by_names(params), params)
    compiled = train.lower(params, state, batch).compile()
    found = fg.audit(compiled)
    assert [c.bytes for c in found] == [fg.wire_bytes(EXCHANGE, trained)]
    after, state = train(params, state, batch)
    for path, leaf in jax.tree.leaves_with_path(after):
        kept = np.all(np.asarray(leaf) == 0.5)
        assert kept != ("[0]" in jax.tree_util.keystr(path)), path
    rows = [leaf.shape for leaf in jax.tree.leaves(state[0].memory)]
    assert rows == [(WORKERS, 6, 8), (WORKERS, 4)]
    said = fg.metrics(state, exchange=EXCHANGE, params=trained)
    assert (int(said["skipped"]), said["bytes"]) == (0, found[0].bytes)


def test_it_follows_the_sharding_of_the_parameters():
    mesh = jax.make_mesh((2, 2), (AXIS, "model"), axis_types=(AxisType.Auto,) * 2)
    tx = fg.trainable(optimizer(), MASK)
    params = HALVES
    specs = jax.tree.map(lambda _: P(), params)
    specs["layers"][0]["lora"] = P(None, "model")
    specs["base"]["w"] = P("model")
    state = fg.init_state(tx, params, mesh, AXIS, specs)
    assert state[0].memory.worker_rows.residual["layers"][0]["lora"].sharding.spec == P(
        AXIS, None, "model"
    )
    assert state[1][0].nu["layers"][0]["lora"].sharding.spec == P(None, "model")


HIDDEN = {
    "masked": lambda tx: optax.masked(tx, MASK),
    "partition": lambda tx: optax.partition(
        {True: tx, False: optax.set_to_zero()}, lambda tree: by_names(tree)
    ),
    "selective_transform": lambda tx: optax.selective_transform(
        tx,
        freeze_mask={"base": True, "layers": [{"scalar": False, "lora": False}, {"scalar": True}]},
    ),
}


@pytest.mark.parametrize("name", ["top_k", "choco_sgd", "diloco", "sharded"])
def test_what_hides_leaves_is_refused_with_this_remedy(name):
    for hide in HIDDEN.values():
        tx = hide(METHODS[name](AXIS))
        one = jax.vmap(lambda g, tx=tx: tx.update(g, tx.init(g), g)[0], axis_name=AXIS)
        with pytest.raises(ValueError, match=r"must not be masked.*use fg\.trainable\(tx, mask\)"):
            jax.eval_shape(one, gradients(LIKE, WORKERS))


def test_a_mask_is_of_bools():
    tree = {"a": np.ones(2), "b": np.ones(2)}
    for bad in ("frozen", 1):
        with pytest.raises(TypeError, match=r"trainable\(mask\['a'\]\): must be True for"):
            fg.trainable(optax.sgd(1.0), {"a": bad, "b": True}).init(tree)
