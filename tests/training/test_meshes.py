"""Several axes: exchanges over fast and slow links, and parameters sharded over a model axis."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import EXCHANGES, HIERARCHIES, gradients, sample, values
from jax.sharding import PartitionSpec as P
from parallel import AXES, flat, grid, of_size, unshard, with_model, zeros

import fftgrad as fg
from fftgrad.ops import _collectives

LIKE = {"w": jax.ShapeDtypeStruct((10, 11), "float32"), "b": jax.ShapeDtypeStruct((7,), "bfloat16")}


def hierarchical(exchange, check_vma=True):
    """`init` and `update` on a (2, 4) mesh."""
    tx = fg.compressed_pmean(exchange, fg.ErrorFeedback(), axis_name=AXES)
    specs = fg.state_specs(jax.eval_shape(tx.init, LIKE), AXES)
    wrap = functools.partial(jax.shard_map, mesh=grid(2, 4), check_vma=check_vma)

    def update(rows, state):
        grads = jax.tree.map(lambda g: g[0], rows)
        return tx.update(grads, state, value=grads["w"][0, 0])  # a loss, for what watches it

    init = jax.jit(wrap(tx.init, in_specs=P(), out_specs=specs))
    return init, jax.jit(wrap(update, in_specs=(P(AXES), specs), out_specs=(P(), specs)))


def of_step(seed=0):
    return gradients(LIKE, 8, seed=seed)


@pytest.mark.parametrize("name", sample(HIERARCHIES))
def test_a_group_loses_nothing_and_only_compressed_bytes_take_the_slow_links(name):
    """Sum of what was applied + the mean residual of the groups = sum of the mean gradients.

    What the mean of "b" loses in bfloat16 is in the memory of each worker.
    """
    exchange = HIERARCHIES[name]
    init, update = hierarchical(exchange)
    state = init(zeros(LIKE))
    unchecked = hierarchical(exchange, check_vma=False)[1]
    jax.eval_shape(unchecked, of_step(), state)
    compiled = update.lower(of_step(), state).compile()
    check_bytes(exchange, fg.audit(compiled))
    applied, wanted = (np.zeros(117) for _ in range(2))
    for step in range(4):
        grads = of_step(step)
        mean, state = compiled(grads, state)
        for leaf in mean.values():
            assert len({np.asarray(s.data).tobytes() for s in leaf.addressable_shards}) == 1
        applied, wanted = applied + flat(mean), wanted + flat(grads, 1).mean(0)
    # The others lose something twice, or do not keep it.
    if exchange.memory == fg.NoMemory() or isinstance(exchange.slow, fg.TwoStage):
        return
    # One residual a group: rows of the mesh, in pieces along its fast axis.
    (residual,) = jax.tree.leaves(state.exchange[0].own.worker_rows.cut_rows)
    pieces = np.asarray(residual, np.float64).reshape(2, 4, -1)
    groups = np.stack([unshard(group, 117) for group in pieces])
    left = groups.mean(0) + flat(state.memory.worker_rows.residual, 1).mean(0)
    np.testing.assert_allclose(applied + left, wanted, atol=1e-4)
    if exchange.slow == fg.AllReduce():
        np.testing.assert_allclose(applied[7:], wanted[7:], rtol=1e-5, atol=1e-5)


def check_bytes(exchange, found):
    piece = jax.ShapeDtypeStruct((-(-117 // 4),), "float32")
    slow = [c for c in found if c.workers == 2]
    fast = [c for c in found if c.workers == 4]
    assert {c.kind for c in fast} == {"all-to-all", "all-gather"}
    assert sum(c.bytes for c in fast) == 4 * (4 * 30 + 4 + 30) + 4  # a count goes along
    if isinstance(exchange.slow, fg.Scheduled):
        for branch, step in enumerate(exchange.slow.starts):
            expected = fg.wire_bytes(exchange.slow.at(step), piece)
            assert sum(c.bytes for c in slow if c.branch == (branch,)) == expected
    else:
        assert sum(c.bytes for c in slow) == fg.wire_bytes(exchange.slow, piece)
        assert fg.wire_bytes(exchange, LIKE) == sum(c.bytes for c in found)
        assert fg.link_bytes(exchange, LIKE, 8) == sum(c.link_bytes(2) for c in slow) > 0


RUNGS = HIERARCHIES["slow gather"], HIERARCHIES["slow gather, blocked"]
WITHIN = {
    "piecewise": fg.Scheduled(dict(enumerate(RUNGS))),
    "ladder": fg.exchanges.Ladder(RUNGS),
}


@pytest.mark.parametrize("exchange", WITHIN.values(), ids=WITHIN)
def test_a_hierarchy_sends_its_bytes_within_another_exchange(exchange):
    tx = fg.compressed_pmean(exchange, axis_name=AXES)
    update = functools.partial(tx.update, value=jnp.float32(0))
    axes = dict(zip(AXES, (2, 4), strict=True))
    found = _collectives.collectives(update, axes, LIKE, jax.eval_shape(tx.init, LIKE))
    for branch, rung in enumerate(RUNGS):
        here = sum(c.bytes for c in found if c.branch == (branch,))
        assert here == fg.wire_bytes(rung, LIKE)


def test_a_hierarchy_counts_what_overflows_on_all_workers():
    codec = fg.RangeFloat(8, limits=(-1.0, 1.0))
    tx = fg.compressed_pmean(
        fg.Hierarchical("fast", 4, fg.AllGather(codec), fg.NoMemory()), axis_name=AXES
    )

    def step(rows):
        return tx.update(rows[0], tx.init(rows[0]))[1].overflow

    run = jax.shard_map(step, mesh=grid(2, 4), in_specs=P(AXES), out_specs=P())
    rows = np.tile(np.where(np.arange(2003) % 3 == 0, np.float32(2), np.float32(0.5)), (8, 1))
    assert int(jax.jit(run)(rows)) == 2 * 668


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
        mesh=grid(2, 4),
        in_specs=P(AXES),
        out_specs=P(AXES),
        check_vma=False,
    )
    with pytest.raises(ValueError, match=remedy):
        jax.eval_shape(run, np.ones(80))


def test_a_hierarchy_refuses_what_pieces_cannot_share():
    exchange = fg.Hierarchical("fast", 4, EXCHANGES["learned codes"])
    with pytest.raises(ValueError, match="must have no shared arrays"):
        jax.eval_shape(lambda: exchange.init(LIKE))


# Parameters sharded over a model axis

SHARDED = {"up": P(None, "model"), "down": P("model", None)}
PARAMS = {"up": values((6, 16), seed=1) / 3, "down": values((16, 1), seed=2) / 3}


@pytest.mark.parametrize(
    ("name", "check_vma"),
    [("gather top-k", True), ("gather top-k", False), ("shared support", True),
     ("two stages", False), ("dense", True)],
)  # fmt: skip
def test_shards_compress_their_own_piece(name, check_vma):
    """No collective over data carries more than a shard, and the state is sharded as it is."""
    exchange, mesh = of_size(EXCHANGES[name], 4), with_model()
    tx = fg.compressed_pmean(exchange, fg.ErrorFeedback(), axis_name="data")
    state = fg.init_state(tx, PARAMS, mesh, "data", SHARDED)
    specs = fg.state_specs(state, "data", SHARDED)
    rows = {name: P("data", *spec) for name, spec in SHARDED.items()}

    def step(grads, state):
        return tx.update(jax.tree.map(lambda a: a[0], grads), state)

    run = jax.shard_map(
        step, mesh=mesh, in_specs=(rows, specs), out_specs=(SHARDED, specs), check_vma=check_vma
    )
    grads = gradients(PARAMS, 4)
    compiled = jax.jit(run).lower(grads, state).compile()
    shard = {n: jax.ShapeDtypeStruct((leaf.size // 2,), "float32") for n, leaf in PARAMS.items()}
    over_data = [c for c in fg.audit(compiled) if c.workers == 4 and c.bytes > 4]
    assert sum(c.bytes for c in over_data) == fg.wire_bytes(exchange, shard)
    mean, state = compiled(grads, state)
    residual = state.memory.worker_rows.residual
    for leaf, own in grads.items():
        told = np.asarray(mean[leaf]) + np.asarray(residual[leaf]).mean(0)
        np.testing.assert_allclose(told, own.mean(0), rtol=1e-5, atol=1e-5)
    assert residual["up"].shape == (4, 6, 16)
    assert {s.data.shape for s in residual["up"].addressable_shards} == {(1, 6, 8)}


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
        mesh=with_model(),
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
    grads = values((4, 16))
    grads[1, 9] = np.nan

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
        mesh=with_model(),
        in_specs=P("data", "model"),
        out_specs=P("data", "model"),
        check_vma=check_vma,
    )
    skipped, kept = jax.jit(run)(grads)
    wanted = np.broadcast_to([agreed, True], (4, 2))
    np.testing.assert_array_equal(skipped, wanted)
    np.testing.assert_array_equal(kept, wanted)
