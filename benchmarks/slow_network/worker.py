"""One worker in JAX."""

import collections
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


def prepare(job: Job) -> Framework:
    """Compiles the step: a program for the gradient, and one for exchange and optimizer."""
    jax.distributed.initialize(
        job.coordinator,
        job.workers,
        job.worker,
        initialization_timeout=120,
        heartbeat_timeout_seconds=20,
        shutdown_timeout_seconds=10,
    )
    workload, method = WORKLOADS[job.workload](job.smoke), METHODS[job.method]
    mesh = jax.make_mesh((job.workers,), (AXIS,), axis_types=(AxisType.Auto,))
    spread, replicated = NamedSharding(mesh, P(AXIS)), NamedSharding(mesh, P())
    exchange, tail = method.exchange(job.workers), method.tail(workload.adam)
    tx = optax.chain(exchange, tail)

    def put(x: np.ndarray[Any, Any]) -> jax.Array:
        shape = (job.workers * x.shape[0], *x.shape[1:])
        return jax.make_array_from_process_local_data(spread, x, shape)

    def compiled(function: Any, ins: Any, outs: Any, *args: Any, donate: Any = ()) -> Any:
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False
        )
        return jax.jit(mapped, donate_argnums=donate).lower(*args).compile()

    def gradient(params: Any, inputs: Any, labels: Any) -> Any:
        rows = jax.value_and_grad(workload.loss)(params, inputs, labels)
        return jax.tree.map(lambda g: g[None], rows)

    def apply(params: Any, updates: Any, rate: jax.Array) -> Any:
        return jax.tree.map(lambda p, u: p - rate * u, params, updates)

    def update(params: Any, state: Any, rows: Any, rate: jax.Array) -> Any:
        updates, state = tx.update(jax.tree.map(lambda g: g[0], rows), state, params)
        return apply(params, updates, rate), state

    def count(value: jax.Array) -> jax.Array:
        return lax.psum(value, AXIS)

    # From here on everything is held once: a step donates what it replaces.
    held: dict[str, Any] = {"params": jax.device_put(load_params(job.params), replicated)}
    specs = fg.state_specs(jax.eval_shape(tx.init, held["params"]), AXIS)
    held["state"] = compiled(tx.init, P(), specs, held["params"])(held["params"])
    batches = workload.batches(job.worker, job.seed)
    first = [put(x) for x in next(workload.batches(job.worker, job.seed))]
    rate = jax.device_put(np.float32(0), replicated)
    gradient_step = compiled(
        gradient, (P(), P(AXIS), P(AXIS)), P(AXIS), held["params"], *first
    )
    rows = gradient_step(held["params"], *first)[1]
    update_step = compiled(
        update,
        (P(), specs, P(AXIS), P()),
        (P(), specs),
        held["params"],
        held["state"],
        rows,
        rate,
        donate=(0, 1, 2),
    )
    del rows
    total = compiled(count, P(AXIS), P(), put(np.zeros(1, np.float32)))
    assess = jax.jit(workload.assess)

    def step(number: int) -> dict[str, float]:
        inputs, labels = map(put, next(batches))
        rate = jax.device_put(np.float32(workload.learning_rate(number)), replicated)
        start = time.perf_counter()
        held["loss"], rows = jax.block_until_ready(gradient_step(held["params"], inputs, labels))
        middle = time.perf_counter()
        held["params"], held["state"] = jax.block_until_ready(
            update_step(held["params"], held["state"], rows, rate)
        )
        return {"compute_s": middle - start, "update_s": time.perf_counter() - middle}

    def agree(value: float) -> float:
        return float(local(total(put(np.array([value], np.float32))))[0])

    def assess_now() -> float:
        own = jax.tree.map(local, held["params"])
        return float(assess(own, *workload.held_out))

    collectives = [c for c in fg.audit(update_step) if c.branch == ()]

    def phases() -> dict[str, float]:
        _, rows = gradient_step(held["params"], *first)

        def vector(rows: Any) -> jax.Array:
            return jnp.concatenate([g.ravel() for g in jax.tree.leaves(rows)])

        def encode(rows: Any) -> Any:
            return jax.tree.map(lambda p: p[None], fg.compress(method.codec, vector(rows))[:2])

        def optimize(params: Any, state: Any, rows: Any, rate: jax.Array) -> Any:
            updates, state = tail.update(jax.tree.map(lambda g: g[0], rows), state, params)
            return apply(params, updates, rate), state

        def finish() -> None:
            held["params"], held["tail"] = jax.block_until_ready(
                program(held["params"], held["tail"], rows, rate)
            )

        out = dict[str, float]()
        sizes = collections.Counter[str]()
        for collective in collectives:
            sizes[collective.kind] += collective.bytes
        wire = [put(np.ones(-(-size // 4 // job.workers) * job.workers, np.float32)) for size in sizes.values()]

        def send(*arrays: jax.Array) -> Any:
            return [BARE[kind](array) for kind, array in zip(sizes, arrays, strict=True)]

        program = compiled(send, P(AXIS), P(AXIS), *wire)
        out["wire_s"] = timed(lambda: jax.block_until_ready(program(*wire)), agree)
        del wire
        if method.codec is not None:
            coder = compiled(encode, P(AXIS), P(AXIS), rows)
            out["encode_s"] = timed(lambda: jax.block_until_ready(coder(rows)), agree)
        held["tail"] = held.pop("state")[1]
        like = jax.tree.map(lambda _: P(), held["tail"])
        program = compiled(
            optimize,
            (P(), like, P(AXIS), P()),
            (P(), like),
            held["params"],
            held["tail"],
            rows,
            rate,
            donate=(0, 1),
        )
        out["optimizer_s"] = timed(finish, agree)
        return out

    facts = {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(held["params"])),
        "collectives": [c._asdict() for c in collectives],
        "link_bytes": sum(c.link_bytes(job.workers) for c in collectives),
    }
    return Framework(
        step,
        lambda: float(local(held["loss"])[0]),
        assess_now,
        agree,
        phases,
        workload.metric == "accuracy",
        facts,
    )


def local(array: jax.Array) -> jax.Array:
    """This worker's own piece."""
    return array.addressable_shards[0].data


# Collectives of one float32 vector, for their time alone.
BARE: dict[str, Callable[[jax.Array], jax.Array]] = {
    "all-reduce": lambda x: lax.psum(x, AXIS),
    "all-gather": lambda x: lax.all_gather(x, AXIS, tiled=True),
    "all-to-all": lambda x: lax.all_to_all(x, AXIS, 0, 0, tiled=True),
}

if __name__ == "__main__":
    work(Job.loads(sys.argv[1]), prepare)
