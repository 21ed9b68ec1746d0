"""What XLA makes of fftgrad for an H100 or a TPU v5e, on a machine that has neither.

Nothing runs. The compiled programs tell how many kernels a codec launches, whether the host has to
wait for the device inside of it, how much memory it needs, reads and writes, and which collectives
of a training step have products of matrices to run beside. It needs the plugin of the accelerator,
in an environment of its own:

    pip install -e ".[bench]" "jax[cuda12]==$(python -c 'import jax; print(jax.__version__)')"
    python benchmarks/programs.py --target h100

and `jax[tpu]` for `--target v5e`. `--models` compiles the update of large models instead, for 8 and
64 devices along a data axis, and for 8 beside a model axis of 8; `--show` prints their table.
"""

import argparse
import functools
import importlib.util
import json
import math
import os
import pathlib
import time
from typing import Any

from models import MODELS, show

HERE = pathlib.Path(__file__).parent
PLUGINS = {"h100": ("jax_plugins.xla_cuda12", "jax[cuda12]"), "v5e": ("libtpu", "jax[tpu]")}
FLAGS = (
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_all_gather_combine_threshold_bytes=0",
    "--xla_gpu_all_reduce_combine_threshold_bytes=0",
)
"""Collectives are asynchronous on GPUs, but only this scheduler puts work between their start and
their end; and buckets that are combined again wait for the last of them."""

WORKERS, LAYERS, WIDTH, HIDDEN, ROWS = 8, 8, 2048, 8192, 32768
ALEXNET = {
    "conv1": (11, 11, 3, 64),
    "conv2": (5, 5, 64, 192),
    "conv3": (3, 3, 192, 384),
    "conv4": (3, 3, 384, 256),
    "fc6": (9216, 4096),
    "fc7": (4096, 4096),
    "fc8": (4096, 1000),
}
"""61 million values, most of them in three leaves."""


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", choices=PLUGINS, default="h100")
    parser.add_argument("--values", type=int, default=1 << 24, help="length of the vector")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--models", nargs="*", choices=MODELS, help="large models, or all of them")
    parser.add_argument("--show", action="store_true", help="the table of the models' results")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the step: one bucket each")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results/programs")
    args = parser.parse_args()
    args.out = args.out.expanduser()
    return args


def prepare(target: str) -> None:
    """Sets what has to be set before JAX starts, or says what is missing."""
    module, package = PLUGINS[target]
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise SystemExit(
            f"programs.py --target {target}: needs the compiler of {package}, which is not "
            f'installed; pip install "{package}" with the version of jax, in an environment of '
            "its own."
        )
    if target == "h100":
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
        os.environ.pop("JAX_PLATFORMS", None)
        # Timing kernels to choose among them would need the device.
        os.environ["XLA_FLAGS"] = " ".join(["--xla_gpu_autotune_level=0", *FLAGS])
    else:
        os.environ |= {
            "JAX_PLATFORMS": "cpu",
            "TPU_ACCELERATOR_TYPE": "v5litepod-8",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_WORKER_ID": "0",
        }


ARGS = parse_args()
prepare(ARGS.target)

import jax  # noqa: E402  (after the settings)
import jax.numpy as jnp  # noqa: E402  (after the settings)
import numpy as np  # noqa: E402  (after the settings)
import optax  # noqa: E402  (after the settings)
from _hlo import Program  # noqa: E402  (after the settings)
from _record import head, table, write  # noqa: E402  (after the settings)
from jax.experimental import topologies  # noqa: E402  (after the settings)
from jax.sharding import (  # noqa: E402  (after the settings)
    AxisType,
    Mesh,
    NamedSharding,
    SingleDeviceSharding,
)
from jax.sharding import PartitionSpec as P  # noqa: E402  (after the settings)
from rich.console import Console  # noqa: E402  (after the settings)

import fftgrad as fg  # noqa: E402  (after the settings)

BYTES = fg.RangeFloat(bits=8)
TOP_K = fg.chain(fg.TopK(fraction=0.01), BYTES)
CODECS: dict[str, fg.Codec] = {
    "top-k 1 %, 8 bits": TOP_K,
    "FFT 4096, 5 %, 8 bits": fg.chain(fg.Fft(block=4096), fg.TopK(fraction=0.05), BYTES),
    "DCT 64, 1 %, 8 bits": fg.chain(fg.Dct(block=64), fg.TopK(fraction=0.01), BYTES),
    "budget, 300 times fewer bytes": fg.Budget(ratio=300),
    "threshold 1 %": fg.Threshold(fraction=0.01),
    "random-k 1 %": fg.RandomK(fraction=0.01),
    "chunk top-k of 100": fg.ChunkTopK(chunk=100),
    "EDEN 2 bits": fg.chain(fg.Hadamard(), fg.codecs.LloydMax(bits=2)),
    "64 of chunks of 4096, 2 bits": fg.chain(fg.ChunkTopK(4096, 64), fg.codecs.BinMeans(bits=2)),
    "sign": fg.Sign(),
    "levels 4 bits": fg.UniformLevels(bits=4),
    "ternary": fg.Ternary(),
}
GATHER = fg.AllGather(TOP_K)
BUCKET = fg.Layout(bucket_bytes=4 * 2 * WIDTH * HIDDEN)


def compressed(exchange: fg.Exchange, layout: fg.Layout = BUCKET) -> Any:
    """The exchange with error feedback."""
    memory = fg.NoMemory() if exchange == fg.AllReduce() else fg.ErrorFeedback()
    return fg.compressed_pmean(exchange, memory, axis_name="data", layout=layout)


STEPS: dict[str, Any] = {
    "dense": lambda: compressed(fg.AllReduce()),
    "top-k": lambda: compressed(GATHER),
    "sign": lambda: compressed(fg.AllGather(fg.Sign())),
    "random-k": lambda: compressed(fg.AllReduce(fg.RandomK(fraction=0.01))),
    "PowerSGD": lambda: compressed(
        fg.PowerSgd(rank=4), fg.Layout("leaf", bucket_bytes=BUCKET.bucket_bytes)
    ),
    "top-k, one bucket": lambda: compressed(GATHER, fg.Layout()),
    "top-k, delayed": lambda: optax.chain(fg.training.delay(), compressed(GATHER, fg.Layout())),
}
"""Made late: a transformation is bound to nothing, but JAX must be up."""


def local_steps(**options: Any) -> Any:
    """Each worker trains on its own; what is exchanged is known before the step's gradient."""
    inner, outer = optax.sgd(1e-3), optax.sgd(0.7, momentum=0.9, nesterov=True)
    return fg.optimizers.diloco(inner, outer, 8, GATHER, delay=1, axis_name="data", **options)


LOCAL: dict[str, Any] = {
    "8 local steps": lambda: local_steps(),
    "8 local steps in 8 fragments": lambda: local_steps(fragments=8),
}


LOW = fg.RangeFloat(bits=4)
UPDATES: dict[str, Any] = {
    "dense": lambda: compressed(fg.AllReduce(), fg.Layout()),
    "sign, two stages": lambda: compressed(fg.TwoStage(fg.Sign(), workers=WORKERS), fg.Layout()),
    "PowerSGD rank 4": lambda: compressed(fg.PowerSgd(rank=4), fg.Layout("leaf")),
    "random-k 1 %": lambda: compressed(fg.AllReduce(fg.RandomK(fraction=0.01)), fg.Layout()),
    "top-k 0.1 %, 4 bits": lambda: compressed(
        fg.AllGather(fg.chain(fg.TopK(fraction=0.001), LOW)), fg.Layout()
    ),
    "FFT 64, 1 %, 4 bits": lambda: compressed(
        fg.AllGather(fg.chain(fg.Fft(block=64), fg.TopK(fraction=0.01), LOW)), fg.Layout()
    ),
}


BUDGET = fg.AllGather(fg.Budget(ratio=100))


def whole(make: Any, exchange: fg.Exchange, **options: Any) -> Any:
    """An optimizer of ours."""
    return make(1e-3, exchange=exchange, memory=fg.ErrorFeedback(), axis_name="data", **options)


def before_adam(exchange: fg.Exchange) -> Any:
    """An exchange without memory, before the usual optimizer."""
    return optax.chain(fg.compressed_pmean(exchange, axis_name="data"), optax.adamw(1e-3))


RECOMMENDED: dict[str, Any] = {
    "dense float32": lambda _: before_adam(fg.AllReduce()),
    "dense bfloat16": lambda w: before_adam(fg.TwoStage(fg.Cast("bfloat16"), w)),
    "EDEN 1 bit": lambda _: before_adam(fg.methods.eden().exchange),
    "PowerSGD 4, feedback_adam": lambda _: whole(
        fg.optimizers.feedback_adam, fg.PowerSgd(rank=4), nu=0.7
    ),
    "100x, feedback_adam": lambda _: whole(fg.optimizers.feedback_adam, BUDGET),
    "100x, feedback_muon": lambda _: whole(fg.optimizers.feedback_muon, BUDGET, lead=0.5),
    "4 local steps, 25x": lambda _: fg.optimizers.diloco(
        optax.adamw(1e-3),
        optax.sgd(1.0),
        4,
        fg.AllGather(fg.Budget(ratio=25)),
        fg.ErrorFeedback(),
        axis_name="data",
    ),
}
"""By the number of workers; of a model axis beside them each device exchanges its own piece."""
MESHES = ((8, 1), (64, 1), (8, 8))


def topology(devices: int = WORKERS) -> Any:
    """The devices to compile for."""
    if ARGS.target == "h100":
        config = (HERE / "h100.textproto").read_text()
        form = f"1x{devices // WORKERS}x{WORKERS}"
        return topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=config, topology=form
        )
    return topologies.get_topology_desc("v5e:2x4", "tpu")


def facts(jitted: Any, *specs: Any) -> tuple[dict[str, Any], Program]:
    """What compiling it gives."""
    start = time.perf_counter()
    traced = jitted.lower(*specs)
    lowered = time.perf_counter()
    compiled = traced.compile()
    program = Program(compiled.as_text())
    cost = program.cost()
    analysis = compiled.cost_analysis() or {}
    return {
        "trace_s": round(lowered - start, 2),
        "compile_s": round(time.perf_counter() - lowered, 2),
        "kernels": cost.kernels,
        "host_syncs": cost.host_syncs,
        "traffic_bytes": cost.traffic,
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "bytes_accessed": analysis.get("bytes accessed"),
    }, program


def codec_rows(devices: Any) -> list[dict[str, Any]]:
    """Each codec, both ways."""
    one = SingleDeviceSharding(devices[0])
    x = jax.ShapeDtypeStruct((ARGS.values,), jnp.float32)
    rows: list[dict[str, Any]] = []
    for name, codec in CODECS.items():
        if ARGS.only not in name:
            continue
        step = fg.Step.of(0)

        def encode(x: Any, codec: Any = codec, step: Any = step) -> Any:
            return fg.compress(codec, x, step=step)

        def decode(payload: Any, codec: Any = codec, step: Any = step) -> Any:
            return fg.decompress(codec, payload, like=x, step=step)

        payload = jax.eval_shape(encode, x)
        for way, function, spec in (("compress", encode, x), ("decompress", decode, payload)):
            jitted = jax.jit(function, in_shardings=one, out_shardings=one)
            found, _ = facts(jitted, spec)
            rows.append({"codec": name, "way": way, "values": ARGS.values, **found})
    return rows


def step_rows(devices: Any) -> list[dict[str, Any]]:
    """A training step of a residual network of wide layers, for each way to exchange."""
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    layer = {"down": (HIDDEN, WIDTH), "up": (WIDTH, HIDDEN)}
    params = [on(mesh, P(), layer) for _ in range(ARGS.layers)]
    x = on(mesh, P("data"), {"x": (ROWS, WIDTH)})["x"]
    gradient = sum(leaf.size for leaf in jax.tree.leaves(params))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for layer in params:
            x = x + jax.nn.relu(x @ layer["up"]) @ layer["down"]
        return jnp.mean(x**2)

    def together(tx: Any, params: Any, state: Any, x: Any) -> Any:
        _, grads = fg.value_and_grad(loss, "data")(params, x)
        updates, state = tx.update(grads, state, params)
        return jax.tree.map(lambda p, u: p - 1e-3 * u, params, updates), state

    def alone(tx: Any, rows: Any, state: Any, x: Any) -> Any:
        params = jax.tree.map(lambda row: row[0], rows)
        updates, state = tx.update(jax.grad(loss)(params, x), state, params)
        return jax.tree.map(lambda p, u: (p + u)[None], params, updates), state

    out: list[dict[str, Any]] = []
    for name, tx in [*chosen(STEPS), *chosen(LOCAL)]:
        step = functools.partial(alone if name in LOCAL else together, tx)
        found, program = step_facts(step, tx, mesh, params, x, local=name in LOCAL)
        # The few values of an all-reduce of a flag or a count are no payload.
        collectives = program.overlaps(at_least=4000)
        out.append(
            {
                "step": name,
                **found,
                "temporaries_in_gradients": found["temporary_bytes"] / 4 / gradient,
                "collectives": collectives,
                "overlapped": sum(products > 0 for _, products in collectives),
            }
        )
    return out


def update_rows(devices: Any) -> list[dict[str, Any]]:
    """The update alone, of a model of few large leaves: from a worker's gradient to parameters."""
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    params = on(mesh, P(), ALEXNET)
    of_each = {name: (WORKERS * shape[0], *shape[1:]) for name, shape in ALEXNET.items()}
    grads = on(mesh, P("data"), of_each)
    gradient = 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
    out: list[dict[str, Any]] = []
    for name, tx in chosen(UPDATES):

        def step(params: Any, state: Any, grads: Any, tx: Any = tx) -> Any:
            updates, state = tx.update(grads, state, params)
            return jax.tree.map(lambda p, u: p - 1e-3 * u, params, updates), state

        found, _ = step_facts(step, tx, mesh, params, grads)
        out.append(
            {
                "update": name,
                **found,
                "traffic_in_gradients": found["traffic_bytes"] / gradient,
                "temporaries_in_gradients": found["temporary_bytes"] / gradient,
            }
        )
    return out


def model_rows() -> list[dict[str, Any]]:
    """The update of large models in bfloat16, from the gradients of the workers."""
    out: list[dict[str, Any]] = []
    for model in ARGS.models or MODELS:
        for workers, pieces in MESHES:
            mesh = mesh_of(workers, pieces)
            for name, make in RECOMMENDED.items():
                # A Muon orthogonalizes whole matrices.
                if ARGS.only in name and not (pieces > 1 and "muon" in name):
                    out.append({"model": model, "workers": workers, "pieces": pieces, "row": name})
                    out[-1] |= model_facts(MODELS[model](), mesh, make(workers), "local" in name)
                    print(*out[-1].values(), flush=True)
    return out


def mesh_of(workers: int, pieces: int) -> Mesh:
    """Devices along a data axis, and along a model axis where there is one."""
    devices = np.array(topology(workers * pieces).devices).reshape(workers, pieces)
    return Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def model_facts(shapes: Any, mesh: Mesh, tx: Any, local: bool) -> dict[str, Any]:
    """What compiling an update gives: in place, each device with its piece of each matrix."""
    workers, pieces = mesh.shape["data"], mesh.shape["model"]
    whole = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    # The last axis of each leaf: what is sharded and what is not cannot travel in one buffer.
    own = {name: P(*[None] * (len(shape) - 1), "model") for name, shape in shapes.items()}
    specs = own if pieces > 1 else dict.fromkeys(shapes, P())
    piece = {
        name: jax.ShapeDtypeStruct(NamedSharding(mesh, specs[name]).shard_shape(x.shape), x.dtype)
        for name, x in whole.items()
    }
    state_specs = fg.state_specs(jax.eval_shape(tx.init, piece), "data", specs)
    start = jax.shard_map(tx.init, mesh=mesh, in_specs=(specs,), out_specs=state_specs)

    def placed(leaf: Any, spec: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    def rows(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct((workers, *leaf.shape), leaf.dtype)

    of_each = {name: P("data", *spec) for name, spec in specs.items()}

    def step(params: Any, state: Any, grads: Any) -> Any:
        grads = {name: row[0] for name, row in grads.items()}
        if local:
            params = {name: row[0] for name, row in params.items()}
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return {name: leaf[None] for name, leaf in params.items()} if local else params, state

    laid_out = of_each if local else specs
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(laid_out, state_specs, of_each),
        out_specs=(laid_out, state_specs),
    )
    state = jax.tree.map(placed, jax.eval_shape(start, whole), state_specs)
    params = {name: rows(leaf) if local else leaf for name, leaf in whole.items()}
    found, program = facts(
        jax.jit(mapped, donate_argnums=(0, 1)),
        {name: placed(leaf, laid_out[name]) for name, leaf in params.items()},
        state,
        {name: placed(rows(leaf), of_each[name]) for name, leaf in whole.items()},
    )
    kept = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state)
    )
    collectives = [kind for kind, _ in program.overlaps(at_least=4000)]
    gradient = 4 * sum(math.prod(leaf.shape) for leaf in whole.values()) / pieces
    return {
        "trace_s": found["trace_s"],
        "compile_s": found["compile_s"],
        "kernels": found["kernels"],
        "host_syncs": found["host_syncs"],
        "collectives": len(collectives),
        "temporaries": round(found["temporary_bytes"] / gradient, 3),
        "state": round(kept / gradient, 3),
    }


def chosen(rows: dict[str, Any]) -> list[tuple[str, Any]]:
    """The transformations that are asked for, by name."""
    return [(name, make()) for name, make in rows.items() if ARGS.only in name]


def on(mesh: Mesh, spec: Any, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Arrays of these shapes, laid out on the mesh."""
    sharding = NamedSharding(mesh, spec)
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        for name, shape in shapes.items()
    }


def step_facts(
    step: Any, tx: Any, mesh: Mesh, params: Any, batch: Any, local: bool = False
) -> tuple[dict[str, Any], Program]:
    """What compiling `step(params, state, batch)` of each worker gives, in place where it can.

    With `local` each worker has parameters of its own.
    """
    like = jax.eval_shape(tx.init, params)
    specs = fg.state_specs(like, "data")

    def placed(leaf: Any, spec: Any) -> Any:
        rows = (WORKERS, *leaf.shape[1:]) if spec == P("data") else leaf.shape
        return jax.ShapeDtypeStruct(rows, leaf.dtype, sharding=NamedSharding(mesh, spec))

    own = P("data") if local else P()
    if local:
        rows = jax.tree.map(lambda a: jax.ShapeDtypeStruct((1, *a.shape), a.dtype), params)
        params = jax.tree.map(lambda row: placed(row, own), rows)
    wrapped = jax.shard_map(
        step, mesh=mesh, in_specs=(own, specs, P("data")), out_specs=(own, specs)
    )
    jitted = jax.jit(wrapped, donate_argnums=(0, 1, 2))
    return facts(jitted, params, jax.tree.map(placed, like, specs), batch)


def main() -> None:
    """Compiles everything, prints tables and writes JSON."""
    models = ARGS.out / f"{ARGS.target}-models.json"
    if ARGS.show:
        print(show(json.loads(models.read_text())))
        return
    if ARGS.models is not None:
        write(models, head() | {"target": ARGS.target, "rows": model_rows()}, "rows")
        return
    devices, console = topology().devices, Console()
    codecs = codec_rows(devices)
    cells = [[r["codec"], r["way"], f"{r['temporary_bytes'] / 1e6:.0f}", *costs(r)] for r in codecs]
    console.print(table("Codecs", ("", "", "temporary MB", *COSTS), cells))
    steps = step_rows(devices) if ARGS.target == "h100" else []
    cells = [
        [r["step"], f"{r['overlapped']} of {[n for _, n in r['collectives']]}", *costs(r)]
        for r in steps
    ]
    console.print(table("Steps", ("", "collectives with products beside", *COSTS), cells))
    updates = update_rows(devices) if ARGS.target == "h100" else []
    both = ("traffic_in_gradients", "temporaries_in_gradients")
    cells = [[r["update"], *(f"{r[key]:.1f}" for key in both), *costs(r)] for r in updates]
    console.print(table("Updates", ("", "reads and writes", "temporaries", *COSTS), cells))
    record = head() | {"target": ARGS.target, "flags": os.environ.get("XLA_FLAGS", "")}
    record |= {"codecs": codecs, "steps": steps, "updates": updates}
    write(ARGS.out / f"{ARGS.target}.json", record)


COSTS = ("kernels", "host syncs", "compile s")


def costs(row: dict[str, Any]) -> list[str]:
    """What all rows have."""
    return [str(row["kernels"]), str(row["host_syncs"]), f"{row['compile_s']:.1f}"]


if __name__ == "__main__":
    main()
