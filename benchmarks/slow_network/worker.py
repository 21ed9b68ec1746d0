"""One worker in JAX."""

import collections
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from job import Framework, Job, timed, work
from methods import AXIS, METHODS
from workloads import WORKLOADS, load_params

import fftgrad as fg


class Trainer:
    """A workload under a method, compiled: a program for the gradient, and one for the update.

    The parameters and the state are held here and nowhere else, because a step donates them.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.method = job, METHODS[job.method]
        self.workload = WORKLOADS[job.workload](job.smoke)
        self.mesh = jax.make_mesh((job.workers,), (AXIS,), axis_types=(AxisType.Auto,))
        self.tail = self.method.tail(self.workload.adam)
        self.tx = optax.chain(self.method.exchange(job.workers), self.tail)
        self.params: Any = jax.device_put(load_params(job.params), NamedSharding(self.mesh, P()))
        specs = fg.state_specs(jax.eval_shape(self.tx.init, self.params), AXIS)
        self.state: Any = self.compiled(self.tx.init, P(), specs, self.params)(self.params)

        self.batches = self.workload.batches(job.worker, job.seed)
        self.first = [self.put(x) for x in next(self.workload.batches(job.worker, job.seed))]
        inputs = self.params, *self.first
        self.gradient = self.compiled(self._gradient, (P(), P(AXIS), P(AXIS)), P(AXIS), *inputs)
        inputs = self.params, self.state, self.gradient(*inputs)[1], self.rate(0.0)
        update = functools.partial(self._update, self.tx)
        ins = P(), specs, P(AXIS), P()
        self.update = self.compiled(update, ins, (P(), specs), *inputs, donate=(0, 1, 2))
        one = self.put(np.zeros(1, np.float32))
        self.total = self.compiled(lambda x: lax.psum(x, AXIS), P(AXIS), P(), one)
        self.collectives = [c for c in fg.audit(self.update) if c.branch == ()]
        self.loss: Any = None

    def put(self, x: np.ndarray[Any, Any]) -> jax.Array:
        """This worker's rows of a global array."""
        rows = NamedSharding(self.mesh, P(AXIS))
        shape = (self.job.workers * x.shape[0], *x.shape[1:])
        return jax.make_array_from_process_local_data(rows, x, shape)

    def rate(self, value: float) -> jax.Array:
        """A learning rate, on all workers."""
        return jax.device_put(np.float32(value), NamedSharding(self.mesh, P()))

    def compiled(self, function: Any, ins: Any, outs: Any, *args: Any, donate: Any = ()) -> Any:
        """A program over the workers."""
        mapped = jax.shard_map(
            function, mesh=self.mesh, in_specs=ins, out_specs=outs, check_vma=False
        )
        return jax.jit(mapped, donate_argnums=donate).lower(*args).compile()

    def _gradient(self, params: Any, inputs: jax.Array, labels: jax.Array) -> Any:
        rows = jax.value_and_grad(self.workload.loss)(params, inputs, labels)
        return jax.tree.map(lambda g: g[None], rows)

    def _update(self, tx: Any, params: Any, state: Any, rows: Any, rate: jax.Array) -> Any:
        updates, state = tx.update(jax.tree.map(lambda g: g[0], rows), state, params)
        return jax.tree.map(lambda p, u: p - rate * u, params, updates), state

    def step(self, number: int) -> dict[str, float]:
        """One step on the next batch, and the seconds of its two programs."""
        inputs, labels = map(self.put, next(self.batches))
        rate = self.rate(self.workload.learning_rate(number))
        start = time.perf_counter()
        self.loss, rows = jax.block_until_ready(self.gradient(self.params, inputs, labels))
        middle = time.perf_counter()
        updated = self.update(self.params, self.state, rows, rate)
        self.params, self.state = jax.block_until_ready(updated)
        return {"compute_s": middle - start, "update_s": time.perf_counter() - middle}

    def agree(self, value: float) -> float:
        """The sum of a number over the workers, when all have come that far."""
        return float(_local(self.total(self.put(np.array([value], np.float32))))[0])

    def assess(self) -> float:
        """The held-out metric."""
        own = jax.tree.map(_local, self.params)
        return float(jax.jit(self.workload.assess)(own, *self.workload.held_out))

    def phases(self) -> dict[str, float]:
        """Seconds of what is inside of the update. There is no training after it."""
        rows = self.gradient(self.params, *self.first)[1]
        out = {"wire_s": self._time_wire()}
        if self.method.codec is not None:
            out["encode_s"] = self._time_encode(self.method.codec, rows)
        return out | {"optimizer_s": self._time_optimizer(rows)}

    def _time_wire(self) -> float:
        sizes = collections.Counter[str]()
        for collective in self.collectives:
            sizes[collective.kind] += collective.bytes
        words = (-(-size // 4 // self.job.workers) * self.job.workers for size in sizes.values())
        arrays = [self.put(np.ones(count, np.float32)) for count in words]

        def send(*arrays: jax.Array) -> list[jax.Array]:
            return [BARE[kind](array) for kind, array in zip(sizes, arrays, strict=True)]

        program = self.compiled(send, P(AXIS), P(AXIS), *arrays)
        return timed(lambda: jax.block_until_ready(program(*arrays)), self.agree)

    def _time_encode(self, codec: fg.Codec, rows: Any) -> float:
        def encode(rows: Any) -> Any:
            vector = jnp.concatenate([g.ravel() for g in jax.tree.leaves(rows)])
            return jax.tree.map(lambda part: part[None], fg.compress(codec, vector)[:2])

        program = self.compiled(encode, P(AXIS), P(AXIS), rows)
        return timed(lambda: jax.block_until_ready(program(rows)), self.agree)

    def _time_optimizer(self, rows: Any) -> float:
        params, (_, state) = self.params, self.state
        del self.params, self.state
        same = jax.tree.map(lambda _: P(), state)
        args = params, state, rows, self.rate(0.0)
        update = functools.partial(self._update, self.tail)
        ins = P(), same, P(AXIS), P()
        program = self.compiled(update, ins, (P(), same), *args, donate=(0, 1))

        def run() -> None:
            nonlocal params, state
            params, state = jax.block_until_ready(program(params, state, *args[2:]))

        return timed(run, self.agree)


def _local(array: jax.Array) -> jax.Array:
    return array.addressable_shards[0].data


# Collectives of one float32 vector, for their time alone.
BARE: dict[str, Callable[[jax.Array], jax.Array]] = {
    "all-reduce": lambda x: lax.psum(x, AXIS),
    "all-gather": lambda x: lax.all_gather(x, AXIS, tiled=True),
    "all-to-all": lambda x: lax.all_to_all(x, AXIS, 0, 0, tiled=True),
}


def prepare(job: Job) -> Framework:
    """A trainer among its peers."""
    jax.distributed.initialize(
        job.coordinator,
        job.workers,
        job.worker,
        initialization_timeout=120,
        heartbeat_timeout_seconds=20,
        shutdown_timeout_seconds=10,
    )
    trainer = Trainer(job)
    facts = {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(trainer.params)),
        "collectives": [c._asdict() for c in trainer.collectives],
        "link_bytes": sum(c.link_bytes(job.workers) for c in trainer.collectives),
    }
    return Framework(
        trainer.step,
        lambda: float(_local(trainer.loss)[0]),
        trainer.assess,
        trainer.agree,
        trainer.phases,
        trainer.workload.metric == "accuracy",
        facts,
    )


if __name__ == "__main__":
    work(Job.loads(sys.argv[1]), prepare)
