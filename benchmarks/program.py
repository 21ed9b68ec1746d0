"""A task under a method, compiled for simulated workers; and a run of it, as a record."""

import collections
import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from methods import AXIS, Method, Setting, Transformation
from tasks import Batch, Params, Task

import fftgrad as fg


def simulated(workers: int) -> Mesh:
    """So many devices of this machine's CPU."""
    # Or their shared pool of threads may be full of devices that wait for each other.
    os.environ.setdefault("PJRT_NPROC", str(4 * workers))
    jax.config.update("jax_num_cpu_devices", workers)
    return Mesh(np.array(jax.devices("cpu")[:workers]), (AXIS,), axis_types=(AxisType.Auto,))


class Point(NamedTuple):
    """Where a run is: what a step starts from."""

    params: Params
    state: Any


class Program:
    """A task under a method, compiled once for all rates and seeds.

    The workers are devices; or, in half of the time, rows of one device's arrays (`vmap`).
    """

    def __init__(
        self, task: Task, method: Method, steps: int, mesh: Mesh, devices: bool = True
    ) -> None:
        self.task, self.method, self.mesh, self.devices = task, method, mesh, devices
        self.setting = Setting(mesh.size, steps)
        spread, whole = P(AXIS), P()
        tx = self.transformation(0.0)
        common = task.params(0)
        specs = fg.state_specs(jax.eval_shape(tx.init, common), AXIS)
        self.spec = spread if method.own else whole
        self.init = jax.jit(self._over_workers(tx.init, (whole,), specs))
        args, results = (self.spec, specs, spread, whole), (self.spec, specs, spread)
        self.on_devices = jax.jit(
            jax.shard_map(self._step, mesh=mesh, in_specs=args, out_specs=results)
        )
        self.train = jax.jit(self._over_workers(self._step, args, results))

    def _over_workers(self, function: Callable[..., Any], args: Any, results: Any) -> Any:
        """The function of each worker, as one of all."""
        if self.devices:
            return jax.shard_map(function, mesh=self.mesh, in_specs=args, out_specs=results)

        def axes(specs: Any) -> Any:
            return jax.tree.map(
                lambda spec: 0 if AXIS in spec else None, specs, is_leaf=lambda s: isinstance(s, P)
            )

        def rows(tree: Any, specs: Any, shape: Callable[[Any], Any]) -> Any:
            return jax.tree.map(
                lambda spec, part: jax.tree.map(shape, part) if AXIS in spec else part,
                specs,
                tree,
                is_leaf=lambda s: isinstance(s, P),
            )

        mapped = jax.vmap(
            function,
            in_axes=axes(args),
            out_axes=axes(results),
            axis_name=AXIS,
            axis_size=self.mesh.size,
        )

        def apart(a: Any) -> Any:
            return a.reshape(self.mesh.size, -1, *a.shape[1:])

        def joined(a: Any) -> Any:
            return a.reshape(-1, *a.shape[2:])

        return lambda *given: rows(mapped(*rows(given, args, apart)), results, joined)

    @functools.cached_property
    def compiled(self) -> Any:
        """For devices, whose collectives can be counted."""
        common = self.task.params(0)
        batch = self.put(next(self.task.batches(0, self.mesh.size)), P(AXIS))
        rate = self.put(jnp.float32(0), P())
        return self.on_devices.lower(*self.fresh(common), batch, rate).compile()

    def transformation(self, rate: Any) -> Transformation:
        """The whole optimizer."""
        return self.method.assemble(self.setting, self.method.inner(self.task.adam, rate))

    def _step(self, params: Params, state: Any, batch: Any, rate: jax.Array) -> Any:
        own = jax.tree.map(lambda row: row[0], params) if self.method.own else params
        value, gradient = fg.value_and_grad(self.task.loss, AXIS)(own, batch)
        updates, state = self.transformation(rate).update(gradient, state, own)
        own = optax.apply_updates(own, updates)
        return jax.tree.map(lambda p: p[None], own) if self.method.own else own, state, value[None]

    def put(self, value: Any, spec: P) -> Any:
        """On all devices."""
        return jax.device_put(value, NamedSharding(self.mesh, spec)) if self.devices else value

    def fresh(self, common: Params) -> Point:
        """Before the first step, from parameters that all workers have in common."""
        state = self.init(self.put(common, P()))
        if self.method.own:
            common = jax.tree.map(lambda p: jnp.stack([p] * self.mesh.size), common)
        return Point(self.put(common, self.spec), state)

    def common(self, at: Point) -> Params:
        """The parameters that all workers have in common."""
        return optax.tree.get(at.state, "anchor") if self.method.own else at.params

    def step(self, at: Point, batch: Batch, rate: float) -> tuple[Point, jax.Array]:
        """The next point, and the loss of each worker."""
        now = self.put(jnp.float32(rate), P())
        step = self.compiled if self.devices else self.train
        params, state, loss = step(*at, self.put(batch, P(AXIS)), now)
        return Point(params, state), loss

    def sent(self) -> tuple[float, float]:
        """Bytes that a worker hands to collectives: in a late step, and in the mean of all."""
        method, steps = self.method, self.setting.steps
        by_branch: collections.Counter[tuple[int, ...]] = collections.Counter()
        for collective in fg.audit(self.compiled):
            by_branch[collective.branch] += collective.bytes
        if method.own:
            every = sum(by_branch.values()) / method.every
            return every, every
        later, total, rest = by_branch[method.later], 0, steps
        for share, branch in method.phases:
            count = round(share * steps)
            total += count * by_branch[branch]
            rest -= count
        if method.once is not None and rest < steps:
            total += by_branch[method.once]
        return later, (total + rest * later) / steps


def run(program: Program, rate: float, seed: int, curve: bool = False) -> dict[str, Any]:
    """One training run, as a record; the rate is in units of the task's own.

    With `curve`, it has the held-out losses by step, twenty times in a run.
    """
    task, method, steps = program.task, program.method, program.setting.steps
    at = program.fresh(task.params(seed))
    batches = task.batches(seed, program.mesh.size)
    dense = sum(leaf.nbytes for leaf in jax.tree.leaves(program.common(at)))
    # A step of Adam has about the size of its rate, as one of signs has.
    rates = task.schedule(rate * (task.rate if method.directs is None else method.directs), steps)
    losses, assessed = collections.deque[jax.Array](maxlen=15), list[list[float]]()
    start = time.perf_counter()
    for count in range(steps):
        at, loss = program.step(at, next(batches), float(rates(count)))
        losses.append(loss)
        if curve and (count + 1) % max(1, steps // 20) == 0:
            assessed.append([count + 1, round(task.assess(program.common(at))["loss"], 4)])
    last = statistics.mean(float(np.mean(loss)) for loss in losses)  # which waits for the last
    elapsed = time.perf_counter() - start
    later, mean = program.sent()
    return {
        "task": task.name,
        "method": method.name,
        "rate": rate,
        "seed": seed,
        "steps": steps,
        **task.assess(program.common(at)),
        "bytes": later,
        "ratio": dense / later,
        "mean_ratio": dense / mean,
        "training_loss": round(last, 4),
        "ms_per_step": 1e3 * elapsed / steps,
        **({"assessed": assessed} if curve else {}),
    }


def score(record: Any) -> float:
    """Lower is better; a run that diverged is worst."""
    return record["loss"] if np.isfinite(record["loss"]) else float("inf")
