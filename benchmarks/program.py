"""A task under a method, compiled for simulated workers; and a run of it, as a record."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from methods import AXIS, Method
from tasks import Params, Task

import fftgrad as fg


class Program:
    """A task under a method, compiled once for all rates and seeds.

    The workers are rows of one device's arrays (`vmap`). What they share has one row.
    """

    def __init__(self, task: Task, method: Method, workers: int) -> None:
        self.task, self.method, self.workers = task, method, workers
        self.own = method.every > 1  # whether the workers have parameters of their own in between
        tx, params = method.assemble(workers, 0.0), 0 if self.own else None
        state = jax.tree.map(
            lambda spec: 0 if AXIS in spec else None,
            fg.state_specs(jax.eval_shape(tx.init, task.params(0)), AXIS),
            is_leaf=lambda spec: isinstance(spec, P),
        )
        over = functools.partial(jax.vmap, axis_name=AXIS, axis_size=workers)
        axes, results = (params, state, 0, None), (params, state, 0)
        self.init = jax.jit(over(tx.init, in_axes=(None,), out_axes=state))
        self.step = jax.jit(over(self._step, in_axes=axes, out_axes=results))

    def _step(self, params: Params, state: Any, batch: Any, rate: jax.Array) -> Any:
        value, gradient = fg.value_and_grad(self.task.loss, AXIS)(params, batch)
        tx = self.method.assemble(self.workers, rate)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    def ratio(self) -> float:
        """Bytes of a float32 gradient over those that a worker hands to collectives in a step."""
        like, recipe = self.task.params(0), self.method.made(self.workers)
        dense = sum(leaf.nbytes for leaf in jax.tree.leaves(like))
        return self.method.every * dense / fg.wire_bytes(recipe, like)


def run(
    program: Program, steps: int, rate: float, seed: int, curve: bool = False
) -> dict[str, Any]:
    """One training run, as a record; the rate is in units of the task's own.

    With `curve`, it has the held-out losses by step, twenty times in a run.
    """
    task, workers = program.task, program.workers
    params, batches = task.params(seed), task.batches(seed, workers)
    state, common = program.init(params), params
    if program.own:
        params = jax.tree.map(lambda p: jnp.stack([p] * workers), params)
    rates = task.schedule(rate * task.rate, steps)
    assessed = list[list[float]]()
    for count in range(steps):
        batch = [a.reshape(workers, -1, *a.shape[1:]) for a in next(batches)]
        params, state, _ = program.step(params, state, batch, jnp.float32(rates(count)))
        common = optax.tree.get(state, "anchor") if program.own else params
        if curve and (count + 1) % max(1, steps // 20) == 0:
            assessed.append([count + 1, round(task.assess(common), 4)])
    return {
        "task": task.name,
        "method": program.method.name,
        "rate": rate,
        "seed": seed,
        "steps": steps,
        "loss": task.assess(common),
        "mean_ratio": program.ratio(),
        **({"assessed": assessed} if curve else {}),
    }


def score(record: Any) -> float:
    """Lower is better; a run that diverged is worst."""
    return record["loss"] if np.isfinite(record["loss"]) else float("inf")
