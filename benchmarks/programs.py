"""Read off what XLA compiles of fftgrad for an H100, on a machine that has none.

Nothing runs. The compiled programs tell how many kernels a codec launches, whether the host has to
wait for the device inside of it, how much memory it needs, reads and writes, and which collectives
of a training step have products of matrices to run beside. This needs the plugin of the
accelerator, in an environment of its own:

    pip install -e ".[bench]" "jax[cuda12]==$(python -c 'import jax; print(jax.__version__)')"
    python benchmarks/programs.py
    python benchmarks/programs.py --plan  # fftgrad/planning/programs.json, for plans
"""

import argparse
import datetime
import functools
import importlib.util
import os
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import timings
from _hlo import Program
from _record import ROOT, head, markdown, parser, write
from compile_time import training_step
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import fftgrad as fg

FLAGS = (
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_all_gather_combine_threshold_bytes=0",
    "--xla_gpu_all_reduce_combine_threshold_bytes=0",
)
"""Collectives are asynchronous on GPUs, but only this scheduler puts work between their start and
their end; and buckets that are combined again wait for the last of them."""
WORKERS, WIDTH, HIDDEN, ROWS = 8, 2048, 8192, 32768
BYTES = fg.RangeFloat(bits=8)
TOP_K = fg.chain(fg.TopK(fraction=0.01), BYTES)
CODECS: dict[str, fg.codecs.Codec] = {
    "top-k 1 %, 8 bits": TOP_K,
    "FFT 4096, 5 %, 8 bits": fg.chain(fg.Fft(block=4096), fg.TopK(fraction=0.05), BYTES),
    "DCT 64, 1 %, 8 bits": fg.chain(fg.Dct(block=64), fg.TopK(fraction=0.01), BYTES),
    "budget, 300 times fewer bytes": fg.Budget(ratio=300),
    "threshold 1 %": fg.Threshold(fraction=0.01),
    "random-k 1 %": fg.codecs.RandomK(fraction=0.01),
    "chunk top-k of 100": fg.ChunkTopK(chunk=100),
    "EDEN 2 bits": fg.chain(fg.Hadamard(), fg.codecs.LloydMax(bits=2)),
    "64 of chunks of 4096, 2 bits": fg.chain(fg.ChunkTopK(4096, 64), fg.codecs.BinMeans(bits=2)),
    "sign": fg.Sign(),
    "levels 4 bits": fg.UniformQuantizer(bits=4),
    "ternary": fg.codecs.Ternary(),
}
GATHER = fg.AllGather(TOP_K)
BUCKET = fg.Bucketing(bucket_bytes=4 * 2 * WIDTH * HIDDEN)


def compressed(exchange: fg.exchanges.Exchange, bucketing: fg.Bucketing = BUCKET) -> Any:
    """Descent behind the exchange with error feedback."""
    memory = fg.NoMemory() if exchange == fg.AllReduce() else fg.ErrorFeedback()
    mean = fg.compressed_pmean(exchange, memory, axis_name="data", bucketing=bucketing)
    return optax.chain(mean, optax.sgd(1e-3))


def local_steps(**options: Any) -> Any:
    """Each worker trains on its own; what is exchanged is known before the step's gradient."""
    inner, outer = optax.sgd(1e-3), optax.sgd(0.7, momentum=0.9, nesterov=True)
    return fg.optimizers.diloco(
        inner, outer, 8, GATHER, overlap_steps=1, axis_name="data", **options
    )


STEPS: dict[str, Any] = {
    "dense": lambda: compressed(fg.AllReduce()),
    "top-k": lambda: compressed(GATHER),
    "sign": lambda: compressed(fg.AllGather(fg.Sign())),
    "random-k": lambda: compressed(fg.AllReduce(fg.codecs.RandomK(fraction=0.01))),
    "PowerSGD": lambda: compressed(
        fg.PowerSgd(rank=4), fg.Bucketing("leaf", bucket_bytes=BUCKET.bucket_bytes)
    ),
    "top-k, one bucket": lambda: compressed(GATHER, fg.Bucketing()),
    "top-k, delayed": lambda: optax.chain(fg.training.delay(), compressed(GATHER, fg.Bucketing())),
    "8 local steps": local_steps,
    "8 local steps in 8 fragments": lambda: local_steps(fragments=8),
}
"""Made late: a transformation is bound to nothing, but JAX must be up."""


def topology() -> Any:
    """The devices to compile for. Sets what must be set before JAX starts a backend."""
    try:
        found = importlib.util.find_spec("jax_plugins.xla_cuda12")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise SystemExit(
            "programs.py: needs the compiler of jax[cuda12], which is not installed; "
            'pip install "jax[cuda12]" with the version of jax, in an environment of its own.'
        )
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    # Timing kernels to choose among them would need the device.
    os.environ["XLA_FLAGS"] = " ".join(["--xla_gpu_autotune_level=0", *FLAGS])
    jax.config.update("jax_platforms", None)
    config = (pathlib.Path(__file__).parent / "h100.textproto").read_text()
    return topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=config, topology=f"1x1x{WORKERS}"
    )


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


def codec_rows(args: argparse.Namespace, device: Any) -> list[dict[str, Any]]:
    """Each codec, both ways."""
    one, step = SingleDeviceSharding(device), fg.Step.of(0)
    x = jax.ShapeDtypeStruct((args.values,), jnp.float32)
    rows: list[dict[str, Any]] = []
    for name, codec in chosen(CODECS, args):
        encode = functools.partial(fg.compress, codec, step=step)
        decode = functools.partial(fg.decompress, codec, like=x, step=step)
        payload = jax.eval_shape(encode, x)
        for way, function, spec in (("compress", encode, x), ("decompress", decode, payload)):
            found, _ = facts(jax.jit(function, in_shardings=one, out_shardings=one), spec)
            rows.append({"codec": name, "way": way, "values": args.values, **found})
    return rows


def step_rows(args: argparse.Namespace, devices: Any) -> list[dict[str, Any]]:
    """A training step of a residual network of wide layers, for each way to exchange."""
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))

    def placed(leaf: Any, spec: Any) -> Any:
        rows = (WORKERS, *leaf.shape[1:]) if spec == P("data") else leaf.shape
        return jax.ShapeDtypeStruct(rows, leaf.dtype, sharding=NamedSharding(mesh, spec))

    layer = {"down": (HIDDEN, WIDTH), "up": (WIDTH, HIDDEN)}
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in layer.items()}
    params = [shapes] * args.layers
    spread = NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=spread)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for layer in params:
            x = x + jax.nn.relu(x @ layer["up"]) @ layer["down"]
        return jnp.mean(x**2)

    out: list[dict[str, Any]] = []
    for name, make in chosen(STEPS, args):
        tx, local = make(), "local" in name
        state = jax.eval_shape(tx.init, params)
        specs, own = fg.state_specs(state, "data"), P("data") if local else P()
        step = training_step(tx, loss, mesh, specs, local)
        rows = params
        if local:  # each worker has parameters of its own
            rows = jax.tree.map(lambda a: jax.ShapeDtypeStruct((1, *a.shape), a.dtype), params)
        found, program = facts(
            jax.jit(step, donate_argnums=(0, 1, 2)),
            jax.tree.map(lambda leaf, own=own: placed(leaf, own), rows),
            jax.tree.map(placed, state, specs),
            x,
        )
        # The few values of an all-reduce of a flag or a count are no payload.
        collectives = program.overlaps(at_least=4000)
        overlapped = sum(products > 0 for _, products in collectives)
        out.append({"step": name, **found, "collectives": collectives, "overlapped": overlapped})
    return out


def chosen(rows: dict[str, Any], args: argparse.Namespace) -> list[tuple[str, Any]]:
    """The rows that are asked for."""
    return [(name, row) for name, row in rows.items() if args.only in name]


def plan_rows(values: int, device: Any) -> None:
    """Writes the table of programs from which a plan for an accelerator answers."""
    rows: list[dict[str, Any]] = []
    for row in fg.planning.candidates(timings.squares(values), WORKERS):
        # More than 8 payloads are decoded in a loop, which moves more bytes.
        workers = 16 if isinstance(row.recipe.exchange, fg.AllGather) else WORKERS
        first, whole = timings.counted(row, values, workers, device)
        after = [max(0.0, a - b) for a, b in zip(whole, first, strict=True)]
        point = [values, workers, first[0], after[0], first[1], after[1]]
        rows.append({"name": row.name, "points": [point]})
    today = datetime.date.today().isoformat()
    record = head() | {"date": today, "target": "h100", "rows": rows}
    write(ROOT / "fftgrad/planning/programs.json", record, "rows")


def main() -> None:
    """Compiles everything, prints tables and writes JSON."""
    args = parser(
        __doc__,
        "programs",
        values=(1 << 24, "length of the vector"),
        only=("", "rows whose name contains this"),
        layers=(8, "of the step: one bucket each"),
        plan=(False, "count the rows of a plan only"),
    ).parse_args()
    devices = topology().devices
    if args.plan:
        plan_rows(args.values, devices[0])
        return
    if args.smoke:
        args.values, args.layers = 1 << 16, 1
    codecs, steps = codec_rows(args, devices[0]), step_rows(args, devices)
    costs = ("kernels", "host_syncs", "compile_s")
    cells = [[r["codec"], r["way"], *(r[key] for key in costs)] for r in codecs]
    cells += [
        [r["step"], f"{r['overlapped']} of {len(r['collectives'])}", *(r[key] for key in costs)]
        for r in steps
    ]
    print(markdown(("", "collectives with products beside", *costs), cells))
    record = head() | {"target": "h100", "flags": os.environ["XLA_FLAGS"]}
    write(args.out / "h100.json", record | {"codecs": codecs, "steps": steps})


if __name__ == "__main__":
    main()
