"""An exchange of any chain: what it takes here, what it sends, what a step takes with it."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from fftgrad import _axes
from fftgrad._axes import AxisName
from fftgrad._contracts import PyTree
from fftgrad._values import check_choice, check_count, check_kind, check_transformation
from fftgrad.exchanges import _layout
from fftgrad.ops import _collectives
from fftgrad.ops._shapes import by_path
from fftgrad.planning import _alone, _link, _timing
from fftgrad.planning._gradients import Array, GradientLog
from fftgrad.planning._link import Algorithm, Link, Parts, exchange_seconds, step_seconds
from fftgrad.planning._timing import Agree

AXIS, SLOW, FAST = "data", "slow", "fast"
BUCKETS = 8
"""Of what is traced of a model that is larger."""


class Groups(NamedTuple):
    """How workers are joined."""

    axes: Mapping[str, int]  # how many there are along each axis, the slow one first
    axis_name: AxisName  # by which a step calls them
    fast: Link | None  # the link of the second axis, if there is one

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many workers there are along each axis."""
        return tuple(self.axes.values())

    @property
    def workers(self) -> int:
        """How many there are."""
        return math.prod(self.sizes)

    @property
    def slow(self) -> str:
        """The axis of the slow links."""
        return next(iter(self.axes))

    def links(self, slow: Link) -> Link | dict[str, Link]:
        """The link of all, or that of each axis."""
        return slow if self.fast is None else dict(zip(self.axes, (slow, self.fast), strict=True))


def groups(
    owner: str,
    workers: int | None,
    fast: tuple[int, Link] | None,
    axis_name: AxisName | None,
    mesh: Mesh | None = None,
) -> Groups:
    """The workers and their axes; as many as the mesh has, unless it is said."""
    name = (AXIS if fast is None else (SLOW, FAST)) if axis_name is None else axis_name
    _axes.check_names(f"{owner}(axis_name)", name)
    if mesh is not None:
        _axes.check_mesh(f"{owner}(axis_name)", mesh, name)
        workers = _axes.mesh_size(mesh, name) if workers is None else workers
    workers = check_count(f"{owner}(workers)", workers, "one exchanges nothing.", least=2)
    if fast is None:
        # All that a flat exchange knows of several axes is how many workers they have together.
        return Groups({name if isinstance(name, str) else AXIS: workers}, name, None)
    joined, link = fast
    if workers % joined or not 1 < joined < workers:
        raise ValueError(
            f"{owner}(fast): must be a divisor of the {workers} workers that leaves two groups at "
            f"least, got {joined}; leave it out where no links are fast."
        )
    names = _axes.names(name)
    if len(names) != 2:
        raise ValueError(
            f"{owner}(axis_name): must name the slow axis and the fast one, got {name!r}; use "
            "('slow', 'fast')."
        )
    sizes = (workers // joined, joined)
    return Groups(dict(zip(names, sizes, strict=True)), name, Link.of(link))


def like_of(owner: str, params: PyTree) -> PyTree:
    """The shapes of parameters, in float32."""
    _layout.check_tree(owner, "params", params)
    if not count(params):
        raise ValueError(
            f"{owner}(params): must have values, got none; pass the parameters, or their shapes."
        )
    return _layout.like(params)


def count(params: PyTree) -> int:
    """How many values they have."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def smaller(params: PyTree, share: float) -> PyTree:
    """A share of a model, with matrices of the same form."""

    def small(leaf: Any) -> Any:
        by = share ** (1 / max(1, sum(rows > 1 for rows in leaf.shape)))
        shape = tuple(max(1, round(rows * by)) for rows in leaf.shape)
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    return jax.tree.map(small, params)


def part(params: PyTree) -> tuple[PyTree, int]:
    """A model of few buckets, and how many of it send what this one sends.

    A trace grows with the buckets. They are alike where every matrix is longer than one and cut.
    """
    limit = _layout.BUCKET_LIMIT
    times = -(-count(params) // (BUCKETS * limit))
    matrices = (leaf for leaf in jax.tree.leaves(params) if len(leaf.shape) > 1)
    if times == 1 or any(math.prod(leaf.shape) <= limit for leaf in matrices):
        return params, 1
    return smaller(params, 1 / times), times


def gradients_of(
    owner: str, given: Sequence[PyTree] | GradientLog | None, like: PyTree
) -> list[PyTree] | None:
    """Gradients as arrays, in the containers of the parameters; of a log, all there are."""
    wanted = {name: leaf.shape for name, leaf in by_path(like).items()}
    found: list[PyTree] = []
    for tree in given.trees if isinstance(given, GradientLog) else given or ():
        own = {name: np.asarray(leaf) for name, leaf in by_path(tree).items()}
        if {name: x.shape for name, x in own.items()} != wanted:
            raise ValueError(
                f"{owner}(gradients): must be trees like params, got one that differs; pass a list "
                "of gradients of these parameters."
            )
        leaves = [jnp.asarray(narrow(own[name])) for name in wanted]
        most = max((float(jnp.max(jnp.abs(leaf))) for leaf in leaves if leaf.size), default=0.0)
        # CPUs flush subnormal values to zero, of which there is no relative error.
        if not np.finfo(np.float32).tiny <= most < math.inf:
            raise ValueError(
                f"{owner}(gradients): must be finite in float32 and not all zero, got a largest "
                f"value of {most:g}; leave that step out."
            )
        found.append(jax.tree.unflatten(jax.tree.structure(like), leaves))
    return found or None


def narrow(x: Array) -> Array:
    """In float32 what no gradient is, such as float64."""
    with np.errstate(over="ignore"):  # which is then not finite
        return x if x.dtype in (jnp.bfloat16, jnp.float16) else x.astype(np.float32)


ROUNDS = 1
"""The least that are timed: of what takes longer than the seconds that are given, one is enough."""


class Timing(NamedTuple):
    """What an exchange takes on a device, without the links.

    Attributes:
      compress: seconds until the first message can leave.
      decompress: seconds of all else: decoding what all workers sent, memory, the mean.
      workers: how many there were along each axis; () if that is not known.
      compile: seconds until it could begin, tracing included; 0 if that is not known.
    """

    compress: float
    decompress: float
    workers: tuple[int, ...] = ()
    compile: float = 0.0


def axis_of(axes: Mapping[str, int]) -> AxisName:
    """The name of the only axis, or the names of all."""
    names = tuple(axes)
    return names[0] if len(names) == 1 else names


def check_timing(argument: str, timing: object, workers: tuple[int, ...]) -> None:
    """Refuses what is no timing, or one of other workers."""
    remedy = "use fg.planning.Timing(compress=0.001, decompress=0.002)."
    check_kind(argument, timing, Timing, remedy)
    assert isinstance(timing, Timing)
    for part in timing[:2]:
        _link.seconds(argument, part)
    if timing.workers not in ((), workers):
        raise ValueError(
            f"{argument}: must be of the workers that are planned for, {workers} along the axes, "
            f"got one of {timing.workers}; measure with the same workers and fast links."
        )


def time_exchange(
    tx: optax.GradientTransformation,
    params: PyTree,
    axes: Mapping[str, int],
    *,
    every: int = 1,
    mesh: Mesh | None = None,
    gradients: Sequence[PyTree] | GradientLog | None = None,
    seconds: float = 0.5,
) -> Timing:
    """Function: what an exchange of any chain takes on this device, without the links.

    It is timed as one of so many equal workers, as `fg.planning.measure` does; use it for what no
    `fg.planning.Candidate` can say, such as an optimizer that exchanges.

    Args:
      tx: the chain, without the optimizer if the step has one already.
      params: the parameters, or their shapes.
      axes: how many workers there are along each axis that it names: `{"data": 16}`.
      every: the updates of which one exchanges, with local steps: all of them are timed.
      mesh: in several processes, the mesh, so that all begin together and the slowest counts.
      gradients: trees like `params` to time with, or what `fg.planning.load_gradients` returned;
        heavy-tailed random values, if left out.
      seconds: the time that the rounds take, about.

    Returns:
      A `Timing`. With local steps all of it is in `decompress`, because nothing hides.

    Wire: nothing is sent but, with a mesh, one number a round.

    Example:
      >>> dgc = fg.compressed_pmean(fg.methods.dgc(0.01), axis_name="data")
      >>> timing = fg.planning.time_exchange(dgc, jnp.zeros(1000), {"data": 4}, seconds=0.01)
      >>> timing.compress > 0
      True
    """
    check_transformation("time_exchange(tx)", tx)
    like = like_of("time_exchange", params)
    given = gradients_of("time_exchange", gradients, like)
    if mesh is not None:
        _axes.check_mesh("time_exchange(axes)", mesh, tuple(axes))
    check_count("time_exchange(every)", every, "use 1 without local steps.")
    agree = _timing.agreement(mesh, axis_of(axes))
    inputs = lambda: given or inputs_like(like)  # noqa: E731
    return timing_of(tx, like, axes, inputs, seconds, every, agree)


def timing_of(
    tx: Any,
    like: PyTree,
    axes: Mapping[str, int],
    inputs: Callable[[], Sequence[PyTree]],
    seconds: float,
    every: int = 1,
    agree: Agree = float,
    apart: bool = True,
) -> Timing:
    """What `every` updates take, of which one exchanges; with `apart`, until the first message."""
    update = jax.jit(_alone.alone(tx.update, axes), donate_argnums=1)
    begun = time.perf_counter()
    whole = update.lower(like, jax.eval_shape(tx.init, like), like).compile()
    compiled = agree(time.perf_counter() - begun)
    params = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
    # Compiled, so that no two arrays share a buffer: one cannot be given away twice.
    state, gradients = jax.jit(tx.init)(params), inputs()

    def turn(gradient: PyTree) -> Any:
        nonlocal state
        mean = None
        for _ in range(every):
            mean, state = whole(gradient, state, params)
        return mean, state

    took, first = _timing.timed(turn, gradients, seconds, ROUNDS, agree).seconds, 0.0
    if apart and every == 1:  # nothing hides where steps are local
        start = jax.jit(_alone.until_sent(tx.update, axes))
        begin = lambda gradient: start(gradient, state, params)  # noqa: E731
        first = min(took, _timing.timed(begin, gradients, seconds, ROUNDS, agree).seconds)
    return Timing(first, took - first, tuple(axes.values()), compiled)


def traffic(
    argument: str,
    tx: Any,
    like: PyTree,
    state: PyTree,
    axes: Mapping[str, int],
    every: int = 1,
) -> tuple[_collectives.Collective, ...]:
    """The collectives of a transformation, which came as an `argument`, in so many steps.

    What it sends under a condition it sends in one of them, all else in each.
    """
    found = _collectives.collectives(tx.update, axes, like, state, like)
    if any(c.repeated for c in found):
        raise ValueError(
            f"{argument}: must send outside of loops, got a collective in one, whose turns a trace "
            "does not count; unroll it."
        )
    # Of a meeting under a condition, one branch sends; of more than one, only some of them.
    if len({c.branch for c in found if c.branch}) > (every > 1):
        raise ValueError(
            f"{argument}: must send the same in every step, got an exchange that changes by step; "
            "say every=4 of 4 local steps, or plan the parts of a schedule one by one."
        )
    always = tuple(c for c in found if not c.branch)
    return always * every + tuple(c for c in found if c.branch)


def inputs_like(like: PyTree) -> list[PyTree]:
    """Two trees of heavy-tailed values, as gradients have them."""
    leaves, structure = jax.tree.flatten(like)
    keys = jax.random.split(jax.random.key(0), (2, len(leaves)))
    trees = [jax.tree.unflatten(structure, row) for row in keys]
    draw = lambda x, key: (jax.random.normal(key, x.shape) ** 3 * 1e-3).astype(x.dtype)  # noqa: E731
    return [jax.tree.map(draw, like, tree) for tree in trees]


def predict_step(
    tx: optax.GradientTransformation,
    params: PyTree,
    *,
    step: str | float,
    link: Link | str | float | Mapping[str, Link],
    axes: Mapping[str, int],
    timing: Timing | None = None,
    every: int = 1,
    buckets: int = 1,
    algorithm: Algorithm = "fastest",
) -> float:
    """Function: what a step takes with any chain, as `plan` predicts it for its candidates.

    What the chain sends is read off a trace, without devices; docs/results/predictions.md has
    the model.

    Args:
      tx: the chain, without the optimizer if `step` has one already.
      params: the parameters, or their shapes.
      step: seconds of a step without any exchange, or a text: "300ms".
      link: that of each worker, or its bandwidth alone: "1gbit"; or of each axis: `{"slow": ...,
        "fast": ...}`.
      axes: how many workers there are along each axis that the chain names: `{"data": 16}`.
      timing: what an exchange takes on a device, from `fg.planning.time_exchange`, which is called
        if it is left out.
      every: the steps of which one exchanges, with local steps.
      buckets: in how many the gradient leaves while the backward pass runs: as many as the chain's
        `Layout(bucket_bytes=...)` makes.
      algorithm: of the collectives, as in `fg.planning.plan`.

    Returns:
      Seconds of a step, the mean over those with and without an exchange.

    Raises:
      ValueError: if what is sent changes from step to step, or is sent in a loop.

    Example:
      >>> params = jax.ShapeDtypeStruct((5000, 5000), "float32")
      >>> dgc = fg.compressed_pmean(fg.methods.dgc(0.001), axis_name="data")
      >>> timing = fg.planning.Timing(compress=0.05, decompress=0.02)
      >>> link = fg.planning.Link("1gbit", "100us")
      >>> seconds = fg.planning.predict_step(
      ...     dgc, params, step="300ms", link=link, axes={"data": 16}, timing=timing
      ... )
      >>> f"{seconds:.2f} s"
      '0.39 s'
    """
    check_transformation("predict_step(tx)", tx)
    check_count("predict_step(buckets)", buckets, "use 1 for no overlap.")
    check_choice("predict_step(algorithm)", algorithm, get_args(Algorithm))
    like, own = like_of("predict_step", params), _link.seconds("predict_step(step)", step)
    links: Link | dict[str, Link]
    if isinstance(link, Mapping):
        links = {axis: Link.of(one) for axis, one in link.items()}
        if missing := sorted({*axes} - {*links}):
            raise ValueError(
                f"predict_step(link): must have a link for each axis, got none for {missing}; add "
                "fg.planning.Link('1gbit')."
            )
    else:
        links = Link.of(link)
    check_count("predict_step(every)", every, "use 1 without local steps.")
    if timing is None:
        timing = time_exchange(tx, params, axes, every=every)
    check_timing("predict_step(timing)", timing, tuple(axes.values()))
    state = jax.eval_shape(tx.init, like)
    sent = traffic("predict_step(tx)", tx, like, state, axes, every)
    exchange = exchange_seconds(sent, links, algorithm)
    parts = Parts(own, timing.compress, exchange, timing.decompress)
    return step_seconds(parts, every=every, buckets=buckets)
