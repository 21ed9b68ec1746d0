"""An island that trains to a round; one process of it.

island_program.py STORE NAME ROUNDS [ADDRESS PROCESSES PROCESS]
"""

import sys
import time

import jax
from processes import tell


def main(store, name, rounds, address=None, processes=1, process=0):
    if address is not None:
        jax.distributed.initialize(address, processes, process)
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import fftgrad as fg

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, P("data"))
    shapes = {"w": (16, 8), "b": (8,)}
    params = {
        path: jax.device_put(jnp.zeros(shape, jnp.bfloat16 if path == "b" else jnp.float32), place)
        for path, shape in shapes.items()
    }
    codec = fg.chain(fg.Dct(block=16), fg.TopK(fraction=0.2), fg.LogQuantizer(bits=4))
    settings = fg.islands.Settings(
        fg.AllGather(codec, clip_to_median=True),
        sync_every=2,
        islands=3,
        deadline=4.0,
        anchors=3,
    )
    target = {path: jnp.linspace(-1, 1, np.prod(s)).reshape(s) for path, s in shapes.items()}

    @jax.jit
    def step(params, noise):
        def one(p, t):
            return (p - 0.05 * (p - t + 0.1 * noise)).astype(p.dtype)

        return jax.tree.map(one, params, target)

    rng = np.random.default_rng(abs(hash(name)) % 2**32)
    with fg.islands.Island(store, name, params, settings=settings) as island:
        params = island.params
        tell("in", island.round)
        while island.round < rounds:
            params = island.step(step(params, np.float32(rng.standard_normal())), weight=4.0)
            tell("round", island.round)
            time.sleep(0.02)
        if not process:
            counted = sum(outcome.counted for outcome in island.outcomes)
            tell("end", island.round, island.digest, counted)
        total = jax.jit(lambda tree: sum(jnp.sum(jnp.abs(leaf)) for leaf in tree.values()))
        assert np.isfinite(float(total(params)))


if __name__ == "__main__":
    store, name, rounds, *rest = sys.argv[1:]
    address, *numbers = rest or [None]
    main(store, name, int(rounds), address, *map(int, numbers))
