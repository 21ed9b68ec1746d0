"""How long a user waits before the first step: state, trace and compilation, by method and leaves.

Each row is a process of its own, without a cache of compiled programs: a training step of so many
leaves, of the eight shapes of a transformer's block, on 8 devices of this machine, is made, traced
and compiled. Nothing of it is timed while it runs.

    python benchmarks/compile_time.py
    python benchmarks/compile_time.py --leaves 400 --only top-k
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import _record
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import fftgrad as fg

WORKERS, WIDTH = 8, 32
BLOCK = {
    "norm/scale": (WIDTH,),
    "attention/in": (WIDTH, 3 * WIDTH),
    "attention/out": (WIDTH, WIDTH),
    "attention/bias": (3 * WIDTH,),
    "mlp/up": (WIDTH, 4 * WIDTH),
    "mlp/up_bias": (4 * WIDTH,),
    "mlp/down": (4 * WIDTH, WIDTH),
    "mlp/down_bias": (WIDTH,),
}


def exchanged(method: Any, **options: Any) -> Callable[[], optax.GradientTransformation]:
    """A method before Adam."""
    return lambda: optax.chain(
        fg.compressed_pmean(method, axis_name="data", **options), optax.adamw(1e-3)
    )


def filled(make: Any, **options: Any) -> Callable[[], optax.GradientTransformation]:
    """An optimizer of ours with a filled message."""
    exchange = fg.AllGather(fg.Budget(ratio=100))
    return lambda: make(
        1e-3, exchange=exchange, memory=fg.ErrorFeedback(), axis_name="data", **options
    )


def local(**options: Any) -> Callable[[], optax.GradientTransformation]:
    """Local steps of Adam."""
    signs = fg.TwoStage(fg.Sign(), WORKERS)
    return lambda: fg.optimizers.diloco(
        optax.adamw(1e-3), optax.sgd(1.0), 4, signs, axis_name="data", **options
    )


ROWS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "dense": exchanged(fg.AllReduce()),
    "top-k": exchanged(fg.methods.top_k(0.01)),
    "top-k, by leaf": exchanged(fg.methods.top_k(0.01), layout=fg.Layout("leaf")),
    "DGC": exchanged(fg.methods.dgc(0.001)),
    "EDEN 1 bit": exchanged(fg.methods.eden()),
    "PowerSGD 4": exchanged(fg.methods.power_sgd(4)),
    "100x, feedback Adam": filled(fg.optimizers.feedback_adam),
    "100x, Muon with a lead": filled(fg.optimizers.feedback_muon, lead=0.5),
    "local steps": local(),
    "local steps, 4 fragments": local(fragments=4, delay=1),
    "SparseLoCo": lambda: fg.optimizers.sparse_loco(optax.adamw(1e-3), every=4, axis_name="data"),
    "sharded": lambda: fg.optimizers.sharded(optax.adamw(1e-3), WORKERS, axis_name="data"),
}


def params_of(leaves: int) -> dict[str, jax.Array]:
    """So many leaves, of the shapes of blocks."""
    shapes = list(BLOCK.items())
    names = [(f"{i // len(shapes):03d}/{shapes[i % len(shapes)][0]}", i) for i in range(leaves)]
    return {name: jnp.zeros(shapes[i % len(shapes)][1]) for name, i in names}


def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Of all leaves, and cheap to compile."""
    return sum((jnp.sum(leaf * x.sum()) for leaf in params.values()), jnp.zeros(()))


def seconds_of(name: str, leaves: int) -> dict[str, float]:
    """What a new user waits for, with all that it stands for traced anew."""
    params, tx = params_of(leaves), ROWS[name]()
    mesh = jax.make_mesh((WORKERS,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    is_local = name.startswith(("local", "SparseLoCo"))
    jax.block_until_ready(jax.jit(jnp.sin)(jnp.ones(4)))  # not a part of it: the backend's own start
    marks = [time.perf_counter()]
    state = jax.block_until_ready(fg.init_state(tx, params, mesh, "data"))
    marks.append(time.perf_counter())
    specs = fg.state_specs(state, "data")
    own = P("data") if is_local else P()

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        if is_local:
            params = jax.tree.map(lambda leaf: leaf[0], params)
        _, grads = fg.value_and_grad(loss, axis_name="data")(params, x)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return jax.tree.map(lambda leaf: leaf[None], params) if is_local else params, state

    train = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(own, specs, P("data")), out_specs=(own, specs))
    )
    if is_local:
        params = {name: jnp.stack([leaf] * WORKERS) for name, leaf in params.items()}
    marks.append(time.perf_counter())
    lowered = train.lower(params, state, jnp.ones((WORKERS, 4)))
    marks.append(time.perf_counter())
    lowered.compile()
    marks.append(time.perf_counter())
    return {"init": marks[1] - marks[0], "trace": marks[3] - marks[2], "compile": marks[4] - marks[3]}


def measure(args: argparse.Namespace) -> None:
    """Each row in a process of its own."""
    rows: list[dict[str, Any]] = []
    environment = os.environ | {
        "JAX_NUM_CPU_DEVICES": str(WORKERS), "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0"
    }
    for leaves in args.leaves:
        for name in (name for name in ROWS if args.only in name):
            command = [sys.executable, __file__, "--row", name, "--leaves", str(leaves)]
            out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
            rows.append({"row": name, "leaves": leaves, **json.loads(out.stdout.splitlines()[-1])})
            print(rows[-1], flush=True)


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--leaves", type=int, nargs="+", default=[100])
    p.add_argument("--only", default="")
    p.add_argument("--row", default="")
    a = p.parse_args()
    if a.row:
        print(json.dumps({k: round(v, 2) for k, v in seconds_of(a.row, a.leaves[0]).items()}))
    else:
        measure(a)
