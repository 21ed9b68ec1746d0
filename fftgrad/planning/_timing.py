"""Time programs, links and exchanges on this machine."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fftgrad import _axes
from fftgrad._axes import AxisName
from fftgrad._contracts import PyTree
from fftgrad._values import check, check_count, check_transformation
from fftgrad.exchanges import _bucketing
from fftgrad.ops import _collectives
from fftgrad.ops._collectives import RING, Axes
from fftgrad.planning._predict import Link, count, rounds

Agree = Callable[[float], float]
"""Waits for all processes, and returns the maximum of their numbers."""


class Timed(NamedTuple):
    """The times of a program."""

    seconds: float  # median over the rounds
    least: float  # seconds of the fastest round
    rounds: int


def timed(
    run: Callable[[Any], Any],
    inputs: Sequence[Any],
    seconds: float,
    least_rounds: int = 3,
    agree: Agree = float,
) -> Timed:
    """Time a function for at least `seconds` and `least_rounds`, with each input in turn.

    Two runs before are not timed: one compiles, and one allocates. With `agree`, all processes
    start each round together, record the slowest time, and run the same number of rounds.
    """
    for _ in range(2):
        jax.block_until_ready((inputs, run(inputs[0])))
    times, used = list[float](), 0.0
    while True:
        begun = time.perf_counter()
        used = agree(used)
        if used >= seconds and len(times) >= least_rounds:
            return Timed(statistics.median(times), min(times), len(times))
        start = time.perf_counter()
        result = jax.block_until_ready(run(inputs[len(times) % len(inputs)]))
        elapsed = agree(time.perf_counter() - start)
        del result  # free its memory before the next round, outside of the timed region
        times.append(elapsed)
        # Include `agree`, which may take far longer than the function over a slow link.
        used += time.perf_counter() - begun


def agreement(mesh: Mesh, axis_name: AxisName) -> Agree:
    """Make the `agree` function of a mesh; with one process, the identity."""
    if jax.process_count() == 1:
        return float
    most, spec = lambda x: lax.pmax(x, axis_name), P(axis_name)
    mapped = jax.shard_map(most, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False)
    program, workers = jax.jit(mapped), _axes.mesh_size(mesh, axis_name)

    def agree(value: float) -> float:
        return float(program(full(mesh, axis_name, workers, value)).addressable_shards[0].data[0])

    return agree


def full(mesh: Mesh, axis_name: AxisName, size: int, value: float) -> jax.Array:
    """Make a constant vector that is sharded over the axis; each process makes its own shards."""
    own, whole = NamedSharding(mesh, P(axis_name)), np.full(size, value, np.float32)
    return jax.make_array_from_callback(whole.shape, own, lambda index: whole[index])


# Links of a mesh.

SIZES = (1 << 13, 1 << 18, 1 << 22, 1 << 25)
"""Bytes of the timed vectors; of an all-gather, bytes of the result."""
COLLECTIVES: dict[str, Callable[[jax.Array, AxisName], jax.Array]] = {
    "all-reduce": lambda x, axis: lax.psum(x, axis),
    "all-gather": lambda x, axis: lax.all_gather(x, axis, tiled=True),
    "all-to-all": lambda x, axis: lax.all_to_all(x, axis, 0, 0, tiled=True),
}


class Sent(NamedTuple):
    """A timed collective."""

    kind: str
    rounds: float
    bytes: float  # bytes that each worker sent over its link
    seconds: float  # median


def measure_link(mesh: Mesh, axis_name: AxisName = "data", seconds: float = 1.0) -> Link:
    """Function: measure the latency and the bandwidth between the workers of a mesh.

    It times an all-reduce, an all-gather and an all-to-all of vectors of 8 KiB to 32 MiB, from the
    moment when all workers are ready until the last one is done. The bandwidth of each kind follows
    from the difference between the largest and the smallest vector. The latency is what the
    smallest vector takes beyond its bytes, per round of a ring. All processes must call this
    function together. On a slow link, large vectors that would take more than about four times
    `seconds` are left out. 8 and 256 KiB are always timed.

    Args:
      mesh: a mesh of real or simulated devices, in one or several processes.
      axis_name: the axis, or axes, whose links are measured.
      seconds: approximate seconds for each collective and size.

    Returns:
      A `Link`, the same on all workers. Its latency is that of one round of a ring. JAX's CPU
      collectives use only rings: with CPUs, plan with `algorithm="ring"`.

    Wire: a collective sends at most twice the bytes of its vector over each link, so 64 MiB for the
      largest. Each collective runs at least five times for each size.

    Example:
      >>> mesh = jax.make_mesh((2,), ("data",))
      >>> fg.planning.measure_link(mesh, "data", seconds=0.1).bandwidth > 0
      True
    """
    _axes.check_mesh("measure_link(axis_name)", mesh, axis_name)
    workers = _axes.mesh_size(mesh, axis_name)
    rule = f"have two workers at least along {axis_name!r}"
    remedy = "give the link as Link('1gbit', '100us')."
    check(workers > 1, "measure_link(mesh)", rule, workers, remedy)
    found, longest = list[Sent](), dict[int, float]()
    for size in SIZES:
        if len(longest) > 1:  # predict the seconds of the next size, without its latency
            (small, before), (large, last) = list(longest.items())[-2:]
            if (last - before) / (large - small) * (size - large) > 4 * max(seconds, last):
                break
        for kind, collective in COLLECTIVES.items():
            own = size // workers if kind == "all-gather" else size
            took = _time(mesh, axis_name, collective, own, seconds)
            over = own * RING[kind](workers)
            found.append(Sent(kind, rounds(kind, workers), over, took))
        longest[size] = max(sent.seconds for sent in found[-len(COLLECTIVES) :])
    return fit(found)


def fit(found: list[Sent]) -> Link:
    """Fit the bandwidth to the largest and smallest message, then the latency to the smallest.

    A regression over all sizes would overestimate the bandwidth, because links often let short
    bursts pass at a higher rate.
    """
    rates, rest = dict[str, float](), list[float]()
    for kind in dict.fromkeys(sent.kind for sent in found):
        own = sorted((t for t in found if t.kind == kind), key=lambda t: t.bytes)
        small, large = own[0], own[-1]
        # Noise may exceed the difference. Differences below 1 % are not measurable.
        more = max(large.seconds - small.seconds, large.seconds / 100)
        rates[kind] = (large.bytes - small.bytes) / more
        rest.append((small.seconds - small.bytes / rates[kind]) / small.rounds)
    best = max(rates.values())
    shares = tuple((kind, rate / best) for kind, rate in rates.items() if rate < best)
    return Link(best, max(0.0, statistics.median(rest)), shares)


def _time(
    mesh: Mesh, axis_name: AxisName, collective: Callable[..., jax.Array], size: int, seconds: float
) -> float:
    """Return the seconds of a collective to which each worker passes `size` bytes."""
    workers, spec = _axes.mesh_size(mesh, axis_name), P(axis_name)
    words = -(-size // 4 // workers) * workers
    run = lambda x: collective(x, axis_name).ravel()[:1]  # noqa: E731
    mapped = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    inputs = [full(mesh, axis_name, words * workers, float(n)) for n in (1, 2)]
    return timed(jax.jit(mapped), inputs, seconds, agree=agreement(mesh, axis_name)).seconds


# Exchanges on one device.


class Timing(NamedTuple):
    """Codec time of an exchange on a device, without the links.

    Attributes:
      compress: seconds until the first message can be sent.
      decompress: seconds after that: decoding the payloads of all workers, memory, the mean.
      muon: seconds per step of Muon's matrix products; 0 if `decompress` includes them.
    """

    compress: float
    decompress: float
    muon: float = 0.0


def time_exchange(
    tx: optax.GradientTransformation,
    params: PyTree,
    axes: Mapping[str, int],
    *,
    every: int = 1,
    seconds: float = 0.5,
) -> Timing:
    """Function: time the exchange of any optax chain on this device, without the links.

    One device is enough for any number of workers: it simulates one worker, and each collective
    returns the result of workers that all sent the same. The time includes decoding all payloads.
    Use it for a chain that no `fg.planning.Candidate` describes, such as your own optimizer.

    Args:
      tx: the chain, without the optimizer if `step` of `predict_step` includes its time.
      params: parameters, or their shapes.
      axes: number of workers along each axis: `{"data": 16}`.
      every: number of local steps per exchange. All of them are timed together.
      seconds: approximate seconds of timed rounds.

    Returns:
      A `Timing`. With local steps, `decompress` has all of the time, because nothing overlaps.

    Example:
      >>> dgc = fg.compressed_pmean(fg.methods.dgc(0.01), axis_name="data")
      >>> timing = fg.planning.time_exchange(dgc, jnp.zeros(1000), {"data": 4}, seconds=0.01)
      >>> timing.compress > 0
      True
    """
    check_transformation("time_exchange(tx)", tx)
    check_count("time_exchange(every)", every, "use 1 without local steps.")
    like = like_of("time_exchange", params)
    update: Any = jax.jit(alone(tx.update, axes), donate_argnums=1)
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
    # Under jit, so that no two arrays share a buffer, which could not be donated twice.
    state, gradients = jax.jit(tx.init)(zeros), heavy_tailed(like)

    def turn(gradient: PyTree) -> Any:
        nonlocal state
        mean = None
        for _ in range(every):
            mean, state = update(gradient, state, zeros)
        return mean, state

    # If an exchange takes longer than `seconds`, time one round.
    took, first = timed(turn, gradients, seconds, 1).seconds, 0.0
    if every == 1:  # nothing overlaps with local steps
        start = jax.jit(until_sent(tx.update, axes))
        begin = lambda gradient: start(gradient, state, zeros)  # noqa: E731
        first = min(took, timed(begin, gradients, seconds, 1).seconds)
    return Timing(first, took - first)


def like_of(owner: str, params: PyTree) -> PyTree:
    """Return the shapes of parameters, in float32."""
    _bucketing.check_tree(owner, "params", params)
    remedy = "pass the parameters, or their shapes."
    check(count(params) > 0, f"{owner}(params)", "have values", "none", remedy)
    return _bucketing.like(params)


def heavy_tailed(like: PyTree) -> list[PyTree]:
    """Draw two trees of values with heavy tails, like those of gradients."""
    leaves, structure = jax.tree.flatten(like)
    keys = jax.random.split(jax.random.key(0), (2, len(leaves)))
    trees = [jax.tree.unflatten(structure, row) for row in keys]
    draw = lambda x, key: (jax.random.normal(key, x.shape) ** 3 * 1e-3).astype(x.dtype)  # noqa: E731
    return [jax.tree.map(draw, like, tree) for tree in trees]


def alone(function: Callable[..., Any], axes: Axes) -> Callable[..., Any]:
    """Make a function that runs `function` as worker 0 of simulated workers along `axes`.

    A collective does not communicate: it returns the result for workers that all sent the same.
    """
    return lambda *args: _call(function, axes, args)[0]


def until_sent(function: Callable[..., Any], axes: Axes) -> Callable[..., Any]:
    """Make a function that returns only the operands of the first collective of `function`.

    XLA then removes all later operations. If the first collective is inside a conditional, return
    the operands of the conditional; without any collective, return ().
    """
    return lambda *args: next(iter(_call(function, axes, args)[1]), ())


def _call(function: Callable[..., Any], axes: Axes, args: Any) -> tuple[Any, list[Sequence[Any]]]:
    """Return the result for one worker, and the operands of each collective."""
    trace = jax.make_jaxpr(function, axis_env=list(axes.items()), return_shape=True)
    closed, shape = trace(*args)
    sent = list[Sequence[Any]]()
    out = _run(closed.jaxpr, closed.consts, jax.tree.leaves(args), axes, sent)
    return jax.tree.unflatten(jax.tree.structure(shape), out), sent


def _run(
    jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any], axes: Axes, sent: list[Any]
) -> list[Any]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        out = _apply(eqn, list(map(read, eqn.invars)), axes, sent)
        values.update(zip(eqn.outvars, out, strict=True))
    return list(map(read, jaxpr.outvars))


def _apply(eqn: core.JaxprEqn, args: list[Any], axes: Axes, sent: list[Any]) -> Sequence[Any]:
    name = eqn.primitive.name
    if name == "axis_index":
        return [jnp.int32(0)]
    if name in _collectives.KINDS and (along := _collectives.axes_of(eqn, axes)):
        workers = _collectives.group_size(eqn, along, axes)
        sent.append(args)
        # Without a barrier, XLA would see that all payloads are equal, and decode only one.
        return lax.optimization_barrier([_received(eqn, workers, x) for x in args])
    inner = list(_collectives.programs_in(eqn))
    if not any(has(program, {*_collectives.KINDS, "axis_index"}) for program in inner):
        out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
        return out if eqn.primitive.multiple_results else [out]
    if name == "cond":
        if any(has(program, {*_collectives.KINDS}) for program in inner):
            sent.append(args)

        def branch(closed: Any) -> Callable[..., Any]:
            return lambda *own: _run(closed.jaxpr, closed.consts, own, axes, [])

        return lax.switch(args[0], list(map(branch, eqn.params["branches"])), *args[1:])
    if name in ("while", "scan") or len(inner) != 1:
        raise NotImplementedError(
            f"alone(function): must have its collectives outside of loops, got one inside of "
            f"{name}; time it on real devices."
        )
    (closed,) = (p for p in eqn.params.values() if getattr(p, "jaxpr", p) is inner[0])
    return _run(inner[0], getattr(closed, "consts", ()), args, axes, sent)


def has(jaxpr: core.Jaxpr, names: set[str]) -> bool:
    """Return True if a program has any of the primitives, at any depth."""
    if any(eqn.primitive.name in names for eqn in jaxpr.eqns):
        return True
    return any(has(inner, names) for eqn in jaxpr.eqns for inner in _collectives.programs_in(eqn))


def _received(eqn: core.JaxprEqn, workers: int, x: Any) -> Any:
    """Return the array that worker 0 receives if all workers send `x`."""
    params = eqn.params
    match eqn.primitive.name:
        case "psum":
            return x * jnp.asarray(workers, x.dtype)
        case "all_gather":
            return _stack(x, params["all_gather_dimension"], workers, params["tiled"])
        case "all_to_all":
            first = _first(x, params["split_axis"], workers, True)  # tiled or not
            return _stack(first, params["concat_axis"], workers, True)
        case "reduce_scatter":
            first = _first(x, params["scatter_dimension"], workers, params["tiled"])
            return first * jnp.asarray(workers, x.dtype)
        case _:
            return x


def _first(x: Any, axis: int, workers: int, tiled: bool) -> Any:
    if not tiled:
        return lax.index_in_dim(x, 0, axis, keepdims=False)
    return lax.slice_in_dim(x, 0, x.shape[axis] // workers, axis=axis)


def _stack(x: Any, axis: int, workers: int, tiled: bool) -> Any:
    if tiled:
        return jnp.concatenate([x] * workers, axis)
    return jnp.broadcast_to(jnp.expand_dims(x, axis), (*x.shape[:axis], workers, *x.shape[axis:]))
