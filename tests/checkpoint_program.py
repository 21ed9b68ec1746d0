"""Trains some steps, from the newest checkpoint if there is one, and saves; one process of several.

checkpoint_program.py FOLDER STEPS SAVE_EVERY [ADDRESS PROCESSES PROCESS] [and FOLDER ...]
"""

import hashlib
import sys

import jax
from processes import tell


def main(folder, steps, every, address=None, processes=1, process=0):
    steps, every, processes, process = map(int, (steps, every, processes, process))
    if address is not None:
        jax.distributed.initialize(address, processes, process, heartbeat_timeout_seconds=3)
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import fftgrad as fg
    from fftgrad import checkpoint

    workers = jax.device_count()
    mesh = jax.make_mesh((workers,), ("data",), axis_types=(AxisType.Auto,))
    tx = optax.chain(
        fg.compressed_pmean(
            fg.TwoStage(fg.chain(fg.TopK(0.1), fg.LogQuantizer(6)), workers=workers),
            fg.ErrorFeedback(),
            axis_name="data",
        ),
        optax.rmsprop(1e-2),
    )

    def step(params, state, x, y):
        loss, grads = fg.value_and_grad(
            lambda p, x, y: jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"] - y) ** 2), "data"
        )(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, "data")

    train = fg.data_parallel(step, mesh, "data")
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(8, 32)), "v": rng.normal(size=(32, 1))}
    params = jax.tree.map(lambda a: a.astype(np.float32), params)
    params = jax.device_put(params, NamedSharding(mesh, P()))
    tree = {"params": params, "state": fg.init_state(tx, params, mesh, "data"), "count": 0}
    try:
        found = checkpoint.restore(folder, tree)
        tree = found.tree
        tell("restored", found.step, found.workers)
    except FileNotFoundError:
        tell("anew")
    params, state = tree["params"], tree["state"]
    sharding = NamedSharding(mesh, P("data"))
    for count in range(tree["count"], tree["count"] + steps):
        rng = np.random.default_rng(count)
        x = rng.normal(size=(workers * 4, 8)).astype(np.float32)
        rows = [jax.make_array_from_callback(a.shape, sharding, lambda i, a=a: a[i])
                for a in (x, np.sin(x.sum(1, keepdims=True)))]  # fmt: skip
        params, state, _ = train(params, state, *rows)
        done = count + 1
        if done % every == 0:
            checkpoint.save(folder, done, {"params": params, "state": state, "count": done})
            tell("saved", done)
    if processes > 1:
        own = jax.device_put(np.full(3, process, np.float32), jax.local_devices()[0])
        parts = [jax.device_put(own, device) for device in jax.local_devices()]
        copies = jax.make_array_from_single_device_arrays((3,), NamedSharding(mesh, P()), parts)
        try:
            checkpoint.save(folder, 10**6, {"fine": params, "w": copies})
        except ValueError as error:
            tell("refused", str(error).replace("\n", " "))
    shards = [s for a in jax.tree.leaves((params, state)) for s in a.addressable_shards]
    bits = b"".join(np.asarray(shard.data).tobytes() for shard in shards)
    tell("bits", hashlib.sha256(bits).hexdigest())
    if address is not None:
        jax.distributed.shutdown()


if __name__ == "__main__":
    for run in "\n".join(sys.argv[1:]).split("\nand\n"):
        main(*run.splitlines())
