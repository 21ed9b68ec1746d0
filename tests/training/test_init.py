"""The sharded state in one call, and the specs of states that are part of something else."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import METHODS
from flax import nnx, serialization
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from parallel import AXIS, grid, mesh_of, train_step, with_model

import fftgrad as fg

PARAMS = {"up": np.ones((6, 16), np.float32), "down": np.ones((16, 2), np.float32)}
SHARDED = {"up": P(None, "model"), "down": P("model", None)}
SPARSE = fg.AllGather(fg.TopK(fraction=0.2))


def transformation(exchange=SPARSE):
    compressed = fg.compressed_pmean(exchange, fg.ErrorFeedback(), axis_name="data")
    tx = optax.chain(fg.training.local_state(optax.trace(0.9)), compressed, optax.rmsprop(0.01))
    return fg.training.multi_steps(tx, every=2)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert one.shape == other.shape
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("exchange", [SPARSE, fg.exchanges.AcpSgd(1)], ids=str)
def test_it_is_the_recipe(exchange):
    tx = transformation(exchange)
    init, _ = train_step(tx, 8, like=PARAMS)
    assert_same(fg.init_state(tx, PARAMS, mesh_of(8), AXIS), init(PARAMS))


def test_another_axis_than_the_mesh_has_is_refused():
    with pytest.raises(ValueError, match=r"init_state\(axis_name\).*'date'.*use one of these"):
        fg.init_state(transformation(), PARAMS, mesh_of(2), "date")


def test_a_function_makes_the_state_of_a_framework():
    """Of which what lies beside the arrays need not equal itself: two bound methods do not."""
    tx, mesh = transformation(), mesh_of(8)

    class Model:
        __hash__ = None

        def apply(self, params): ...

    state = fg.init_state(
        lambda params: TrainState.create(apply_fn=Model().apply, params=params, tx=tx),
        PARAMS, mesh, AXIS,
    )  # fmt: skip
    assert_same(state.opt_state, fg.init_state(tx, PARAMS, mesh, AXIS))
    np.testing.assert_array_equal(state.params["up"], PARAMS["up"])
    assert state.tx is tx


# Parameters sharded over the axis of the exchange


def test_specs_over_the_axis_of_the_exchange_are_refused():
    state = jax.eval_shape(transformation().init, PARAMS)
    for axis, spec in [("data", P("data")), ("data", P(("model", "data"))), (("a", "b"), P("b"))]:
        with pytest.raises(ValueError, match=r"param_specs\['up'\].*another axis of the mesh"):
            fg.state_specs(state, axis, {"up": spec, "down": P()})


def test_parameters_over_the_axis_of_the_exchange_are_refused():
    tx = optax.chain(fg.compressed_pmean(SPARSE, axis_name=AXIS), optax.sgd(0.1))

    def step(w):
        grad = fg.value_and_grad(lambda w: jnp.sum(w**2), AXIS)(w)[1]
        return tx.update(grad, tx.init(w), w)[0]

    run = jax.shard_map(step, mesh=mesh_of(4), in_specs=P(AXIS), out_specs=P())
    with pytest.raises(ValueError, match=r"update\(params\).*another axis"):
        jax.eval_shape(run, np.ones(8))


NESTED = {"w": np.ones((6, 16)), "head": {"w": np.ones((16, 2)), "b": np.ones(2)}}
NESTED_SPECS = {"w": P(None, "model"), "head": {"w": P("model"), "b": P()}}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_arrays_that_lie_over_the_axis_of_the_exchange_are_refused(kind):
    mesh = Mesh(np.array(jax.devices()), (AXIS,), axis_types=(kind,))
    tx = fg.compressed_pmean(fg.AllReduce(), axis_name=AXIS)
    params = {"w": jax.device_put(np.ones((16, 3), np.float32), NamedSharding(mesh, P(AXIS)))}
    with pytest.raises(
        ValueError, match=r"init_state\(params\['w'\]\): must be whole .* another axis"
    ):
        fg.init_state(tx, params, mesh, AXIS)


def test_a_state_is_sharded_as_the_parameter_with_the_longest_path():
    """Where the path of one parameter ends like that of another."""
    tx = optax.chain(fg.compressed_pmean(SPARSE, fg.ErrorFeedback(), axis_name=AXIS), optax.adam(1))
    specs = fg.state_specs(jax.eval_shape(tx.init, NESTED), AXIS, NESTED_SPECS)
    assert specs[1][0].mu == NESTED_SPECS
    residual = specs[0].memory.worker_rows.residual
    assert residual["w"] == P(AXIS, None, "model")
    assert residual["head"] == {"w": P(AXIS, "model"), "b": P(AXIS)}


def test_a_state_of_fewer_axes_is_not_sharded_as_its_parameter():
    """What Adafactor keeps of rows and columns has the path of a parameter, not its shape."""
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=4)
    tx = optax.chain(fg.compressed_pmean(SPARSE, axis_name="data"), factored)
    specs = fg.state_specs(jax.eval_shape(tx.init, PARAMS), "data", SHARDED)
    state = fg.init_state(tx, PARAMS, with_model(), "data", SHARDED)
    for leaf, spec in zip(jax.tree.leaves(state), jax.tree.leaves(specs), strict=True):
        assert len(spec) <= leaf.ndim
    # Shaped like the parameter, or a piece of rows or columns for each shard.
    assert specs[1].v["down"] == SHARDED["down"]
    assert specs[1].v_row["up"] == specs[1].v_col["up"] == P(("model",))


def test_a_state_of_another_shape_is_not_sharded_as_its_parameter():
    def row_sums(params):
        return jax.tree.map(lambda leaf: jnp.zeros((leaf.shape[0], 1)), params)

    rows = optax.GradientTransformation(row_sums, optax.identity().update)
    mesh = with_model()
    placed = jax.device_put(PARAMS, {k: NamedSharding(mesh, s) for k, s in SHARDED.items()})
    tx = optax.chain(fg.compressed_pmean(SPARSE, fg.ErrorFeedback(), axis_name="data"), rows)
    compressed, kept = fg.init_state(tx, placed, mesh, "data")
    assert kept["up"].sharding.is_fully_replicated
    residual = compressed.memory.worker_rows.residual["up"]
    assert residual.sharding.shard_shape(residual.shape) == (1, 6, 8)


def test_parameters_may_lie_on_another_mesh():
    other = jax.make_mesh((8,), ("elsewhere",), axis_types=(AxisType.Auto,))
    up = jax.device_put(PARAMS["up"], NamedSharding(other, P(None, "elsewhere")))
    placed = PARAMS | {"up": up}
    state = fg.init_state(transformation(), placed, with_model(), "data")
    assert_same(state, fg.init_state(transformation(), PARAMS, with_model(), "data"))


# States that are part of something else


def test_there_must_be_a_state_of_ours():
    tx = transformation()
    for other in (tx, PARAMS, jax.eval_shape(optax.adam(0.1).init, PARAMS), ()):
        with pytest.raises(ValueError, match=r"jax\.eval_shape\(tx\.init, params\)"):
            fg.state_specs(other, AXIS)


def by_place(specs):
    """What is where, in names that dicts, named tuples and variables have in common."""
    out = {}
    for path, spec in jax.tree.leaves_with_path(specs):
        names = [getattr(k, "name", getattr(k, "key", getattr(k, "idx", None))) for k in path]
        out[tuple(str(n) for n in names if n != "value")] = spec
    return out


class Net(nnx.Module):
    """Two layers, one of them with an unlucky name."""

    def __init__(self):
        self.up = nnx.Linear(6, 16, rngs=nnx.Rngs(0))
        self.deep = nnx.Dict(value=nnx.Linear(16, 2, rngs=nnx.Rngs(0)))


STATEFUL = {"gather": SPARSE, "acp": fg.exchanges.AcpSgd(1)}


@pytest.mark.parametrize("exchange", STATEFUL.values(), ids=STATEFUL)
def test_specs_of_an_nnx_state(exchange):
    tx = transformation(exchange)

    def made():
        model = Net()
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    model, optimizer = nnx.eval_shape(made)
    state = nnx.state(optimizer)
    specs = fg.state_specs(state, AXIS)
    assert jax.tree.structure(specs) == jax.tree.structure(state)
    plain = jax.eval_shape(tx.init, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    expected = by_place(fg.state_specs({"opt_state": plain}, AXIS))
    found = by_place(specs)
    assert found.pop(("step",)) == P()
    assert {str(k): v for k, v in found.items()} == {str(k): v for k, v in expected.items()}
    assert P(AXIS) in found.values()
    step = nnx.state((model, optimizer))
    assert jax.tree.structure(fg.state_specs(step, AXIS)) == jax.tree.structure(step)


@pytest.mark.parametrize("as_dicts", [lambda tree: tree, serialization.to_state_dict, nnx.State])
def test_parameters_that_are_called_value_are_no_state_of_a_worker(as_dicts):
    params, tx = {"value": np.ones((6, 16))}, transformation()
    state = serialization.to_state_dict(jax.eval_shape(tx.init, params))
    tree = {"params": params, "state": state}
    specs = fg.state_specs(as_dicts(tree), AXIS)
    assert specs["params"]["value"] == P()
    memory = specs["state"]["inner"]["1"]["memory"]["worker_rows"]
    assert memory["residual"]["value"] == P(AXIS)


def test_specs_of_a_whole_train_state():
    tx = transformation()
    state = jax.eval_shape(
        lambda: TrainState.create(apply_fn=None, params={"params": PARAMS}, tx=tx)
    )
    specs = fg.state_specs(state, "data", {"params": SHARDED})
    assert specs.params["params"] == SHARDED
    assert specs.step == P()
    assert specs.opt_state == fg.state_specs(state.opt_state, "data", {"params": SHARDED})
    assert specs.opt_state.inner[1].memory.worker_rows.residual["params"]["up"] == P(
        "data", None, "model"
    )
    both = fg.state_specs((PARAMS, state.opt_state), "data")
    assert both[1] == fg.state_specs(state.opt_state, "data")


COMPRESSED = fg.compressed_pmean(fg.methods.top_k(fraction=0.1), axis_name=AXIS)
WITH_LIKES_OF_PARAMS = {
    # A shard of a parameter has not its shape.
    **{name: METHODS[name](AXIS) for name in METHODS if name != "sharded"},
    "multi_steps": transformation(),
    "trainable": fg.trainable(optax.chain(COMPRESSED, optax.adam(1)), {"up": True, "down": False}),
    "no memory, factors": fg.compressed_pmean(fg.PowerSgd(1), axis_name=AXIS, track_error=True),
}


@pytest.mark.parametrize("tx", WITH_LIKES_OF_PARAMS.values(), ids=WITH_LIKES_OF_PARAMS)
def test_optax_finds_what_is_shaped_like_parameters(tx):
    """Residuals, velocities and moments by the place of a parameter; exchanges as a whole."""
    state = jax.eval_shape(tx.init, PARAMS)
    places = {"up": "at up", "down": "at down"}
    found = optax.tree_utils.tree_map_params(
        tx,
        lambda leaf, place: leaf if _is_masked(leaf) else (place, leaf.shape),
        state,
        places,
        transform_non_params=lambda _: "other",
        is_leaf=_is_masked,
    )
    pairs = [n for n in jax.tree.leaves(found, is_leaf=_is_pair) if _is_pair(n)]
    assert all(shape[-2:] == PARAMS[place[3:]].shape for place, shape in pairs)
    wanted = [
        leaf for path, leaf in jax.tree.leaves_with_path(state)
        if getattr(path[-1], "key", "") in PARAMS and "exchange" not in jax.tree_util.keystr(path)
    ]  # fmt: skip
    assert len(pairs) == len(wanted)
    same = optax.tree_utils.tree_map_params(tx, lambda leaf: leaf, state)
    assert jax.tree.structure(same) == jax.tree.structure(state)


def _is_pair(node):
    return type(node) is tuple and len(node) == 2 and str(node[0]).startswith("at ")


def _is_masked(node):
    return node is None or isinstance(node, optax.MaskedNode)


def test_a_sharded_optimizer_is_known_where_its_state_has_become_a_dict():
    tx = optax.chain(
        fg.optimizers.sharded(optax.sgd(0.1, 0.9), 4, axis_name=AXIS), optax.identity()
    )
    state = jax.eval_shape(tx.init, PARAMS)
    found = fg.state_specs(serialization.to_state_dict(state), AXIS)
    assert found == serialization.to_state_dict(fg.state_specs(state, AXIS))


def test_pieces_of_a_large_model_travel_in_fewer_buckets_than_the_whole(monkeypatch):
    monkeypatch.setattr("fftgrad.exchanges._bucketing.BUCKET_LIMIT", 100)
    mesh = grid(2, 4, (AXIS, "model"))
    tx = fg.compressed_pmean(fg.AllGather(fg.Sign()), fg.ErrorFeedback(), axis_name=AXIS)
    params, specs = {"w": np.ones((8, 64), np.float32)}, {"w": P(None, "model")}
    state = fg.init_state(tx, params, mesh, AXIS, specs)
    assert len(state.exchange) == 2  # of 128 values, where 512 would take 6
    of_state = fg.state_specs(state, AXIS, specs)
    step = jax.shard_map(
        lambda g, s: tx.update({"w": g["w"][0]}, s),
        mesh=mesh,
        in_specs=({"w": P(AXIS, None, "model")}, of_state),
        out_specs=(specs, of_state),
    )
    mean, after = jax.jit(step)({"w": np.ones((2, 8, 64), np.float32)}, state)
    np.testing.assert_array_equal(mean["w"], np.ones((8, 64)))
    assert int(after.step) == 1


@pytest.mark.parametrize("specs", [None, {"scale": P(), "w": P()}], ids=["whole", "by specs"])
def test_parameters_that_are_no_arrays_are_made_or_refused_in_words(specs):
    tx = fg.compressed_pmean(fg.AllReduce(), axis_name=AXIS)
    mesh = mesh_of(2)
    state = fg.init_state(tx, {"scale": 1.0, "w": np.ones(3, np.float32)}, mesh, AXIS, specs)
    assert int(state.step) == 0
    with pytest.raises(TypeError, match=r"updates\['scale'\].*float32.*got int32; cast it"):
        fg.init_state(tx, {"scale": 1, "w": np.ones(3, np.float32)}, mesh, AXIS, specs)


def test_a_momentum_behind_error_feedback_is_warned_of():
    twice = [optax.adam(0.1), optax.sgd(0.1, 0.9), optax.chain(optax.clip(1.0), optax.adamw(0.1))]
    for behind in twice:
        with pytest.warns(UserWarning, match="delays each gradient twice"):
            fg.init_state(optax.chain(COMPRESSED, behind), PARAMS, mesh_of(2), AXIS)
    once = [optax.chain(COMPRESSED, behind(0.1)) for behind in (optax.sgd, optax.rmsprop)]
    for tx in (*once, fg.optimizers.feedback_adam(0.1, axis_name=AXIS)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fg.init_state(tx, PARAMS, mesh_of(2), AXIS)
