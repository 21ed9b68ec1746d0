"""What one of several processes, or the only one, finds: run by test_processes."""

import hashlib
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from cases import EXCHANGES, gradients
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from processes import tell

import fftgrad as fg

WORKERS = 4
LIKE = {
    "w": jax.ShapeDtypeStruct((10, 12), "float32"),
    "b": jax.ShapeDtypeStruct((8,), "float32"),
}
SHARDED = {"w": P(None, "model"), "b": P("model")}
HOSTS = fg.Hierarchical("fast", 2, fg.AllGather(fg.TopK(fraction=0.1)))


def mesh_of(*names, kind=AxisType.Auto):
    """Four devices along one axis, or two by two: along the first of two go the processes."""
    devices = np.array(jax.devices()[:WORKERS]).reshape((2,) * len(names) if names[1:] else -1)
    return Mesh(devices, names, axis_types=(kind,) * len(names))


def zeros():
    return jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), LIKE)


def spread(tree, shardings):
    """Global arrays, of which each process makes its own pieces."""

    def place(array, sharding):
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(place, tree, shardings)


def trained(exchange, mesh, axis, param_specs=None, steps=2):
    """The parameters and the state after a few steps."""
    seen = not isinstance(exchange, fg.Hierarchical)  # which keeps what it loses to itself
    tx = optax.chain(
        fg.compressed_pmean(exchange, fg.ErrorFeedback(), axis_name=axis, track_error=seen),
        optax.rmsprop(0.1),
    )
    state = fg.init_state(tx, zeros(), mesh, axis, param_specs)
    specs = fg.state_specs(state, axis, param_specs)
    param_specs = param_specs or jax.tree.map(lambda _: P(), LIKE)
    rows = jax.tree.map(lambda spec: P(axis, *spec), param_specs)

    def step(params, state, rows):
        loss = jax.lax.axis_index(axis).astype(jnp.float32)
        own = jax.tree.map(lambda g: g[0], rows)
        updates, state = tx.update(own, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(param_specs, specs, rows), out_specs=(param_specs, specs)
        )
    )
    over = lambda specs: jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)  # noqa: E731
    params = spread(zeros(), over(param_specs))
    workers = int(np.prod([mesh.shape[name] for name in np.atleast_1d(axis)]))
    for seed in range(steps):
        params, state = compiled(params, state, spread(gradients(LIKE, workers, seed), over(rows)))
    return params, state


def digest(tree, mesh):
    """A hash of all bits, wherever they are."""
    whole = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))(tree)
    return hashlib.sha256(
        b"".join(np.asarray(a).tobytes() for a in jax.tree.leaves(whole))
    ).hexdigest()


def numbers(found):
    return {name: float(value) for name, value in found.items()}


def is_replicated(leaf):
    own = fg._axes.vary(leaf, "data")
    return jnp.all(jax.lax.pmax(own, "data") == jax.lax.pmin(own, "data"))


def of_exchange(name):
    """Parameters, state and metrics after training by one of the exchanges of the table."""
    mesh = mesh_of("data")
    params, state = trained(EXCHANGES[name], mesh, "data")
    inside = jax.shard_map(
        lambda params, state: (
            fg.metrics(state, axis_name="data"),
            jax.tree.reduce(jnp.logical_and, jax.tree.map(is_replicated, params)),
        ),
        mesh=mesh,
        in_specs=(P(), fg.state_specs(state, "data")),
        out_specs=P(),
    )
    within, equal = jax.jit(inside)(params, state)
    return {
        "bits": digest((params, state), mesh),
        "metrics": numbers(fg.metrics(state)),
        "in jit": numbers(jax.jit(fg.metrics)(state)),
        "inside": numbers(within),
        "equal": bool(equal),
    }


def of_meshes():
    """Parameters sharded from process to process, and an exchange between processes."""
    sharded, hosts = mesh_of("model", "data"), mesh_of("slow", "fast")
    out = {}
    for mesh, trees in {
        sharded: trained(EXCHANGES["gather top-k"], sharded, "data", SHARDED),
        hosts: trained(HOSTS, hosts, ("slow", "fast")),
    }.items():
        out[str(mesh.axis_names)] = digest(trees, mesh), numbers(fg.metrics(trees[1]))
    return out


def of_init():
    """The state of parameters that are, in turn, on the host, on a device of it, and on all."""
    out = {}
    tx = fg.compressed_pmean(fg.AllGather(fg.Sign()), fg.ErrorFeedback(), axis_name="data")
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = mesh_of("data", kind=kind)
        for name, params in {
            "host": zeros(),
            "not committed": jax.tree.map(jnp.asarray, zeros()),
            "a device": jax.device_put(zeros(), jax.local_devices()[0]),
            "all": spread(zeros(), dict.fromkeys(LIKE, NamedSharding(mesh, P()))),
        }.items():
            state = fg.init_state(tx, params, mesh, "data")
            shape = state.memory.worker_rows.residual["w"].shape
            out[f"{kind} {name}"] = shape, digest(state, mesh)
    return out


def report(names):
    """All of it, as JSON has it."""
    found = {"init": of_init(), "meshes": of_meshes()}
    return json.loads(json.dumps(found | {name: of_exchange(name) for name in names}))


if __name__ == "__main__":
    coordinator, count, number, *names = sys.argv[1:]
    jax.distributed.initialize(coordinator, int(count), int(number), heartbeat_timeout_seconds=10)
    tell(json.dumps(report(names)))
    jax.distributed.shutdown()
