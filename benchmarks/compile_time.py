"""How long a user waits before the first step: state, trace and compilation, by method.

Each row is a process of its own, without a cache of compiled programs: a training step of so many
leaves, of the eight shapes of a transformer's block, on 8 devices of this machine, is made, traced
and compiled.
"""

import itertools
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import _record
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType
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
Make = Callable[[], optax.GradientTransformation]


def exchanged(method: Any, **options: Any) -> Make:
    """A method before Adam."""
    return lambda: optax.chain(
        fg.compressed_pmean(method, axis_name="data", **options), optax.adamw(1e-3)
    )


def filled(make: Any, **options: Any) -> Make:
    """An optimizer of ours with a filled message."""
    exchange = fg.AllGather(fg.Budget(ratio=100))
    return lambda: make(
        1e-3, exchange=exchange, memory=fg.ErrorFeedback(), axis_name="data", **options
    )


def local(**options: Any) -> Make:
    """Local steps of Adam."""
    signs = fg.TwoStage(fg.Sign(), WORKERS)
    return lambda: fg.optimizers.diloco(
        optax.adamw(1e-3), optax.sgd(1.0), 4, signs, axis_name="data", **options
    )


def recommended(name: str) -> Make:
    """A row of a plan."""

    def make() -> optax.GradientTransformation:
        (row,) = (r for r in fg.planning.candidates(params_of(8), WORKERS) if r.name == name)
        return row.transformation("data")

    return make


ROWS: dict[str, Make] = {
    "dense": exchanged(fg.AllReduce()),
    "EDEN, 1 bit": exchanged(fg.methods.eden()),
    "PowerSGD, rank 4": exchanged(fg.methods.power_sgd(4)),
    "top-k 1 %": exchanged(fg.methods.top_k(0.01)),
    "top-k 1 %, by leaf": exchanged(fg.methods.top_k(0.01), bucketing=fg.Bucketing("leaf")),
    "DGC": exchanged(fg.methods.dgc(0.001)),
    "100x, feedback_adam": filled(fg.optimizers.feedback_adam),
    "two stages 25x, Muon": recommended("two stages 25x, Muon"),
    "eigenbasis 50x, Muon": recommended("eigenbasis 50x, Muon"),
    "PowerSGD 4, Muon": recommended("PowerSGD 4, Muon"),
    "4 local steps of Muon, 25x": recommended("4 local steps of Muon, 25x"),
    "local steps, signs": local(),
    "local steps, 4 fragments, delay": local(fragments=4, overlap_steps=1),
    "SparseLoCo": lambda: fg.optimizers.sparse_loco(
        optax.adamw(1e-3), sync_every=4, axis_name="data"
    ),
    "sharded": lambda: fg.optimizers.sharded(optax.adamw(1e-3), WORKERS, axis_name="data"),
}
LOCAL = {row for row in ROWS if "local steps" in row or row == "SparseLoCo"}
PARTS = ("init_s", "trace_s", "compile_s")


def params_of(leaves: int) -> dict[str, jax.Array]:
    """So many leaves, of the shapes of blocks."""
    shapes = list(BLOCK.items())
    each = [(i // len(shapes), *shapes[i % len(shapes)]) for i in range(leaves)]
    return {f"{number:03d}/{name}": jnp.zeros(shape) for number, name, shape in each}


def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Of all leaves, and cheap to compile."""
    return sum((jnp.sum(leaf * x.sum()) for leaf in params.values()), jnp.zeros(()))


def seconds_of(name: str, leaves: int) -> dict[str, float]:
    """What a new user waits for, in this process."""
    params, tx, is_local = params_of(leaves), ROWS[name](), name in LOCAL
    mesh = jax.make_mesh((WORKERS,), ("data",), axis_types=(AxisType.Auto,))

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        if is_local:  # each worker has its row of the parameters
            params = jax.tree.map(lambda leaf: leaf[0], params)
        _, grads = fg.value_and_grad(loss, axis_name="data")(params, x)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return jax.tree.map(lambda leaf: leaf[None], params) if is_local else params, state

    jax.block_until_ready(jax.jit(jnp.sin)(jnp.ones(4)))  # the start of the backend is no part
    marks = [time.perf_counter()]
    with warnings.catch_warnings(action="ignore"):  # a momentum behind feedback compiles as well
        state = jax.block_until_ready(fg.init_state(tx, params, mesh, "data"))
    marks.append(time.perf_counter())
    own, specs = P("data") if is_local else P(), fg.state_specs(state, "data")
    ins, outs = (own, specs, P("data")), (own, specs)
    train = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=ins, out_specs=outs))
    if is_local:
        like = {name: (WORKERS, *leaf.shape) for name, leaf in params.items()}
        params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in like.items()}
    lowered = train.lower(params, state, jnp.ones((WORKERS, 4)))
    marks.append(time.perf_counter())
    lowered.compile()
    marks.append(time.perf_counter())
    each = itertools.pairwise(marks)
    return dict(zip(PARTS, (round(end - start, 3) for start, end in each), strict=True))


def measured(args: Any) -> list[dict[str, Any]]:
    """Each row in a process of its own."""
    alone = os.environ | {
        "JAX_ENABLE_COMPILATION_CACHE": "0",
        "JAX_NUM_CPU_DEVICES": str(WORKERS),
        "JAX_PLATFORMS": "cpu",
        "PJRT_NPROC": str(4 * WORKERS),
    }
    rows: list[dict[str, Any]] = []
    leaves = 8 if args.smoke else args.leaves
    for name in list(ROWS)[: 2 if args.smoke else None]:
        command = [sys.executable, __file__, "--row", name, "--leaves", str(leaves)]
        out = subprocess.run(command, env=alone, check=True, stdout=subprocess.PIPE, text=True)
        rows.append({"row": name, "leaves": leaves, **json.loads(out.stdout.splitlines()[-1])})
        print(*rows[-1].values(), flush=True)
    return rows


def show(record: dict[str, Any]) -> str:
    """The table of the documentation: seconds of the parts, and of all."""
    cells: list[list[str]] = []
    for row in record["rows"]:
        parts = [row[part] for part in PARTS]
        cells.append([row["row"], *(f"{x:.1f}" for x in (*parts, sum(parts)))])
    columns = (f"{record['rows'][0]['leaves']} leaves", "state", "trace", "compile", "all")
    return _record.markdown(columns, cells)


def main() -> None:
    """Measures all rows, or one in this process."""
    parser = _record.parser(
        __doc__,
        "compile",
        leaves=(100, "of the model"),
        row=("", "one row, in this process"),
    )
    args = parser.parse_args()
    if args.row:
        print(json.dumps(seconds_of(args.row, args.leaves)))
    else:
        _record.write(args.out / "cpu.json", _record.head() | {"rows": measured(args)}, "rows")


if __name__ == "__main__":
    main()
