"""Laws of exchanges."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from fftgrad._contracts import Averaged, AxisName, Comm, Exchange, PyTree, State, Stats, Step
from fftgrad._values import check
from fftgrad.exchanges import _bucketing, _recipe
from fftgrad.exchanges._bucketing import Bucketing
from fftgrad.exchanges._shards import add_rows, drop_rows
from fftgrad.testing import _laws
from fftgrad.testing._laws import Laws
from fftgrad.tools._audit import Collective, audit

WORKERS = 4

USUAL = "related values"

LIKES: tuple[PyTree, ...] = (
    jax.ShapeDtypeStruct((1,), jnp.float32),
    jax.ShapeDtypeStruct((150,), jnp.float32),
    jax.ShapeDtypeStruct((5_000,), jnp.float32),
    _laws.TREE,
)


def check_exchange(
    exchange: Exchange,
    like: PyTree = None,
    *,
    mesh: Mesh | None = None,
    max_error: float = _laws.MAX_ERROR,
) -> None:
    """Function: check that your own exchange obeys the laws of the contract.

    The check needs several devices. On a CPU, call `jax.config.update("jax_num_cpu_devices", 4)`
    before the first use of JAX. The laws are: "value" (the exchange compares, hashes and is
    frozen), "shapes" (mean, error and stats have the right shapes, and the state keeps its shapes),
    "replicas" (all workers get the same bits), "mean" (the mean is that of the sent values),
    "bytes" (the compiled program sends `wire_bytes`), "vmap" (vmap and shard_map agree), "finite"
    (the result is finite for zeros, huge and tiny values), "fidelity" (the mean is within
    `max_error` of the mean of x, with a positive inner product), and "not hidden" (for a NaN of one
    worker, all workers get a mean that is not finite). Laws on values are checked in eight steps.

    Args:
      exchange: an exchange for the workers of the mesh.
      like: the shapes of a gradient, a pytree; by default three vectors and a small tree.
      mesh: a mesh with the axes of the exchange; by default `("data",)` over four devices.
      max_error: bound of ||x - mean|| / ||x||, with x the mean of the workers' gradients, which are
        correlated. Pass inf to skip "fidelity" if the exchange must learn first.

    Raises:
      AssertionError: if a law does not hold. The error names the law, the input and the remedy. If
        `wire_bytes` raises ValueError because the bytes change by step, "bytes" is skipped.
      ValueError: if there are too few devices.

    Example:
      >>> like = jax.ShapeDtypeStruct((150,), "float32")
      >>> fg.testing.check_exchange(fg.AllGather(fg.TopK(fraction=0.1)), like)
    """
    _recipe.check_exchange("check_exchange(exchange)", exchange)
    laws = Laws("check_exchange", exchange)
    laws.value(Exchange)
    mesh = _mesh(mesh)
    for tree in LIKES if like is None else (like,):
        # The first bucket that `compressed_pmean` would pass to the exchange.
        bucket = _bucketing.bucket_likes(tree, Bucketing().for_exchange(exchange))[0]
        _check(laws, exchange, bucket, mesh, max_error)


def _mesh(mesh: Mesh | None) -> Mesh:
    if mesh is not None:
        axes = (AxisType.Auto,) * len(mesh.axis_names)
        return Mesh(mesh.devices, mesh.axis_names, axis_types=axes)
    remedy = f"call jax.config.update('jax_num_cpu_devices', {WORKERS}) first, or pass a mesh."
    found = len(jax.devices())
    check(found >= WORKERS, "check_exchange(mesh)", f"have {WORKERS} devices", found, remedy)
    return Mesh(np.array(jax.devices()[:WORKERS]), ("data",), axis_types=(AxisType.Auto,))


def _check(laws: Laws, exchange: Exchange, like: PyTree, mesh: Mesh, max_error: float) -> None:
    name = ", ".join(f"float32{list(leaf.shape)}" for leaf in jax.tree.leaves(like))
    size = sum(leaf.size for leaf in jax.tree.leaves(like))
    workers, axes = mesh.size, tuple(mesh.axis_names)
    axis: AxisName = axes[0] if len(axes) == 1 else axes

    def one(x: PyTree, state: State, number: jax.Array) -> Averaged:
        shared, local = jax.random.split(jax.random.key(5))
        step = Step(number, shared, jax.random.fold_in(local, jax.lax.axis_index(axis)))
        return exchange.mean(x, state, Comm(axis, step))

    rule = f"it must trace under shard_map with check_vma=True, for {name}"
    remedy = "average by the collectives of `comm`, and keep a worker's own state in State.own."
    with laws.running("shapes", rule, remedy):
        init, run = map(jax.jit, _sharded_over(exchange, one, like, mesh, axis))
        state = jax.eval_shape(init)
        rows = jax.tree.map(lambda a: jax.ShapeDtypeStruct((workers, *a.shape), a.dtype), like)
        args = rows, state, jax.ShapeDtypeStruct((), jnp.int32)
        out: Averaged = jax.eval_shape(run, *args)
        program = run.lower(*args).compile(compiler_options=_laws.options(size))
    remedy = "reshape and cast it to the shape and dtype of x."
    laws.same_spec("mean, a row a worker,", out.mean, rows, remedy)
    if out.error is not None:
        laws.same_spec("error, a row a worker,", out.error, rows, remedy)
    kept = out.error is not None or bool(jax.tree.leaves(state))
    rule = "an exchange without a state must return `error`"
    laws.need(kept, "mean", rule, "None", "return x minus the sent values as `error`.")
    count = jax.ShapeDtypeStruct((workers,), jnp.int32)
    laws.same_spec("overflow, a row a worker,", out.stats.overflow, count, "return 0.")
    laws.same_state(out.state, state)
    _bytes(laws, exchange, like, audit(program), name)

    state = init()
    got = first = None
    for number in range(_laws.STEPS[-1] + 1):
        inputs, when = _inputs_of(like, workers, number), f"{name}, step {number}"
        for what in inputs if number == 0 else (USUAL,):  # the last one in any case
            got: Any = program(inputs[what], state, np.int32(number))
            _good(laws, inputs[what], got, workers, f"for {what}, {when}")
        if size > 8 and max_error < math.inf:  # of few values, an exchange may send none
            x, mean = (_mean(tree) for tree in (inputs[USUAL], got.mean))
            laws.along("the mean", x, mean, f"for {USUAL}, {when}")
            remedy = "divide by the workers; or pass max_error=math.inf if it must learn first."
            laws.bounded("the mean", x, mean, max_error, f"for {USUAL}, {when}", remedy)
        if number in _laws.STEPS:
            _bad(laws, program, inputs[USUAL], workers, state, number, when)
        first = first or got
        state = got.state
    assert first
    under_vmap = lambda x: one(x, exchange.init(like), jnp.int32(0)).mean  # noqa: E731
    for name_of in reversed(axes):
        under_vmap = jax.vmap(under_vmap, axis_name=name_of)
    x = _inputs_of(like, workers, 0)[USUAL]
    x = jax.tree.map(lambda a: a.reshape(*mesh.devices.shape, *a.shape[1:]), x)
    rule = "jax.vmap must give the mean of shard_map"
    remedy = "ask jax.lax for the size and the index of the axis, not jax.devices()."
    laws.near("vmap", rule, jax.jit(under_vmap)(x), first.mean, f"for {name}", remedy)


def _mean(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda a: np.asarray(a, np.float64).mean(0), tree)


def _good(laws: Laws, x: PyTree, got: Averaged, workers: int, where: str) -> None:
    """Laws for finite inputs: replicas, finite, mean."""
    rows = [np.asarray(a) for a in jax.tree.leaves((got.mean, got.stats))]
    laws.need(
        all(a.tobytes() == workers * a[:1].tobytes() for a in rows), "replicas",
        "mean and stats must have the same bits on all workers", f"different bits {where}",
        "add payloads in the order of the workers, and draw by step.shared.",
    )  # fmt: skip
    laws.finite((got.mean, got.error), where, "divide by the workers before adding.")
    rule, remedy = "stats.finite must be True for finite values", "use jnp.all(jnp.isfinite(x))."
    laws.need(np.all(got.stats.finite), "finite", rule, f"False {where}", remedy)
    if got.error is not None:
        rule = "mean must be the mean of x - error over the workers"
        remedy = "return x minus the sent values as `error`, or None to keep it in the state."
        sent = jax.tree.map(lambda x, e: np.asarray(x, np.float64) - np.asarray(e), x, got.error)
        found, wanted = _mean(got.mean), _mean(sent)
        # The error is rounded relative to x, so x - error loses sent values far smaller than x.
        rounded = np.finfo(np.float32).eps * np.abs(_laws.flat(x)).max()
        close = np.abs(_laws.flat(found) - _laws.flat(wanted)).max() <= rounded
        if not close:
            laws.near("mean", rule, found, wanted, where, remedy, most=1e-3)


def _bytes(
    laws: Laws, exchange: Exchange, like: PyTree, found: tuple[Collective, ...], name: str
) -> None:
    try:
        promised = exchange.wire_bytes(like)
    except ValueError:  # the bytes change by step
        return
    for branch in {c.branch for c in found if c.branch} or {()}:
        sent = sum(c.bytes for c in found if c.branch in ((), branch))
        laws.need(
            sent == promised, "bytes",
            f"the compiled program must send the {promised} bytes of wire_bytes, for {name}",
            f"{sent}: {[(c.kind, c.dtype, c.shape) for c in found]}",
            "correct wire_bytes, or send 32-bit integers, which no compiler widens.",
        )  # fmt: skip


def _bad(
    laws: Laws, program: Any, good: PyTree, workers: int, state: PyTree, step: int, when: str
) -> None:
    few = None if step == 0 else 1  # after step 0, one position and one value, to save time
    remedy = "add `stats.poison` of `comm.gather` to the mean."
    for number, leaf in enumerate(jax.tree.leaves(good)):
        n = leaf.size // workers
        for index, position in enumerate(sorted({0, n // 2, n - 1})[:few]):
            for bad in _laws.BAD[:few]:
                worker = index % workers
                x = _laws.spoiled(good, number, worker * n + position, bad)
                means = jax.tree.leaves(program(x, state, np.int32(step)).mean)
                where = f"for {bad} at position {position} of worker {worker}, {when}"
                for other, own in enumerate(zip(*map(np.asarray, means), strict=True)):
                    laws.not_hidden(own, f"the mean of worker {other}", where, remedy)


def _sharded_over(
    exchange: Exchange, one: Callable[..., Averaged], like: PyTree, mesh: Mesh, axis: AxisName
) -> tuple[Callable[[], PyTree], Callable[..., Averaged]]:
    """Wrap `init` and one step in shard_map, with a row of global arrays for each worker."""
    rows, shared = PartitionSpec(axis), PartitionSpec()
    specs = State(shared, rows)
    out_specs: Any = (rows, rows, specs, rows)

    def row(x: PyTree, state: State, number: jax.Array) -> Any:
        own, state = jax.tree.map(lambda a: a[0], x), drop_rows(state)
        out = one(own, state, number)
        stats = Stats.of_all([out.stats])
        mean, error, stats = jax.tree.map(lambda a: a[None], (out.mean, out.error, stats))
        return mean, error, add_rows(out.state), stats

    start = lambda: add_rows(exchange.init(like))  # noqa: E731
    init = jax.shard_map(start, mesh=mesh, in_specs=(), out_specs=specs)
    run = jax.shard_map(row, mesh=mesh, in_specs=(rows, specs, shared), out_specs=out_specs)
    return init, lambda *args: Averaged(*run(*args))


def _inputs_of(like: PyTree, workers: int, step: int) -> dict[str, PyTree]:
    """Make trees with a row for each worker. Errors name an input by its key."""
    seeds = range(step * (workers + 1), (step + 1) * (workers + 1))
    trees = [_laws.tree_of(like, seed) for seed in seeds]
    own = _laws.stack(trees[:workers])
    related = jax.tree.map(np.add, own, trees[workers])
    out = {"unrelated values": own}
    for name, scale in {"zeros": 0.0, "huge values": 1e35, "tiny values": 1e-30}.items():
        out[name] = jax.tree.map(lambda a, s=scale: a / 10 * s, own)
    return out | {USUAL: related}
