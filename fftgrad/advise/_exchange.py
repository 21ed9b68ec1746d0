"""An exchange of any chain: what it takes here, what it sends, what a step takes with it."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from fftgrad import _axes
from fftgrad._axes import AxisName
from fftgrad._contracts import PyTree
from fftgrad._values import check_choice, check_count, check_kind, check_transformation
from fftgrad.advise import _alone, _inputs, _link, _timing
from fftgrad.advise._cost import Algorithm, Parts, exchange_seconds, step_seconds
from fftgrad.advise._gradients import GradientLog
from fftgrad.advise._link import Link
from fftgrad.advise._timing import Agree
from fftgrad.ops import _collectives

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
    remedy = "use fg.advise.Timing(compress=0.001, decompress=0.002)."
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

    It is timed as one of so many equal workers, as `fg.advise.measure` does; use it for what no
    `fg.advise.Candidate` can say, such as an optimizer that exchanges.

    Args:
      tx: the chain, without the optimizer if the step has one already.
      params: the parameters, or their shapes.
      axes: how many workers there are along each axis that it names: `{"data": 16}`.
      every: the updates of which one exchanges, with local steps: all of them are timed.
      mesh: in several processes, the mesh, so that all begin together and the slowest counts.
      gradients: trees like `params` to time with, or what `fg.advise.load_gradients` returned;
        heavy-tailed random values, if left out.
      seconds: the time that the rounds take, about.

    Returns:
      A `Timing`. With local steps all of it is in `decompress`, because nothing hides.

    Wire: nothing is sent but, with a mesh, one number a round.

    Example:
      >>> dgc = fg.compressed_pmean(fg.methods.dgc(0.01), axis_name="data")
      >>> timing = fg.advise.time_exchange(dgc, jnp.zeros(1000), {"data": 4}, seconds=0.01)
      >>> timing.compress > 0
      True
    """
    check_transformation("time_exchange(tx)", tx)
    like = _inputs.like_of("time_exchange", params)
    given = _inputs.gradients_of("time_exchange", gradients, like)
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
      timing: what an exchange takes on a device, from `fg.advise.time_exchange`, which is called
        if it is left out.
      every: the steps of which one exchanges, with local steps.
      buckets: in how many the gradient leaves while the backward pass runs: as many as the chain's
        `Layout(bucket_bytes=...)` makes.
      algorithm: of the collectives, as in `fg.advise.plan`.

    Returns:
      Seconds of a step, the mean over those with and without an exchange.

    Raises:
      ValueError: if what is sent changes from step to step, or is sent in a loop.

    Example:
      >>> params = jax.ShapeDtypeStruct((5000, 5000), "float32")
      >>> dgc = fg.compressed_pmean(fg.methods.dgc(0.001), axis_name="data")
      >>> timing = fg.advise.Timing(compress=0.05, decompress=0.02)
      >>> link = fg.advise.Link("1gbit", "100us")
      >>> seconds = fg.advise.predict_step(
      ...     dgc, params, step="300ms", link=link, axes={"data": 16}, timing=timing
      ... )
      >>> f"{seconds:.2f} s"
      '0.39 s'
    """
    check_transformation("predict_step(tx)", tx)
    check_count("predict_step(buckets)", buckets, "use 1 for no overlap.")
    check_choice("predict_step(algorithm)", algorithm, get_args(Algorithm))
    like, own = _inputs.like_of("predict_step", params), _link.seconds("predict_step(step)", step)
    links: Link | dict[str, Link]
    if isinstance(link, Mapping):
        links = {axis: Link.of(one) for axis, one in link.items()}
        if missing := sorted({*axes} - {*links}):
            raise ValueError(
                f"predict_step(link): must have a link for each axis, got none for {missing}; add "
                "fg.advise.Link('1gbit')."
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
