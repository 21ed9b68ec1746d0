"""What XLA makes of fftgrad for an H100, on a machine that has none.

Nothing runs. The compiled programs tell how many kernels a codec launches, whether the host has to
wait for the device inside of it, how much memory it needs, reads and writes, and which collectives
of a training step have products of matrices to run beside. It needs the plugin of the accelerator,
in an environment of its own:

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

HERE = pathlib.Path(__file__).parent
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
    parser.add_argument("--values", type=int, default=1 << 24, help="length of the vector")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the step: one bucket each")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results/programs")
    parser.add_argument("--plan", action="store_true", help="count the rows of a plan only")
    args = parser.parse_args()
    args.out = args.out.expanduser()
    return args


def prepare() -> None:
    """Sets what has to be set before JAX starts, or says what is missing."""
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
    os.environ.pop("JAX_PLATFORMS", None)
    # Timing kernels to choose among them would need the device.
    os.environ["XLA_FLAGS"] = " ".join(["--xla_gpu_autotune_level=0", *FLAGS])


ARGS = parse_args()
prepare()

import jax  # noqa: E402  (after the settings)
import jax.numpy as jnp  # noqa: E402  (after the settings)
import numpy as np  # noqa: E402  (after the settings)
import optax  # noqa: E402  (after the settings)
from _hlo import Program  # noqa: E402  (after the settings)
from _record import ROOT, head, table, write  # noqa: E402  (after the settings)
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
    "levels 4 bits": fg.UniformQuantizer(bits=4),
    "ternary": fg.Ternary(),
}
GATHER = fg.AllGather(TOP_K)
BUCKET = fg.Bucketing(bucket_bytes=4 * 2 * WIDTH * HIDDEN)


def compressed(exchange: fg.Exchange, bucketing: fg.Bucketing = BUCKET) -> Any:
    """The exchange with error feedback."""
    memory = fg.NoMemory() if exchange == fg.AllReduce() else fg.ErrorFeedback()
    return fg.compressed_pmean(exchange, memory, axis_name="data", bucketing=bucketing)


STEPS: dict[str, Any] = {
    "dense": lambda: compressed(fg.AllReduce()),
    "top-k": lambda: compressed(GATHER),
    "sign": lambda: compressed(fg.AllGather(fg.Sign())),
    "random-k": lambda: compressed(fg.AllReduce(fg.RandomK(fraction=0.01))),
    "PowerSGD": lambda: compressed(
        fg.PowerSgd(rank=4), fg.Bucketing("leaf", bucket_bytes=BUCKET.bucket_bytes)
    ),
    "top-k, one bucket": lambda: compressed(GATHER, fg.Bucketing()),
    "top-k, delayed": lambda: optax.chain(fg.training.delay(), compressed(GATHER, fg.Bucketing())),
}
"""Made late: a transformation is bound to nothing, but JAX must be up."""


def local_steps(**options: Any) -> Any:
    """Each worker trains on its own; what is exchanged is known before the step's gradient."""
    inner, outer = optax.sgd(1e-3), optax.sgd(0.7, momentum=0.9, nesterov=True)
    return fg.optimizers.diloco(
        inner, outer, 8, GATHER, overlap_steps=1, axis_name="data", **options
    )


LOCAL: dict[str, Any] = {
    "8 local steps": lambda: local_steps(),
    "8 local steps in 8 fragments": lambda: local_steps(fragments=8),
}


LOW = fg.RangeFloat(bits=4)
UPDATES: dict[str, Any] = {
    "dense": lambda: compressed(fg.AllReduce(), fg.Bucketing()),
    "sign, two stages": lambda: compressed(fg.TwoStage(fg.Sign(), workers=WORKERS), fg.Bucketing()),
    "PowerSGD rank 4": lambda: compressed(fg.PowerSgd(rank=4), fg.Bucketing("leaf")),
    "random-k 1 %": lambda: compressed(fg.AllReduce(fg.RandomK(fraction=0.01)), fg.Bucketing()),
    "top-k 0.1 %, 4 bits": lambda: compressed(
        fg.AllGather(fg.chain(fg.TopK(fraction=0.001), LOW)), fg.Bucketing()
    ),
    "FFT 64, 1 %, 4 bits": lambda: compressed(
        fg.AllGather(fg.chain(fg.Fft(block=64), fg.TopK(fraction=0.01), LOW)), fg.Bucketing()
    ),
}


def topology() -> Any:
    """The devices to compile for."""
    config = (HERE / "h100.textproto").read_text()
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


def plan_rows(device: Any) -> None:
    """Writes the table of programs from which a plan for an accelerator answers."""
    import timings  # imports JAX, so after the settings

    rows: list[dict[str, Any]] = []
    for row in fg.planning.candidates(timings.squares(ARGS.values), WORKERS):
        # More than 8 payloads are decoded in a loop, which moves more bytes.
        workers = 16 if isinstance(row.recipe.exchange, fg.AllGather) else WORKERS
        first, whole = timings.counted(row, ARGS.values, workers, device)
        after = [max(0.0, a - b) for a, b in zip(whole, first, strict=True)]
        point = [ARGS.values, workers, first[0], after[0], first[1], after[1]]
        rows.append({"name": row.name, "points": [point]})
    today = datetime.date.today().isoformat()
    record = head() | {"date": today, "target": "h100", "rows": rows}
    write(ROOT / "fftgrad/planning/programs.json", record, "rows")


def main() -> None:
    """Compiles everything, prints tables and writes JSON."""
    devices, console = topology().devices, Console()
    if ARGS.plan:
        plan_rows(devices[0])
        return
    codecs = codec_rows(devices)
    cells = [[r["codec"], r["way"], f"{r['temporary_bytes'] / 1e6:.0f}", *costs(r)] for r in codecs]
    console.print(table("Codecs", ("", "", "temporary MB", *COSTS), cells))
    steps = step_rows(devices)
    cells = [
        [r["step"], f"{r['overlapped']} of {[n for _, n in r['collectives']]}", *costs(r)]
        for r in steps
    ]
    console.print(table("Steps", ("", "collectives with products beside", *COSTS), cells))
    updates = update_rows(devices)
    both = ("traffic_in_gradients", "temporaries_in_gradients")
    cells = [[r["update"], *(f"{r[key]:.1f}" for key in both), *costs(r)] for r in updates]
    console.print(table("Updates", ("", "reads and writes", "temporaries", *COSTS), cells))
    record = head() | {"target": "h100", "flags": os.environ.get("XLA_FLAGS", "")}
    record |= {"codecs": codecs, "steps": steps, "updates": updates}
    write(ARGS.out / "h100.json", record)


COSTS = ("kernels", "host syncs", "compile s")


def costs(row: dict[str, Any]) -> list[str]:
    """What all rows have."""
    return [str(row["kernels"]), str(row["host_syncs"]), f"{row['compile_s']:.1f}"]


if __name__ == "__main__":
    main()
