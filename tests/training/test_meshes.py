"""Several axes: exchanges over fast and slow links, and parameters sharded over a model axis."""

import functools
import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import CODECS, EXCHANGES, HIERARCHIES, gradients, values
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from parallel import of_size, unshard

import fftgrad as fg

AXES = ("slow", "fast")
LIKE = {"w": jax.ShapeDtypeStruct((10, 11), "float32"), "b": jax.ShapeDtypeStruct((7,), "float32")}
ALL = pytest.mark.parametrize("exchange", HIERARCHIES.values(), ids=HIERARCHIES)


def mesh(slow, fast, names=AXES):
    devices = np.array(jax.devices()[: slow * fast]).reshape(slow, fast)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * 2)


@functools.cache
def hierarchical(exchange, check_vma=True):
    """`init` and `update` on a (2, 4) mesh."""
    tx = fg.compressed_pmean(exchange, axis_name=AXES)
    specs = fg.state_specs(jax.eval_shape(tx.init, LIKE), AXES)
    wrap = functools.partial(jax.shard_map, mesh=mesh(2, 4), check_vma=check_vma)

    def update(rows, state):
        grads = jax.tree.map(lambda g: g[0], rows)
        return tx.update(grads, state, value=grads["b"][0])  # a loss, for what watches it

    init = jax.jit(wrap(tx.init, in_specs=P(), out_specs=specs))
    return init, jax.jit(wrap(update, in_specs=(P(AXES), specs), out_specs=(P(), specs)))


def zeros():
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), LIKE)


# The others lose something twice, or do not keep it.
KEEPS = {
    name: exchange
    for name, exchange in HIERARCHIES.items()
    if exchange.memory != fg.NoMemory() and not isinstance(exchange.slow, fg.TwoStage)
}


@pytest.mark.parametrize("exchange", KEEPS.values(), ids=KEEPS)
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_group_loses_nothing(exchange, check_vma):
    """Sum of what was applied + the mean residual of the groups = sum of the mean gradients."""
    init, update = hierarchical(exchange, check_vma)
    state = init(zeros())
    applied, wanted = (np.zeros(117) for _ in range(2))
    for step in range(5):
        grads = gradients(LIKE, 8, seed=step)
        mean, state = update(grads, state)
        for leaf in mean.values():
            shards = [np.asarray(s.data).tobytes() for s in leaf.addressable_shards]
            assert len(set(shards)) == 1
        applied += np.concatenate([np.ravel(mean[name]) for name in ("b", "w")])
        wanted += np.concatenate([np.ravel(np.asarray(grads[n]).mean(0)) for n in ("b", "w")])
    # One residual a group: rows of the mesh, in pieces along its fast axis.
    (residual,) = jax.tree.leaves(state.exchange[0].shards.worker_rows.memory)
    pieces = np.asarray(residual, np.float64).reshape(2, 4, -1)
    groups = np.stack([unshard(group, 117) for group in pieces])
    np.testing.assert_allclose(applied + groups.mean(0), wanted, atol=1e-4)


@ALL
def test_only_compressed_bytes_take_the_slow_links(exchange):
    init, update = hierarchical(exchange)
    piece = jnp.ones(-(-117 // 4))
    found = fg.audit(update.lower(gradients(LIKE, 8), init(zeros())).compile())
    slow = [c for c in found if c.workers == 2]
    fast = [c for c in found if c.workers == 4]
    assert {c.kind for c in fast} == {"all-to-all", "all-gather"}
    assert sum(c.bytes for c in fast) == 4 * (4 * 30 + 4 + 30) + 4  # a count goes along
    if isinstance(exchange.slow, fg.Scheduled):
        for branch, (step, _) in enumerate(exchange.slow.schedule):
            expected = fg.wire_bytes(exchange.slow.at(step), piece)
            assert sum(c.bytes for c in slow if c.branch == (branch,)) == expected
    else:
        assert sum(c.bytes for c in slow) == fg.wire_bytes(exchange.slow, piece)
        assert fg.wire_bytes(exchange, LIKE) == sum(c.bytes for c in found)


RUNGS = HIERARCHIES["slow gather"], HIERARCHIES["slow gather, blocked"]
WITHIN = {
    "piecewise": fg.Scheduled(dict(enumerate(RUNGS))),
    "ladder": fg.Ladder(RUNGS),
}


@pytest.mark.parametrize("exchange", WITHIN.values(), ids=WITHIN)
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_hierarchy_sends_its_bytes_within_another_exchange(exchange, check_vma):
    init, update = hierarchical(exchange, check_vma)
    found = fg.audit(update.lower(gradients(LIKE, 8), init(zeros())).compile())
    for branch, rung in enumerate(RUNGS):
        here = sum(c.bytes for c in found if c.branch == (branch,))
        assert here == fg.wire_bytes(rung, LIKE)


def test_a_hierarchy_counts_what_overflows_on_all_workers():
    codec = fg.codecs.FixedRangeFloat(bits=8, maximum=1.0)
    tx = fg.compressed_pmean(
        fg.Hierarchical("fast", 4, fg.AllGather(codec), fg.NoMemory()), axis_name=AXES
    )

    def step(rows):
        return tx.update(rows[0], tx.init(rows[0]))[1].overflow

    run = jax.shard_map(step, mesh=mesh(2, 4), in_specs=P(AXES), out_specs=P())
    rows = jnp.tile(jnp.where(jnp.arange(2003) % 3 == 0, 2.0, 0.5), (8, 1))
    assert int(jax.jit(run)(rows)) == 2 * 668


def test_over_exact_slow_links_it_is_pmean():
    init, update = hierarchical(HIERARCHIES["slow all-reduce"])
    grads = gradients(LIKE, 8)
    mean, _ = update(grads, init(zeros()))
    for name, leaf in mean.items():
        np.testing.assert_allclose(leaf, np.asarray(grads[name]).mean(0), rtol=1e-5, atol=1e-6)


@ALL
def test_a_bad_worker_is_seen_by_all_groups_and_costs_no_memory(exchange):
    init, update = hierarchical(exchange)
    _, before = update(gradients(LIKE, 8), init(zeros()))
    bad = gradients(LIKE, 8)
    bad["b"] = bad["b"].at[5, 3].set(np.nan)
    mean, after = update(bad, before)
    assert all(np.all(np.isnan(leaf)) for leaf in mean.values())
    assert int(after.skipped) == 1
    for old, new in zip(
        jax.tree.leaves(before.exchange[0].shards.worker_rows.memory),
        jax.tree.leaves(after.exchange[0].shards.worker_rows.memory),
        strict=True,
    ):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("x", [np.zeros((8, 1)), np.ones((8, 1)), np.zeros((8, 13))], ids=str)
def test_one_element_zeros_and_a_prime_length(x):
    tx = fg.compressed_pmean(HIERARCHIES["slow gather, blocked"], axis_name=AXES)
    run = jax.shard_map(
        lambda rows: tx.update(rows[0], tx.init(rows[0]))[0],
        mesh=mesh(2, 4),
        in_specs=P(AXES),
        out_specs=P(),
    )
    found = jax.jit(run)(jnp.asarray(x, jnp.bfloat16))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float32), x[0], rtol=0.02)


@pytest.mark.parametrize(
    ("exchange", "axis_name", "remedy"),
    [
        (fg.Hierarchical("fast", 4, fg.AllReduce()), "fast", r"axis_name=\('slow', 'fast'\)"),
        (fg.Hierarchical("fast", 2, fg.AllReduce()), AXES, "use workers=4"),
        (fg.Hierarchical("host", 4, fg.AllReduce()), AXES, "axis_name='host'"),
    ],
)
def test_wrong_axes_are_answered_with_the_remedy(exchange, axis_name, remedy):
    tx = fg.compressed_pmean(exchange, axis_name=axis_name)
    run = jax.shard_map(
        lambda g: tx.update(g, tx.init(g))[0],
        mesh=mesh(2, 4),
        in_specs=P(AXES),
        out_specs=P(AXES),
        check_vma=False,
    )
    with pytest.raises(ValueError, match=remedy):
        jax.eval_shape(run, jnp.ones(80))


def test_a_hierarchy_refuses_what_pieces_cannot_share():
    exchange = fg.Hierarchical("fast", 4, EXCHANGES["learned codes"])
    with pytest.raises(ValueError, match="must have no shared arrays"):
        exchange.init(LIKE)


@pytest.mark.parametrize("exchange", HIERARCHIES.values(), ids=HIERARCHIES)
def test_hierarchies_are_values(exchange):
    assert eval(repr(exchange), dict(vars(fg))) == exchange
    assert hash(eval(repr(exchange), dict(vars(fg)))) == hash(exchange)


# Parameters sharded over a model axis

SHARDED = {"up": P(None, "model"), "down": P("model", None)}
PARAMS = {"up": values((6, 16), seed=1) / 3, "down": values((16, 1), seed=2) / 3}


def regress(exchange, optimizer, model, check_vma, steps=40):
    """Losses of a network of two layers, its hidden units over `model` workers of each of 4."""
    tx = optax.chain(fg.compressed_pmean(exchange, fg.ErrorFeedback(), axis_name="data"), optimizer)
    shape = jax.eval_shape(tx.init, PARAMS)
    specs = fg.state_specs(shape, "data", SHARDED)
    wrap = functools.partial(
        jax.shard_map, mesh=mesh(4, model, ("data", "model")), check_vma=check_vma
    )

    def loss(params, x, y):
        hidden = jax.nn.relu(x @ params["up"])
        return jnp.mean((jax.lax.psum(hidden @ params["down"], "model") - y) ** 2)

    def local(params, x, y):
        # The psum's transpose is a psum where JAX does not track what varies: of equal cotangents.
        value, grad = jax.value_and_grad(loss)(params, x, y)
        return value, grad if check_vma else jax.tree.map(lambda g: g / model, grad)

    def step(params, state, x, y):
        own = params
        if check_vma:
            own = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params)
        value, grad = local(own, x, y)
        updates, state = tx.update(grad, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(value, "data")

    init = jax.jit(wrap(tx.init, in_specs=(SHARDED,), out_specs=specs))
    run = jax.jit(
        wrap(
            step,
            in_specs=(SHARDED, specs, P("data"), P("data")),
            out_specs=(SHARDED, specs, P()),
        )
    )
    params, losses = jax.tree.map(jnp.asarray, PARAMS), []
    state = init(params)
    rng = np.random.default_rng(0)
    for _ in range(steps):
        x = rng.standard_normal((32, 6)).astype(np.float32)
        params, state, value = run(params, state, x, np.sin(x[:, :1]))
        losses.append(float(value))
    text = run.lower(params, state, x, x[:, :1]).compile()
    return losses, state, text


SPLIT = {
    name: EXCHANGES[name] for name in ("gather top-k", "shared support", "two stages", "dense")
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("exchange", SPLIT.values(), ids=SPLIT)
def test_shards_compress_their_own_piece(exchange, check_vma):
    """No collective over data carries more than a shard, and the state is sharded as it is."""
    exchange = of_size(exchange, 4)
    losses, state, text = regress(exchange, optax.rmsprop(0.02, bias_correction=True), 2, check_vma)
    assert losses[-1] < 0.5 * losses[0]
    shard = {
        name: jax.ShapeDtypeStruct((leaf.size // 2,), "float32") for name, leaf in PARAMS.items()
    }
    over_data = [c for c in fg.audit(text) if c.workers == 4 and c.bytes > 4]
    assert sum(c.bytes for c in over_data) == fg.wire_bytes(exchange, shard)
    residual = state[0].memory.worker_rows.residual["up"]
    assert residual.shape == (4, 6, 16)
    assert {s.data.shape for s in residual.addressable_shards} == {(1, 6, 8)}


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_sum_over_the_model_axis_needs_to_be_checked_or_divided(check_vma):
    """As docs/api/wrappers.md says: unchecked, what lies before it gets its gradient twice."""
    params = {**PARAMS, "bias": np.float32([0.1])}
    specs = {**SHARDED, "bias": P()}
    x = values((32, 6), seed=3)

    def loss(params, x, total=lambda out: jax.lax.psum(out, "model")):
        out = total(jax.nn.relu(x @ params["up"]) @ params["down"])
        return jnp.mean((out + params["bias"][None] - jnp.sin(x[:, :1])) ** 2)

    def grads(params, x):
        _, found = fg.value_and_grad(loss, "data")(params, x)
        divided = lambda params, x: loss(params, x) / 2  # noqa: E731
        _, right = fg.value_and_grad(divided, "data")(params, x)
        right["bias"] = right["bias"] if check_vma else jax.lax.psum(right["bias"], "model")
        return jax.tree.map(lambda g: jax.lax.pmean(g, "data"), (found, right))

    on = mesh(4, 2, ("data", "model"))
    ins = specs, P("data")
    run = jax.shard_map(grads, mesh=on, in_specs=ins, out_specs=(specs,) * 2, check_vma=check_vma)
    found, divided = jax.jit(run)(params, x)
    right = jax.grad(loss)(jax.tree.map(jnp.asarray, params), x, total=lambda out: out)
    for name, times in {"up": 2, "down": 2, "bias": 1}.items():
        as_it_is = right[name] * (1 if check_vma else times)
        np.testing.assert_allclose(found[name], as_it_is, rtol=1e-4, atol=1e-6)
        if not check_vma:
            np.testing.assert_allclose(divided[name], right[name], rtol=1e-4, atol=1e-6)


def test_sharded_trains_as_replicated_does():
    dense = fg.AllReduce()
    one, *_ = regress(dense, optax.sgd(0.05), 1, check_vma=True)
    two, *_ = regress(dense, optax.sgd(0.05), 2, check_vma=True)
    np.testing.assert_allclose(one, two, rtol=1e-3)
    # Each shard has a share of the budget, so the choice differs; the loss hardly does.
    codec = fg.AllGather(CODECS["top-k 6 bits"])
    one, *_ = regress(codec, optax.sgd(0.05), 1, check_vma=True, steps=200)
    two, *_ = regress(codec, optax.sgd(0.05), 2, check_vma=True, steps=200)
    assert abs(np.mean(two[-50:]) / np.mean(one[-50:]) - 1) < 0.1


@pytest.mark.parametrize("check_vma", [True, False])
def test_shards_accumulate(check_vma):
    """Two gradients and one update: as of their mean."""
    inner = optax.chain(
        fg.compressed_pmean(fg.AllGather(fg.TopK(k=9)), fg.ErrorFeedback(), axis_name="data"),
        optax.rmsprop(0.1),
    )
    own = jax.tree.map(lambda spec: P("data", *spec), SHARDED)
    grads = [gradients(jax.tree.map(jnp.asarray, PARAMS), 4, seed) for seed in range(2)]

    def updates_of(tx, steps):
        on = mesh(4, 2, ("data", "model"))
        state = fg.init_state(tx, jax.tree.map(jnp.asarray, PARAMS), on, "data", SHARDED)
        specs = fg.state_specs(state, "data", SHARDED)
        run = jax.shard_map(
            lambda rows, state: tx.update(jax.tree.map(lambda g: g[0], rows), state),
            mesh=on,
            in_specs=(own, specs),
            out_specs=(SHARDED, specs),
            check_vma=check_vma,
        )
        out = []
        for rows in steps:
            updates, state = jax.jit(run)(rows, state)
            out.append(updates)
        return out

    waited, done = updates_of(fg.multi_steps(inner, every=2), grads)
    assert not any(np.any(leaf) for leaf in waited.values())
    (wanted,) = updates_of(inner, [jax.tree.map(lambda a, b: (a + b) / 2, *grads)])
    for name, leaf in done.items():
        np.testing.assert_allclose(leaf, wanted[name], rtol=1e-4)


@pytest.mark.parametrize("scope", ["model", lambda path, _: path], ids=["one part", "own parts"])
def test_replicated_leaves_stay_equal_in_a_group_of_their_own(scope):
    """Where JAX tracks nothing, one selection over both kinds drives the copies apart."""
    tx = fg.compressed_pmean(
        fg.AllGather(fg.TopK(k=6)), axis_name="data", bucketing=fg.Bucketing(scope)
    )

    def step(w, b):
        own = {"w": w, "b": b}
        return tx.update(own, tx.init(own))[0]["b"][None]

    run = jax.shard_map(
        step,
        mesh=mesh(4, 2, ("data", "model")),
        in_specs=(P("data", "model"), P("data")),
        out_specs=P("model"),
        check_vma=False,
    )
    w = values((4, 60)) * np.repeat([0.1, 10.0], 30)  # the second shard's are larger
    first, second = np.asarray(jax.jit(run)(w, values((80,), seed=3)))
    assert np.array_equal(first, second) == (scope != "model")


@pytest.mark.parametrize(
    ("check_vma", "remedy", "agreed"),
    [(True, False, True), (False, False, False), (False, True, True)],
)
def test_who_hears_of_a_bad_shard(check_vma, remedy, agreed):
    """As docs/api/wrappers.md has it: unchecked, each shard of a model axis decides for itself."""
    tx = fg.compressed_pmean(fg.AllGather(fg.TopK(k=3)), fg.ErrorFeedback(), axis_name="data")
    grads = gradients({"w": jax.ShapeDtypeStruct((16,), "float32")}, 4)["w"].at[1, 9].set(np.nan)

    def step(rows):
        own = rows[0]
        if remedy:
            fine = jax.lax.pmin(jnp.isfinite(own).all().astype(jnp.int32), "model") > 0
            own = jnp.where(fine, own, jnp.nan)
        _, state = tx.update(own, tx.init(own))
        kept = jnp.all(state.memory.worker_rows.residual == 0)
        return state.skipped[None, None], kept[None, None]

    run = jax.shard_map(
        step,
        mesh=mesh(4, 2, ("data", "model")),
        in_specs=P("data", "model"),
        out_specs=P("data", "model"),
        check_vma=check_vma,
    )
    skipped, kept = jax.jit(run)(grads)
    wanted = np.broadcast_to([agreed, True], (4, 2))
    np.testing.assert_array_equal(skipped, wanted)
    np.testing.assert_array_equal(kept, wanted)


def partly_manual(kind, manual):
    """Three steps, where shard_map has the data axis, or all axes and every parameter whole."""
    tx = optax.chain(
        fg.compressed_pmean(
            fg.AllGather(CODECS["top-k 6 bits"]), fg.ErrorFeedback(), axis_name="data"
        ),
        optax.sgd(0.05),
    )
    axes = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=kind)
    explicit = manual == {"data"} and kind[1] == AxisType.Explicit

    def loss(params, x, y):
        hidden = jax.nn.relu(x @ params["up"])
        out = P() if explicit else None  # what is summed over an Explicit axis says where it goes
        return jnp.mean((jnp.dot(hidden, params["down"], out_sharding=out) - y) ** 2)

    def step(params, state, x, y):
        value, grads = fg.value_and_grad(loss, "data")(params, x, y)
        updates, state = tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    def put(tree, specs):
        return jax.device_put(tree, jax.tree.map(lambda s: NamedSharding(axes, s), specs))

    whole = manual == {"data", "model"}
    params = put(PARAMS, jax.tree.map(lambda _: P(), PARAMS) if whole else SHARDED)
    state = fg.init_state(tx, params, axes, "data")
    specs = fg.state_specs(state, "data")
    ins = P(), specs, P("data"), P("data")
    run = jax.jit(
        jax.shard_map(step, mesh=axes, in_specs=ins, out_specs=(P(), specs), axis_names=manual)
    )
    x = put(values((32, 6), 5), P("data"))
    for _ in range(3):
        params, state = run(params, state, x, x[:, :1])
    return params, state, fg.audit(run.lower(params, state, x, x[:, :1]).compile())


@pytest.mark.usefixtures("every_platform")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda k: k.name)
def test_with_the_data_axis_alone_manual_the_model_axis_is_xlas(kind):
    """Over data a worker sends what it does with whole parameters, and trains as it does."""
    whole, _, _ = partly_manual((AxisType.Auto,) * 2, {"data", "model"})
    params, state, found = partly_manual((kind, kind), {"data"})
    for name, leaf in params.items():
        np.testing.assert_allclose(leaf, whole[name], rtol=1e-4, atol=1e-6)
        wanted = NamedSharding(leaf.sharding.mesh, SHARDED[name])
        assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim)
    residual = state[0].memory.worker_rows.residual["up"]
    assert residual.sharding.shard_shape((4, 6, 16)) == (1, 6, 8)
    over_data = [c.bytes for c in found if c.workers == 4]
    over_model = [c.bytes for c in found if c.workers == 2]
    assert len(over_model) < 12, "a codec in pieces"
    assert over_data == [fg.wire_bytes(fg.AllGather(CODECS["top-k 6 bits"]), PARAMS)]


# A language model, fully sharded


@pytest.mark.slow
def test_a_sharded_language_model_trains_as_the_replicated_one():
    """4 data-parallel groups of 2 workers that share each parameter, against 4 groups of one."""
    job = runpy.run_path(str(pathlib.Path(__file__).parent.parent / "examples/train_lm.py"))
    model, (text, held_out) = job["ByteLM"](64, 2), job["corpus"]()
    first = model.init(jax.random.key(0), jnp.zeros((1, 64), jnp.int32))
    exchange = fg.AllGather(fg.chain(fg.Fft(64), fg.TopK(0.04), fg.RangeFloat(8)))

    def loss(params, batch):
        logits = model.apply(params, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    def train(shards):
        tx = optax.chain(
            fg.compressed_pmean(exchange, fg.ErrorFeedback(0.95), axis_name="data"),
            optax.adam(4e-3, b1=0.0, b2=0.99),
        )
        sharded = jax.tree.map(lambda _: P("model"), first)
        specs = fg.state_specs(jax.eval_shape(tx.init, first), "data", sharded)
        wrap = functools.partial(jax.shard_map, mesh=mesh(4, shards, ("data", "model")))

        def whole(params):
            return jax.tree.map(lambda p: jax.lax.all_gather(p, "model", tiled=True), params)

        def step(params, state, batch):
            own = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params)
            # The transpose of the gathering scatters the sum over the workers of a group.
            grad = jax.grad(lambda p: loss(whole(p), batch) / shards)(own)
            updates, state = tx.update(grad, state, params)
            return optax.apply_updates(params, updates), state

        state = jax.jit(wrap(tx.init, in_specs=(sharded,), out_specs=specs))(first)
        ins = sharded, specs, P(("data", "model"))
        run = jax.jit(wrap(step, in_specs=ins, out_specs=(sharded, specs)), donate_argnums=(0, 1))
        params, rng = jax.tree.map(jnp.copy, first), np.random.default_rng(0)
        for _ in range(200):
            params, state = run(params, state, job["sample"](rng, text, 32, 64))
        return float(loss(jax.device_get(params), job["sample"](rng, held_out, 512, 64)))

    replicated, fully_sharded = train(1), train(2)
    print(f"replicated {replicated:.4f}, sharded {fully_sharded:.4f}")
    assert replicated < 2.6
    assert abs(fully_sharded / replicated - 1) < 0.01
