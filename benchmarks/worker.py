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
from methods import AXIS, LINKS
from tasks import TASKS

import fftgrad as fg


class Trainer:
    """A task under a method, compiled: a program for the gradient, and one for the update.

    The parameters and the state are held here and nowhere else, because a step donates them. With
    local steps the parameters differ between the workers; each process has its own copy of what
    counts as replicated, and `check_vma=False` lets it. A leading axis would cost a copy of them.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.method = job, LINKS[job.method]
        self.task = TASKS["large"](job.smoke)
        self.mesh = jax.make_mesh((job.workers,), (AXIS,), axis_types=(AxisType.Auto,))
        rates = self.task.schedule(self.task.rate, job.steps)
        self.tx = self.method.assemble(job.workers, rates)
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
        self.one = self.put(np.zeros(1, np.float32))
        self.total = self.compiled(lambda x: lax.psum(x, AXIS), P(AXIS), P(), self.one)
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

    def own_loss(self) -> float:
        """Of this worker's batch in the last step."""
        return float(self.loss.addressable_shards[0].data[0])

    def wait(self) -> None:
        """Until all workers have come that far."""
        jax.block_until_ready(self.total(self.one))


def _add_axis(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)


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
    sent = fg.audit(trainer.update)
    facts = {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(trainer.params)),
        "link_bytes": sum(c.link_bytes(job.workers) for c in sent) / trainer.method.every,
    }
    return Framework(trainer.step, trainer.own_loss, trainer.wait, facts)


if __name__ == "__main__":
    work(Job.loads(sys.argv[1]), prepare)
