"""What one of several processes captures: run by test_capture."""

import sys

import jax
import numpy as np
from cases import gradients
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from processes import tell

import fftgrad as fg

WORKERS = 4
LIKE = {"w": jax.ShapeDtypeStruct((6, 4), "float32"), "b": jax.ShapeDtypeStruct((7,), "float32")}


def kept(devices, names, specs):
    """The state after a step in which each worker has its row of the gradients."""
    kind = (AxisType.Auto,) * len(names)
    mesh, tx = Mesh(devices, names, axis_types=kind), fg.advise.record_gradients((0,))
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), LIKE)
    state = fg.init_state(tx, zeros, mesh, "data", specs)
    own = fg.state_specs(state, "data", specs)
    rows = {name: P("data", *spec) for name, spec in specs.items()}
    batch = {
        name: jax.make_array_from_callback(
            leaf.shape, NamedSharding(mesh, rows[name]), np.asarray(leaf).__getitem__
        )
        for name, leaf in gradients(LIKE, mesh.shape["data"]).items()
    }
    step = jax.shard_map(
        lambda g, state: tx.update(jax.tree.map(lambda a: a[0], g), state)[1],
        mesh=mesh,
        in_specs=(rows, own),
        out_specs=own,
    )
    return jax.jit(step)(batch, state)


if __name__ == "__main__":
    coordinator, count, number, path = sys.argv[1:]
    jax.distributed.initialize(coordinator, int(count), int(number), heartbeat_timeout_seconds=10)
    devices = np.array(jax.devices()[:WORKERS])
    fg.advise.save_gradients(
        path, fg.advise.recorded(kept(devices, ("data",), {"w": P(), "b": P()}))
    )
    halves = {"w": P(None, "model"), "b": P()}
    # Each process has both halves of its workers' gradients, and then one half of all workers'.
    whole = fg.advise.recorded(kept(devices.reshape(2, 2), ("data", "model"), halves))
    fg.advise.save_gradients(f"{path}.halves.npz", whole)
    try:
        fg.advise.recorded(kept(devices.reshape(2, 2).T, ("data", "model"), halves))
    except ValueError as error:
        tell(error)
    jax.distributed.shutdown()
