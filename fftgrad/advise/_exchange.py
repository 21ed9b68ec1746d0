"""An exchange of any chain: what it takes on this device, and what it sends."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from fftgrad import _axes
from fftgrad._axes import AxisName
from fftgrad._contracts import PyTree
from fftgrad._values import check_kind
from fftgrad.advise import _inputs, _timing, _together, _units
from fftgrad.advise._gradient_log import GradientLog
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
    """

    compress: float
    decompress: float
    workers: tuple[int, ...] = ()


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
        _units.seconds(argument, part)
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
    `fg.advise.Candidate` can say, such as `fg.methods` or an optimizer that exchanges.

    Args:
      tx: the chain, without the optimizer if the step has one already.
      params: the parameters, or their shapes.
      axes: how many workers there are along each axis that it names: `{"data": 16}`.
      every: the updates of which one exchanges, for local steps; all of them are timed. With
        fragments, those between two meetings.
      mesh: in several processes, the mesh, so that all begin together and the slowest counts.
      gradients: trees like `params` to time with, or what `fg.advise.load_gradients` returned;
        heavy-tailed random values, if left out.
      seconds: the time that the rounds take, about.

    Returns:
      A `Timing`. With local steps all of it is in `decompress`, because nothing hides.

    Wire: nothing is sent but, with a mesh, one number a round.

    Raises:
      TypeError: if a leaf is not what `compressed_pmean` takes.
      ValueError: if `every` is not positive, if gradients are not like `params`, are zeros or not
        finite, or if the mesh lacks an axis.

    Example:
      >>> import fftgrad as fg
      >>> import jax.numpy as jnp
      >>> dgc = fg.compressed_pmean(fg.methods.dgc(0.01), axis_name="data")
      >>> timing = fg.advise.time_exchange(dgc, jnp.zeros(1000), {"data": 4}, seconds=0.01)
      >>> timing.compress > 0
      True
    """
    _inputs.check_count("time_exchange(every)", every, "use 1 where each step exchanges.")
    like = _inputs.like_of("time_exchange", params)
    inputs = _inputs.gradients_of("time_exchange", gradients, like) or inputs_like(like)
    if mesh is not None:
        _axes.check_mesh("time_exchange(axes)", mesh, tuple(axes))
    agree = _together.agreement(mesh, axis_of(axes))
    return timing_of(tx, like, axes, inputs, seconds, every, agree)


def timing_of(
    tx: Any,
    like: PyTree,
    axes: Mapping[str, int],
    inputs: Sequence[PyTree],
    seconds: float,
    every: int,
    agree: Agree,
    apart: bool = True,
) -> Timing:
    whole, first = _time_update(tx, like, axes, inputs, seconds, every, agree), 0.0
    if apart and every == 1:  # nothing hides where steps are local
        first = min(whole, _time_until_sent(tx, like, axes, inputs, seconds, agree))
    return Timing(first, whole - first, tuple(axes.values()))


def _time_update(
    tx: Any,
    like: PyTree,
    axes: Mapping[str, int],
    inputs: Sequence[PyTree],
    seconds: float,
    every: int,
    agree: Agree,
) -> float:
    """Seconds that an update with an exchange takes here.

    Of a transformation with local steps, those of so many updates, of which one has an exchange.
    """
    params, state = _start(tx, like)
    update = jax.jit(_collectives.alone(tx.update, axes), donate_argnums=1)

    def turn(gradient: PyTree) -> Any:
        nonlocal state
        mean = None
        for _ in range(every):
            mean, state = update(gradient, state, params)
        return mean, state

    return _timing.timed(turn, inputs, seconds, ROUNDS, agree).seconds


def _time_until_sent(
    tx: Any,
    like: PyTree,
    axes: Mapping[str, int],
    inputs: Sequence[PyTree],
    seconds: float,
    agree: Agree,
) -> float:
    """Seconds until an update has its first message ready."""
    params, state = _start(tx, like)
    start = jax.jit(_collectives.until_sent(tx.update, axes))
    return _timing.timed(lambda g: start(g, state, params), inputs, seconds, ROUNDS, agree).seconds


def _start(tx: Any, like: PyTree) -> tuple[PyTree, Any]:
    params = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
    # Compiled, so that no two arrays share a buffer: one cannot be given away twice.
    return params, jax.jit(tx.init)(params)


def traffic(
    argument: str, tx: Any, like: PyTree, axes: Mapping[str, int], every: int = 1
) -> tuple[_collectives.Collective, ...]:
    """The collectives of a transformation, which came as an `argument`, in so many steps.

    What it sends under a condition it sends in one of them, all else in each.
    """
    state = jax.eval_shape(tx.init, like)
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
            "plan those that it is made of."
        )
    always = tuple(c for c in found if not c.branch)
    return always * every + tuple(c for c in found if c.branch)


def inputs_like(like: PyTree) -> list[PyTree]:
    return [_random(like, seed) for seed in (0, 1)]


def _random(like: PyTree, seed: int) -> PyTree:
    """Heavy-tailed values, as gradients have them."""
    leaves, structure = jax.tree.flatten(like)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    values = [
        (jax.random.normal(key, leaf.shape) ** 3 * 1e-3).astype(leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, values)
