"""Read off what XLA compiles of fftgrad for an H100, on a machine that has none.

Nothing runs. The compiled programs tell how many kernels a codec launches, whether the host has to
wait for the device inside of it, and how many bytes it reads and writes. This needs the plugin of
the accelerator, in an environment of its own:

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
from typing import Any

import jax
import jax.numpy as jnp
import timings
from _hlo import Program
from _record import ROOT, head, markdown, parser, write
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import fftgrad as fg

FLAGS = (
    "--xla_gpu_autotune_level=0",  # timing kernels to choose among them would need the device
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_all_gather_combine_threshold_bytes=0",
    "--xla_gpu_all_reduce_combine_threshold_bytes=0",
)
WORKERS = 8
BYTES = fg.RangeFloat(bits=8)
CODECS: dict[str, fg.codecs.Codec] = {
    "top-k 1 %, 8 bits": fg.chain(fg.TopK(fraction=0.01), BYTES),
    "FFT 4096, 5 %, 8 bits": fg.chain(fg.Fft(block=4096), fg.TopK(fraction=0.05), BYTES),
    "budget, 300 times fewer bytes": fg.Budget(ratio=300),
    "random-k 1 %": fg.codecs.RandomK(fraction=0.01),
    "EDEN 2 bits": fg.chain(fg.Hadamard(), fg.codecs.LloydMax(bits=2)),
    "sign": fg.Sign(),
}


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
    os.environ["XLA_FLAGS"] = " ".join(FLAGS)
    jax.config.update("jax_platforms", None)
    config = (pathlib.Path(__file__).parent / "h100.textproto").read_text()
    return topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=config, topology=f"1x1x{WORKERS}"
    )


def facts(jitted: Any, *specs: Any) -> dict[str, Any]:
    """What compiling it gives."""
    cost = Program(jitted.lower(*specs).compile().as_text()).cost()
    return {"kernels": cost.kernels, "host_syncs": cost.host_syncs, "traffic_bytes": cost.traffic}


def codec_rows(args: argparse.Namespace, device: Any) -> list[dict[str, Any]]:
    """Each codec, both ways."""
    one, step = SingleDeviceSharding(device), fg.Step.of(0)
    x = jax.ShapeDtypeStruct((args.values,), jnp.float32)
    rows: list[dict[str, Any]] = []
    for name, codec in CODECS.items():
        encode = functools.partial(fg.compress, codec, step=step)
        decode = functools.partial(fg.decompress, codec, like=x, step=step)
        payload = jax.eval_shape(encode, x)
        for way, function, spec in (("compress", encode, x), ("decompress", decode, payload)):
            found = facts(jax.jit(function, in_shardings=one, out_shardings=one), spec)
            rows.append({"codec": name, "way": way, "values": args.values, **found})
    return rows


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
        plan=(False, "count the rows of a plan only"),
    ).parse_args()
    devices = topology().devices
    if args.plan:
        plan_rows(args.values, devices[0])
        return
    if args.smoke:
        args.values = 1 << 16
    codecs = codec_rows(args, devices[0])
    shown = ("codec", "way", "kernels", "host_syncs", "traffic_bytes")
    print(markdown(shown, [[row[key] for key in shown] for row in codecs]))
    record = head() | {"target": "h100", "flags": os.environ["XLA_FLAGS"], "codecs": codecs}
    write(args.out / "h100.json", record)


if __name__ == "__main__":
    main()
