"""Many steps of a small model: what has to hold for as long as a training runs.

A network of 2,560 parameters on scikit-learn's digits, with one method of each family and a copy of
the parameters on each of four workers. A fifth of the labels is drawn anew in each step, so that
the gradients do not vanish. After every chunk of steps: whether all copies hold the same
bits, how long the residuals and their mean are, how far

    sum of what was applied + mean residual - sum of the mean gradients

is from zero, relative to the last sum and added up in float64, and how much memory and how many
compiled programs the process has.
"""

import argparse
import ctypes
import dataclasses
import gc
import json
import os
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _record import RESULTS, head, short
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import fftgrad as fg

AXIS, WORKERS, HIDDEN, ROWS = "data", 4, 34, 16
RATE, EVERY, NOISE = 0.1, 10, 0.2
POINTS = 20
"""How many points a curve has."""

Transformation = Any
Params = Any


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=pathlib.Path, default=RESULTS / "endurance")
    add("--steps", type=int, default=20_000, help="steps of each method")
    add("--chunk", type=int, default=500, help="steps in one call of a program")
    add("--only", default="", help="methods whose name contains this")
    add("--smoke", action="store_true", help="a few steps")
    args = parser.parse_args()
    if args.smoke:
        args.steps, args.chunk = 40, 20
    return args


@dataclasses.dataclass(frozen=True)
class Method:
    """One of a family.

    Attributes:
      rate: of plain descent behind it.
      telescopes: whether what is applied and what is kept add up to the gradients.
      local: whether it is a whole optimizer, of steps that each worker takes on its own.
    """

    name: str
    tx: Transformation
    rate: float = RATE
    telescopes: bool = True
    local: bool = False


def methods() -> list[Method]:
    """One method of each family, with feedback that forgets nothing."""
    top_k, bits = fg.TopK(fraction=0.05), fg.RangeFloat(bits=8)

    def feedback(exchange: fg.Exchange | fg.Codec, **kept: Any) -> Transformation:
        exchange = exchange if isinstance(exchange, fg.Exchange) else fg.AllGather(exchange)
        layout = fg.Layout("leaf") if kept.pop("by_leaf", False) else fg.Layout()
        memory = fg.ErrorFeedback(**kept)
        return fg.compressed_pmean(exchange, memory, axis_name=AXIS, layout=layout)

    local = fg.optimizers.diloco(
        optax.sgd(RATE), optax.sgd(1.0), EVERY, memory=fg.ErrorFeedback(), axis_name=AXIS
    )
    return [
        Method("top-k 5 %", feedback(top_k)),
        Method("top-k 5 %, bfloat16 residual", feedback(top_k, dtype="bfloat16")),
        Method("FFT 16, 10 %, 8 bits", feedback(fg.chain(fg.Fft(16), fg.TopK(0.1), bits))),
        Method("signs", feedback(fg.Sign(), by_leaf=True)),
        Method("EDEN 2 bits", feedback(fg.chain(fg.Hadamard(), fg.codecs.LloydMax(bits=2)))),
        Method("PowerSGD rank 2", feedback(fg.PowerSgd(rank=2), by_leaf=True)),
        Method("two stages, top-k 5 %", feedback(fg.TwoStage(fg.chain(top_k, bits), WORKERS))),
        Method("shared top-k 5 %", feedback(fg.SharedSupport(top_k))),
        Method("integer sum, 7 levels", feedback(fg.IntegerSum(WORKERS, levels=7))),
        Method("budget 30x", feedback(fg.Budget(ratio=30))),
        Method(
            "DGC 5 %",
            fg.compressed_pmean(fg.methods.dgc(0.05), axis_name=AXIS),
            rate=RATE / 10,
            telescopes=False,
        ),
        Method("diloco, 10 local steps", local, local=True),
    ]


# The model


def network(seed: int) -> Params:
    """Two layers, without a bias in the second."""
    first, second = jax.random.split(jax.random.key(seed))
    return {
        "b": jnp.zeros(HIDDEN + 10),
        "down": jax.random.normal(second, (HIDDEN, 10)) / HIDDEN**0.5,
        "up": jax.random.normal(first, (64, HIDDEN)) / 8,
    }


def logits(params: Params, x: jax.Array) -> jax.Array:
    """Of the ten digits."""
    hidden = jax.nn.relu(x @ params["up"] + params["b"][:HIDDEN])
    return hidden @ params["down"] + params["b"][HIDDEN:]


def loss_of(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """Cross entropy in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()


def digits() -> tuple[np.ndarray, np.ndarray]:
    """1,797 images."""
    import sklearn.datasets

    data: Any = sklearn.datasets.load_digits()
    return (data.data / 8 - 1).astype(np.float32), data.target.astype(np.int32)


# Runs


def program(method: Method, mesh: Mesh, images: np.ndarray) -> Any:
    """Many steps on all workers: copies, state and batches to copies, state, gradients, applied."""
    tx, x = method.tx, jnp.asarray(images)

    def averaged(params: Params, state: Any, grads: Params) -> Any:
        mean, state = tx.update(grads, state, params)
        params = jax.tree.map(lambda p, m: p - method.rate * m, params, mean)
        return params, state, grads, mean

    def on_its_own(params: Params, state: Any, grads: Params) -> Any:
        updates, after = tx.update(grads, state, params)
        own = optax.apply_updates(params, jax.tree.map(lambda g: -method.rate * g, grads))
        due = (after.step % EVERY == 0).astype(jnp.float32)
        change = jax.tree.map(lambda a, p: due * (a - p), state.anchor, own)
        moved = jax.tree.map(jnp.subtract, state.anchor, after.anchor)
        return optax.apply_updates(params, updates), after, change, moved

    def step(carry: Any, batch: tuple[jax.Array, jax.Array]) -> Any:
        (params, state), (rows, y) = carry, batch
        grads = jax.grad(loss_of)(params, x[rows], y)
        one = on_its_own if method.local else averaged
        params, state, given, applied = one(params, state, grads)
        return (params, state), (ravel_pytree(given)[0], ravel_pytree(applied)[0])

    def chunk(copies: Params, state: Any, batches: tuple[jax.Array, jax.Array]) -> Any:
        params = jax.tree.map(lambda p: p[0], copies)
        own = jax.tree.map(lambda a: a[:, 0], batches)
        (params, state), (given, applied) = jax.lax.scan(step, (params, state), own)
        return jax.tree.map(lambda p: p[None], params), state, given[:, None], applied[:, None]

    specs = fg.state_specs(jax.eval_shape(tx.init, network(0)), AXIS)
    by_step = P(None, AXIS)
    return jax.jit(
        # Unchecked: what JAX knows to be the same on all workers needs no look at its bits.
        jax.shard_map(
            chunk,
            mesh=mesh,
            in_specs=(P(AXIS), specs, by_step),
            out_specs=(P(AXIS), specs, by_step, by_step),
            check_vma=False,
        ),
        donate_argnums=(0, 1),
    )


def kept(state: Any) -> np.ndarray:
    """What is still to be applied: the mean residual, and that of the owners of shards."""
    found = [s for s in jax.tree.leaves(state, is_leaf=is_state) if is_state(s)]
    (pmean,) = found
    rows = jax.tree.map(lambda a: np.asarray(a, np.float64).mean(0), residual(pmean.memory))
    total = np.concatenate([row.ravel() for row in rows])
    for owned in residual(pmean.exchange):
        total += np.asarray(owned, np.float64).ravel()
    return total


def residual(state: Any) -> list[jax.Array]:
    """The arrays in fields of that name."""
    field = jax.tree_util.GetAttrKey("residual")
    return [leaf for path, leaf in jax.tree.leaves_with_path(state) if field in path]


def is_state(node: Any) -> bool:
    """Whether it is the state of a compressed mean."""
    return isinstance(node, fg.training.CompressedPmeanState)


def resident_mb() -> float:
    """Memory that the process has and uses, where the system tells."""
    status = pathlib.Path("/proc/self/statm")
    if not status.exists():
        return float("nan")
    gc.collect()
    # Or what threads have freed and keep would count, and grows until each had a large array.
    trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def run(method: Method, args: argparse.Namespace, mesh: Mesh) -> dict[str, Any]:
    """One method, as a record."""
    images, labels = digits()
    chunk = program(method, mesh, images)
    params = network(0)
    state = fg.init_state(method.tx, params, mesh, AXIS)
    rows = jax.NamedSharding(mesh, P(AXIS))
    copies: Any = jax.tree.map(lambda p: jnp.broadcast_to(p, (WORKERS, *p.shape)), params)
    copies = jax.device_put(copies, rows)
    rng = np.random.default_rng(0)
    wanted, applied = np.zeros((2, sum(p.size for p in jax.tree.leaves(params))))
    points: list[dict[str, Any]] = []
    equal, start = True, time.perf_counter()
    chunks = args.steps // args.chunk
    for count in range(1, chunks + 1):
        picked = rng.integers(len(labels), size=(args.chunk, WORKERS, ROWS), dtype=np.int32)
        noisy = rng.random(picked.shape) < NOISE
        targets = np.where(
            noisy, rng.integers(10, size=picked.shape, dtype=np.int32), labels[picked]
        )
        copies, state, given, moved = chunk(copies, state, (picked, targets))
        wanted += np.asarray(given, np.float64).mean(1).sum(0)
        applied += np.asarray(moved[:, 0], np.float64).sum(0)
        shared = state.anchor if method.local else copies
        equal &= all(same_bits(leaf) for leaf in jax.tree.leaves(shared))
        equal &= bool(jnp.all(moved == moved[:, :1]))
        if count % max(1, chunks // POINTS) == 0:
            left = kept(state)
            gap = np.linalg.norm(applied + left - wanted) / np.linalg.norm(wanted)
            found = fg.metrics(state)
            points.append(
                {
                    "step": count * args.chunk,
                    "residual": float(f"{float(found['residual']):.4g}"),
                    "mean_residual": float(f"{np.linalg.norm(left):.4g}"),
                    "telescoping": float(f"{gap:.3g}") if method.telescopes else None,
                    "resident_mb": round(resident_mb(), 1),
                    "arrays": len(jax.live_arrays()),
                    "programs": chunk._cache_size(),
                }
            )
    common = state.anchor if method.local else jax.tree.map(lambda p: p[0], copies)
    common = jax.device_get(common)
    return {
        "method": method.name,
        "steps": args.steps,
        "replicas_equal": equal,
        "skipped": int(fg.metrics(state)["skipped"]),
        "loss": round(float(loss_of(common, jnp.asarray(images), jnp.asarray(labels))), 4),
        "ms_per_step": round(1e3 * (time.perf_counter() - start) / args.steps, 2),
        **{name: [point[name] for point in points] for name in points[0]},
    }


def same_bits(leaf: jax.Array) -> bool:
    """Whether all devices hold the same bits."""
    return len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1


# Figure


def draw(records: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Residual, telescoping error and memory over time, a line a method."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4.8))
    for index, record in enumerate(records):
        style: Any = {"color": f"C{index % 10}", "linestyle": "--" if index > 9 else "-"}
        axes[0].plot(record["step"], record["residual"], label=record["method"], **style)
        if record["telescoping"][0] is not None:
            axes[1].plot(record["step"], record["telescoping"], **style)
        grown = np.subtract(record["resident_mb"], record["resident_mb"][0])
        axes[2].plot(record["step"], grown, **style)
    axes[0].set(yscale="log", title="norm of the residual")
    axes[1].set(yscale="log", title="relative telescoping error")
    axes[2].set(title="resident memory, MB above the first point")
    for axis in axes:
        axis.set(xlabel="steps")
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, ncols=4, loc="lower center")
    figure.tight_layout(rect=(0, 0.16, 1, 1))
    figure.savefig(path, dpi=110)


def main() -> None:
    """Runs all methods, writes JSON and a figure, and shows a table."""
    args = parse_args()
    os.environ.setdefault("PJRT_NPROC", str(4 * WORKERS))
    jax.config.update("jax_num_cpu_devices", WORKERS)
    mesh = Mesh(np.array(jax.devices("cpu")[:WORKERS]), (AXIS,), axis_types=(AxisType.Auto,))
    console = Console()
    args.out.mkdir(parents=True, exist_ok=True)
    names = (
        "equal",
        "loss",
        "residual",
        "largest",
        "of the mean",
        "telescoping",
        "MB more",
        "programs",
    )
    table = Table("method", *names)
    records: list[dict[str, Any]] = []
    for method in methods():
        if args.only not in method.name:
            continue
        record = run(method, args, mesh)
        records.append(record)
        console.print(record)
        memory = record["resident_mb"]
        gap = record["telescoping"][-1]
        table.add_row(
            method.name,
            str(record["replicas_equal"]),
            f"{record['loss']:.4f}",
            f"{record['residual'][-1]:.3g}",
            f"{max(record['residual']):.3g}",
            f"{record['mean_residual'][-1]:.3g}",
            "" if gap is None else f"{gap:.1e}",
            f"{memory[-1] - memory[len(memory) // 2]:+.1f}",
            str(record["programs"][-1]),
        )
        content = short(head() | {"methods": records})
        (args.out / "endurance.json").write_text(json.dumps(content) + "\n")
    console.print(table)
    draw(records, args.out / "endurance.png")
    console.print(f"written: {args.out}")


if __name__ == "__main__":
    main()
