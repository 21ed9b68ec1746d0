"""Gradients of a few steps, kept as they came."""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import PyTree
from fftgrad._values import check_choice
from fftgrad.exchanges._per_worker import PerWorker, add_worker_axis, drop_worker_axis

Dtype = Literal["float32", "bfloat16"]

NOTHING = -1
"""In place of the number of a step where a slot is empty."""


class RecordState(NamedTuple):
    """State of `record_gradients`.

    Attributes:
      step: how many gradients there were, int32, equal on all workers.
      taken: for each slot the number of the step whose gradient is in it, int32; -1 until then.
      gradients: the slots: of each worker its own gradients, zeros until then.
    """

    step: jax.Array
    taken: tuple[jax.Array, ...]
    gradients: PerWorker


def record_gradients(
    steps: Iterable[int], *, dtype: Dtype = "float32"
) -> optax.GradientTransformation:
    """Transformation: the same gradients, of which those of a few steps are kept.

    In front of `compressed_pmean` it sees what a worker would send before anything is lost, which
    `fg.advise.analyze` looks into:

        tx = optax.chain(
            fg.advise.record_gradients(steps=(10, 100, 1000)),
            fg.compressed_pmean(exchange, memory, axis_name="data"),
            optax.adamw(3e-4),
        )
        ...
        fg.advise.save_gradients("gradients.npz", fg.advise.recorded(opt_state))

    What is kept is data in the optimizer's state, with a row for each worker: nothing waits for the
    host, and a checkpoint has it too. Each step has a slot of its own, written in that step alone.
    In the others a slot is neither read nor written if the state is donated, as by
    `fg.data_parallel(..., donate_argnums=1)`; if not, it is copied with the rest of the state. It
    takes as much memory as there are steps in `steps`, times a gradient.

    With another number of workers (`fg.checkpoint.reshard_state`, `fftgrad.checkpoint`) the slots
    start anew, because a mean of two workers' gradients is the gradient of neither; save before
    what is in them. Under a `jax.vmap` that maps the whole state, step number included, each step
    writes all slots, because there both sides of a condition are computed.

    Args:
      steps: the numbers of the steps, that of the first one 0.
      dtype: in what to keep them: "float32", or "bfloat16" in half of the memory, rounded.

    Returns:
      An `optax.GradientTransformation` whose state is a `RecordState`.

    Claims: in float32, what is kept is the worker's gradient to the bit.

    Raises:
      ValueError: if there is no step, one twice or a negative one, or `dtype` is neither.
      TypeError: if `steps` are no whole numbers.

    Example:
      >>> import fftgrad as fg
      >>> import jax.numpy as jnp
      >>> tx = fg.advise.record_gradients(steps=(1,))
      >>> state = tx.init(jnp.zeros(2))
      >>> for value in (3.0, 4.0, 5.0):
      ...     same, state = tx.update(jnp.full(2, value), state)
      >>> same.tolist(), fg.advise.recorded(state).gradients[1][0].tolist()
      ([5.0, 5.0], [4.0, 4.0])
    """
    numbers = _checked(steps)
    check_choice("record_gradients(dtype)", dtype, get_args(Dtype))

    def init(params: optax.Params) -> RecordState:
        zeros = jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), dtype), params)
        return RecordState(
            step=jnp.zeros((), jnp.int32),
            taken=tuple(jnp.full((), NOTHING, jnp.int32) for _ in numbers),
            gradients=add_worker_axis((zeros,) * len(numbers)),
        )

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, RecordState]:
        del params
        slots = drop_worker_axis(state.gradients)
        # One condition for each slot: where all are under one, or under a switch, XLA copies those
        # that are not written.
        kept = [
            _kept(state.step == number, updates, slot)
            for number, slot in zip(numbers, slots, strict=True)
        ]
        taken = tuple(
            jnp.where(state.step == number, state.step, before)
            for number, before in zip(numbers, state.taken, strict=True)
        )
        return updates, RecordState(state.step + 1, taken, add_worker_axis(type(slots)(kept)))

    return optax.GradientTransformation(init, update)


def _kept(due: jax.Array, updates: PyTree, slot: PyTree) -> PyTree:
    """The gradient if it is due, else what is in the slot."""

    def take(slot: PyTree) -> PyTree:
        return jax.tree.map(lambda g, old: _axes.vary_like(g.astype(old.dtype), old), updates, slot)

    def leave(slot: PyTree) -> PyTree:
        return jax.tree.map(_axes.vary_like, slot, updates)

    return lax.cond(due, take, leave, slot)


def _checked(steps: Iterable[int]) -> tuple[int, ...]:
    if not isinstance(steps, Iterable) or isinstance(steps, str):
        raise TypeError(
            f"record_gradients(steps): must be numbers of steps, got {steps!r}; use (10, 100, "
            "1000)."
        )
    numbers = tuple(steps)
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        raise TypeError(
            f"record_gradients(steps): must be whole numbers, got {numbers}; use (10, 100)."
        )
    if not numbers or len(set(numbers)) < len(numbers) or min(numbers) < 0:
        raise ValueError(
            "record_gradients(steps): must be one step or more, each once and from 0 on, got "
            f"{numbers}; "
            "use (10, 100, 1000)."
        )
    return numbers
