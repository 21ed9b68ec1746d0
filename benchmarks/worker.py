"""One worker in JAX."""

import sys
import time
from typing import Any

import jax
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from job import Framework, Job, load_params, work
from methods import AXIS, LINKS, Method, Setting
from tasks import WORKLOADS, Task

import fftgrad as fg


class Trainer:
    """A task under a method, compiled: a program for the gradient, and one for the update.

    The parameters and the state are held here and nowhere else, because a step donates them. With
    local steps the parameters differ between the workers; each process has its own copy of what
    counts as replicated, and `check_vma=False` lets it. A leading axis would cost a copy of them.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.method = job, LINKS[job.method]
        self.task = WORKLOADS[job.workload](job.smoke)
        self.setting = Setting(job.workers, job.steps)
        self.mesh = jax.make_mesh((job.workers,), (AXIS,), axis_types=(AxisType.Auto,))
        tail = clipped(self.method, self.task, job.steps)
        self.tx = self.method.assemble(self.setting, tail)
        params = load_params(job.params)
        specs = fg.state_specs(jax.eval_shape(self.tx.init, params), AXIS)
        self.params: Any = jax.device_put(params, NamedSharding(self.mesh, P()))
        self.state: Any = self.compiled(self.tx.init, P(), specs, self.params)(self.params)

        self.batches = self.task.batches((job.seed, job.worker), 1)
        first = next(self.task.batches((job.seed, job.worker), 1))
        inputs = self.params, *map(self.put, first)
        self.gradient = self.compiled(self._gradient, (P(), P(AXIS), P(AXIS)), P(AXIS), *inputs)
        inputs = self.params, self.state, self.gradient(*inputs)[1]
        ins, outs = (P(), specs, P(AXIS)), (P(), specs)
        self.update = self.compiled(self._update, ins, outs, *inputs, donate=(0, 1, 2))
        one = self.put(np.zeros(1, np.float32))
        self.total = self.compiled(lambda x: lax.psum(x, AXIS), P(AXIS), P(), one)
        self.every = self.method.every
        # What local steps send every so many of them is in a branch of its own, and so is what is
        # sent after a dense start, in the last.
        listed = fg.audit(self.update)
        branch = max(collective.branch for collective in listed)
        self.collectives = [collective for collective in listed if collective.branch == branch]
        self.loss: Any = None

    def put(self, x: np.ndarray[Any, Any]) -> jax.Array:
        """This worker's rows of a global array."""
        rows = NamedSharding(self.mesh, P(AXIS))
        shape = (self.job.workers * x.shape[0], *x.shape[1:])
        return jax.make_array_from_process_local_data(rows, x, shape)

    def compiled(self, function: Any, ins: Any, outs: Any, *args: Any, donate: Any = ()) -> Any:
        """A program over the workers."""
        mapped = jax.shard_map(
            function, mesh=self.mesh, in_specs=ins, out_specs=outs, check_vma=False
        )
        return jax.jit(mapped, donate_argnums=donate).lower(*args).compile()

    def _gradient(self, params: Any, inputs: jax.Array, labels: jax.Array) -> Any:
        return _add_axis(jax.value_and_grad(self.task.loss)(params, (inputs, labels)))

    def _update(self, params: Any, state: Any, gradient: Any) -> Any:
        own = jax.tree.map(lambda g: g[0], gradient)
        updates, state = self.tx.update(own, state, params)
        return optax.apply_updates(params, updates), state

    def step(self, number: int) -> dict[str, float]:
        """One step on the next batch, and the seconds of its two programs."""
        inputs, labels = map(self.put, next(self.batches))
        start = time.perf_counter()
        self.loss, gradient = jax.block_until_ready(self.gradient(self.params, inputs, labels))
        middle = time.perf_counter()
        updated = self.update(self.params, self.state, gradient)
        self.params, self.state = jax.block_until_ready(updated)
        return {"compute_s": middle - start, "update_s": time.perf_counter() - middle}

    def agree(self, value: float) -> float:
        """The sum of a number over the workers, when all have come that far."""
        return float(_local(self.total(self.put(np.array([value], np.float32))))[0])

    def assess(self) -> float:
        """The held-out metric, of what all workers have in common."""
        common = getattr(self.state, "anchor", self.params)
        return self.task.assess(jax.tree.map(_local, common))["loss"]


def clipped(method: Method, task: Task, steps: int) -> Any:
    """What follows the exchange, on gradients that are not too long; or one of our optimizers."""
    inner = method.inner(task.adam, task.schedule(method.pace * task.rate, steps))
    if method.optimizer is not None:
        return inner
    clip = optax.identity() if method.directs is not None else optax.clip_by_global_norm(1.0)
    return optax.chain(clip, inner)


def _add_axis(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)


def _local(array: jax.Array) -> jax.Array:
    return array.addressable_shards[0].data


def prepare(job: Job) -> Framework:
    """A trainer among its peers."""
    jax.distributed.initialize(
        job.coordinator,
        job.workers,
        job.worker,
        initialization_timeout=120,
        heartbeat_timeout_seconds=60,
        shutdown_timeout_seconds=10,
    )
    trainer = Trainer(job)
    facts = {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(trainer.params)),
        "link_bytes": sum(c.link_bytes(job.workers) for c in trainer.collectives) / trainer.every,
    }
    return Framework(
        trainer.step,
        lambda: float(_local(trainer.loss)[0]),
        trainer.assess,
        trainer.agree,
        facts,
        trainer.every,
    )


if __name__ == "__main__":
    work(Job.loads(sys.argv[1]), prepare)
