"""Train a byte-level language model data-parallel, dense and compressed, side by side.

The corpus is the source of Python's standard library, which every machine has. Each run starts
from the same parameters and sees the same batches in the same order; the exchange of gradients and
the optimizer behind it differ. Interrupt it whenever you like: the table and the files are written
for as far as it came.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import os
import pathlib
import statistics
import sysconfig
import time
from typing import Any, TextIO

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import fftgrad as fg

Params = Any
Batch = np.ndarray[Any, np.dtype[np.int32]]

SELDOM = 10.0
"""Seconds between two lines of progress where there is no terminal."""
LINK = "100mbit"
"""Over which the seconds of a step are predicted at the end."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--runs", default=",".join(DEFAULT), help="which runs, in this order")
    add("--steps", type=int, default=120, help="optimizer steps of each run")
    add("--batch", type=int, default=4, help="sequences per worker and step")
    add("--context", type=int, default=128, help="bytes per sequence")
    add("--width", type=int, default=96, help="width of the transformer")
    add("--layers", type=int, default=2, help="layers of the transformer")
    add("--lr", type=float, default=4e-3, help="peak learning rate of Adam and Muon")
    add("--seed", type=int, default=0, help="of parameters and batches, the same for all runs")
    add("--theta", type=float, default=0.85, help="paper: share of the frequencies dropped")
    add("--paper-bits", type=int, default=10, help="paper: bits per number kept")
    add("--fraction", type=float, default=0.1, help="blocked, topk: share of coefficients kept")
    add("--bits", type=int, default=8, help="blocked, topk: bits per number kept")
    add("--block", type=int, default=64, help="blocked: values per Fourier transform")
    add("--decay", type=float, default=0.95, help="blocked, topk: decay of error feedback")
    add("--workers", type=int, default=8, help="CPU devices, where there is no accelerator")
    add("--out", type=pathlib.Path, default=pathlib.Path("runs"), help="folder for the results")
    add("--smoke", action="store_true", help="a few steps of a tiny model, to see that it runs")
    args = parser.parse_args(argv)
    if args.smoke:
        args.steps, args.batch, args.context, args.width, args.layers = 3, 2, 32, 32, 1
    return args


# Runs

DEFAULT = "dense", "muon", "powersgd", "budget"
"""Two dense optimizers, and two compressed rows that docs/choose.md recommends, with Muon."""


@dataclasses.dataclass
class Run:
    """One way to exchange gradients, and what came of it."""

    name: str
    exchange: fg.exchanges.Exchange
    memory: fg.memories.Memory = fg.NoMemory()
    # In place of Adam.
    whole: functools.partial[optax.GradientTransformationExtraArgs] | None = None
    beside: str = "dense Adam"  # the name of the dense run with the same kind of optimizer
    losses: list[float] = dataclasses.field(default_factory=list[float])
    step_ms: list[float] = dataclasses.field(default_factory=list[float])
    sent: int = 0
    link: float = 0.0
    exchange_ms: float = float("nan")
    error: float = float("nan")
    held_out: float = float("nan")


def make_runs(args: argparse.Namespace, workers: int) -> list[Run]:
    """The runs that were asked for."""
    paper = fg.chain(
        fg.Fft(block=None, half=True),
        fg.TopK(fraction=1 - args.theta),
        fg.RangeFloat(bits=args.paper_bits),
    )
    keep, quantize = fg.TopK(fraction=args.fraction), fg.LogQuantizer(bits=args.bits)
    feedback = fg.ErrorFeedback(decay=args.decay)
    muon = functools.partial(
        fg.optimizers.feedback_muon,
        lead=0.3,
        muon_weight_dimension_numbers=fg.optimizers.muon_dimensions,
    )
    runs = {
        "dense": Run("dense Adam", fg.AllReduce()),
        "muon": Run("dense Muon", fg.AllReduce(), whole=muon, beside=""),
        "powersgd": Run(
            "PowerSGD + Muon",
            fg.PowerSgd(rank=4),
            fg.ErrorFeedback(),
            whole=muon,
            beside="dense Muon",
        ),
        "budget": Run(
            "two stages 25x + Muon",
            fg.TwoStage(fg.Budget(ratio=25), workers),
            fg.ErrorFeedback(),
            whole=muon,
            beside="dense Muon",
        ),
        "paper": Run("FFT whole", fg.AllGather(paper)),
        "blocked": Run(
            f"FFT {args.block} + EF",
            fg.AllGather(fg.chain(fg.Fft(block=args.block), keep, quantize)),
            feedback,
        ),
        "topk": Run(
            "top-k + EF",
            fg.AllGather(fg.chain(keep, quantize)),
            feedback,
        ),
    }
    try:
        return [runs[name] for name in args.runs.split(",")]
    except KeyError as error:
        raise SystemExit(f"--runs: there is no run {error}; choose from {','.join(runs)}") from None


# Data and model


def corpus() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The bytes to train on, and those of every tenth file, held out."""
    files = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    parts = [file.read_bytes() for file in files]
    held_out = b"\n".join(parts[9::10])
    train = b"\n".join(part for i, part in enumerate(parts) if i % 10 != 9)
    return np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8)


def sample(rng: np.random.Generator, text: np.ndarray[Any, Any], count: int, context: int) -> Batch:
    """`count` random passages of `context` + 1 bytes."""
    starts = rng.integers(0, text.size - context, count)
    return text[starts[:, None] + np.arange(context + 1)].astype(np.int32)


class Layer(nn.Module):
    """A pre-norm transformer layer with heads of 32."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # (B, T, D) -> (B, T, D)
        batch, length, width = x.shape
        heads = max(1, width // 32)
        y = nn.LayerNorm(use_bias=False)(x)
        qkv = nn.Dense(3 * width, use_bias=False)(y)
        q, k, v = jnp.moveaxis(qkv.reshape(batch, length, 3, heads, -1), 2, 0)  # (B, T, H, D/H)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + nn.Dense(width, use_bias=False)(y.reshape(batch, length, width))
        y = nn.LayerNorm(use_bias=False)(x)
        y = nn.gelu(nn.Dense(4 * width, use_bias=False)(y))
        return x + nn.Dense(width, use_bias=False)(y)


class ByteLM(nn.Module):
    """A decoder-only transformer over bytes."""

    width: int
    layers: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:  # (B, T) -> (B, T, 256)
        length = tokens.shape[1]
        position = self.param("position", nn.initializers.normal(0.02), (length, self.width))
        x = nn.Embed(256, self.width)(tokens) + position[None]
        for _ in range(self.layers):
            x = Layer(self.width)(x)
        return nn.Dense(256, use_bias=False)(nn.LayerNorm(use_bias=False)(x))


# Training


@dataclasses.dataclass(frozen=True)
class Trainer:
    """What all the runs share: mesh, model, first parameters, and the loss."""

    args: argparse.Namespace
    mesh: Mesh
    model: ByteLM
    params: Params

    def loss(self, params: Params, batch: jax.Array) -> jax.Array:
        """Nats per byte of a batch int32[B, T + 1]."""
        logits: Any = self.model.apply(params, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    def local_gradient(self, params: Params, batch: jax.Array) -> tuple[jax.Array, Params]:
        """Loss and gradient of this worker's own part of the batch."""
        return fg.value_and_grad(self.loss, "data")(params, batch)

    def optimizer(self, run: Run) -> optax.GradientTransformation:
        """The exchange, then Adam, without momentum behind feedback; or an optimizer with both."""
        peak, steps = self.args.lr, self.args.steps
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, peak, max(1, steps // 10), steps + 1, peak / 10
        )
        if run.whole:
            return run.whole(schedule, run.exchange, run.memory, axis_name="data")
        adam = optax.adam(schedule, b2=0.99)
        if isinstance(run.memory, fg.ErrorFeedback):
            adam = optax.rmsprop(schedule, 0.99, eps_in_sqrt=False, bias_correction=True)
        return optax.chain(
            fg.compressed_pmean(run.exchange, run.memory, axis_name="data", key=self.args.seed),
            optax.clip_by_global_norm(1.0),
            adam,
        )

    def spread(self, batch: Batch) -> jax.Array:
        """A batch, split over the workers."""
        return jax.device_put(batch, NamedSharding(self.mesh, P("data")))


class Report(Progress):
    """A bar for each run on a terminal; elsewhere a line, but none before SELDOM seconds passed."""

    said = -float("inf")

    def line(self, text: str) -> None:
        """One line of progress, where there is no terminal."""
        if not self.console.is_terminal and time.monotonic() - self.said >= SELDOM:
            self.console.print(text, markup=False, highlight=False)
            self.said = time.monotonic()


def train(trainer: Trainer, run: Run, progress: Report, log: TextIO, text: Any) -> None:
    """Trains one run; what it yields is in `run`, whether it comes to its end or not."""
    args, mesh = trainer.args, trainer.mesh
    progress.line(f"{run.name}: compiling")
    task = progress.add_task(run.name, total=args.steps, loss="compiling", speed="", sent="")
    tx = trainer.optimizer(run)

    def step(params: Params, state: Any, batch: jax.Array) -> tuple[Params, Any, jax.Array]:
        loss, gradient = trainer.local_gradient(params, batch)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, "data")

    params = jax.device_put(trainer.params, NamedSharding(mesh, P()))
    state = fg.init_state(tx, params, mesh, "data")
    train_step = fg.data_parallel(step, mesh, "data", donate_argnums=(0, 1))
    rng = np.random.default_rng(args.seed)
    batch = trainer.spread(sample(rng, text[0], args.batch * mesh.size, args.context))
    compiled = train_step.lower(params, state, batch).compile()
    exchange = compile_exchange(trainer, run)
    for collective in fg.audit(exchange):
        run.sent += collective.bytes
        run.link += collective.link_bytes(mesh.size)
    try:
        for count in range(1, args.steps + 1):
            start = time.perf_counter()
            params, state, loss = compiled(params, state, batch)
            run.losses.append(float(loss))
            run.step_ms.append(1e3 * (time.perf_counter() - start))
            speed = 1e3 * batch.size / run.step_ms[-1]
            record = {"run": run.name, "step": count, "loss": run.losses[-1]}
            record |= {"bytes": count * run.sent, "tokens_per_s": round(speed)}
            log.write(json.dumps(record) + "\n")
            progress.update(
                task,
                advance=1,
                loss=f"loss {run.losses[-1]:.3f}",
                speed=f"{speed / 1e3:.1f}k tok/s",
                sent=f"{run.sent / 1e3:.1f} kB/step",
            )
            progress.line(f"{run.name}: step {count} of {args.steps}, loss {run.losses[-1]:.3f}")
            batch = trainer.spread(sample(rng, text[0], batch.shape[0], args.context))
    finally:
        assess(trainer, run, params, batch, exchange, text[1])


def compile_exchange(trainer: Trainer, run: Run) -> jax.stages.Compiled:
    """The exchange on its own, without memory: one gradient per worker in, their mean out."""
    tx = fg.compressed_pmean(run.exchange, axis_name="data", key=trainer.args.seed)

    def mean(gradients: Params) -> Params:
        own = jax.tree.map(lambda g: g[0], gradients)
        return tx.update(own, tx.init(own))[0]

    mapped = jax.shard_map(mean, mesh=trainer.mesh, in_specs=P("data"), out_specs=P())
    rows = NamedSharding(trainer.mesh, P("data"))
    like = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct((trainer.mesh.size, *p.shape), p.dtype, sharding=rows),
        trainer.params,
    )
    return jax.jit(mapped).lower(like).compile()


@jax.jit
def relative_error(approximate: Params, gradients: Params) -> jax.Array:
    """The error of a mean of gradients, which have a leading axis of workers."""
    exact = jax.tree.map(lambda g: g.mean(0), gradients)
    difference = jax.tree.map(jnp.subtract, approximate, exact)
    return optax.tree.norm(difference) / optax.tree.norm(exact)


def assess(
    trainer: Trainer,
    run: Run,
    params: Params,
    batch: jax.Array,
    exchange: jax.stages.Compiled,
    held_out: np.ndarray[Any, Any],
) -> None:
    """Held-out loss, and error and time of the exchange on one more gradient."""

    def rows(params: Params, batch: jax.Array) -> Params:
        return jax.tree.map(lambda g: g[None], trainer.local_gradient(params, batch)[1])

    gradients = jax.jit(
        jax.shard_map(rows, mesh=trainer.mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    )(params, batch)
    approximate, times = exchange(gradients), list[float]()
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(exchange(gradients))
        times.append(1e3 * (time.perf_counter() - start))
    run.exchange_ms = statistics.median(times)
    run.error = float(relative_error(approximate, gradients))
    rng = np.random.default_rng(1)
    size = 16 * trainer.mesh.size
    batches = [sample(rng, held_out, size, trainer.args.context) for _ in range(4)]
    loss = jax.jit(trainer.loss)
    run.held_out = statistics.mean(float(loss(params, trainer.spread(b))) for b in batches)


# Results


def table(runs: list[Run], trainer: Trainer) -> Table:
    """One row for each run that has begun."""
    columns = ("", "held-out\nloss", "bytes\na step", "fewer", "relative\nerror", "ms\na step")
    out = Table(*columns, "exchange\nms", box=box.SIMPLE_HEAD, padding=0)
    workers = trainer.mesh.size
    out.title = f"{workers} workers; bytes over the link of each, fewer than with a float32 ring"
    dense = fg.link_bytes(fg.AllReduce(), trainer.params, workers)
    for column in out.columns:
        column.justify, column.no_wrap = "right", True
    out.columns[0].justify = "left"
    for run in runs:
        if run.losses:
            out.add_row(
                run.name,
                f"{run.held_out:.4f}",
                f"{run.link:,.0f}",
                f"{dense / max(run.link, 1):.1f}x",
                f"{run.error:.3f}",
                f"{statistics.median(run.step_ms):.0f}",
                f"{run.exchange_ms:.0f}",
            )
    return out


def sentences(runs: list[Run], trainer: Trainer) -> list[str]:
    """What the losses say, and why compressing does not pay here; nothing without a dense run."""
    known = {run.name: run for run in runs if run.losses}
    pairs = [(run, known[run.beside]) for run in known.values() if run.beside in known]
    pairs = [(run, dense) for run, dense in pairs if run is not dense]
    if not pairs:
        return []
    losses = list[str]()
    for run, dense in pairs:
        more, fewer = run.held_out / dense.held_out - 1, dense.link / max(run.link, 1)
        place = f"{abs(more):.1%} {'above' if more > 0 else 'below'} {dense.name}"
        losses.append(f"{run.name} ends {place} with {fewer:.0f} times fewer bytes on a link")
    seconds = ", ".join(f"{run.name} {predicted(trainer, run):.3f} s" for run in known.values())
    return [
        f"Held-out loss: {', '.join(losses)}.",
        f"Compressing does not pay here, because the {trainer.mesh.size} workers are on one "
        "machine: no step waits for a link, and compressing takes time. If each worker had such a "
        "machine, with links of 100 Mbit/s between them, fg.planning.predict_step expects of a "
        f"step: {seconds}.",
    ]


def predicted(trainer: Trainer, run: Run) -> float:
    """Seconds of a step over slow links, where no worker shares its processors with others."""
    shared = trainer.mesh.size if jax.default_backend() == "cpu" else 1
    return fg.planning.predict_step(
        trainer.optimizer(run),
        trainer.params,
        step=statistics.median(run.step_ms) / 1e3 / shared,
        link=LINK,
        axes={"data": trainer.mesh.size},
        timing=fg.planning.Timing(0.0, 0.0),  # its own are in the step
    )


def plot(runs: list[Run], path: pathlib.Path) -> None:
    """Loss against steps, and loss against bytes sent."""
    mpl.use("agg")
    figure = Figure(figsize=(10, 4), layout="constrained")
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    for run in runs:
        window = min(9, len(run.losses))
        if not window:
            continue
        smooth = np.convolve(run.losses, np.ones(window) / window, "valid")
        steps = np.arange(window, len(run.losses) + 1)
        by_step.plot(steps, smooth, label=run.name)
        by_bytes.plot(steps * run.sent / 1e6, smooth, label=run.name)
    by_step.set(xlabel="step", ylabel="training loss, nats per byte (mean of 9 steps)")
    by_bytes.set(xlabel="MB that each worker has handed to the network", xscale="log")
    by_step.legend()
    for axes in (by_step, by_bytes):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> None:
    """Runs everything, and writes down what there is in the end."""
    args = parse_args(argv)
    # More workers than cores: the devices share a pool of threads, and where all of those wait in
    # a collective nothing is left to compute what they wait for.
    os.environ.setdefault("PJRT_NPROC", str(4 * args.workers))
    jax.config.update("jax_num_cpu_devices", args.workers)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    model = ByteLM(args.width, args.layers)
    tokens = np.zeros((1, args.context), np.int32)
    first = jax.jit(model.init)(jax.random.key(args.seed), tokens)
    # On the host, because each run donates its copy.
    trainer = Trainer(args, mesh, model, jax.device_get(first))
    runs, text = make_runs(args, mesh.size), corpus()

    console = Console()
    folder = args.out.expanduser() / datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
    folder.mkdir(parents=True)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(first))
    console.print(
        f"{mesh.size} x {mesh.devices.flat[0].device_kind}, {parameters:,} parameters, "
        f"{text[0].size:,} bytes to train on, {args.batch * mesh.size} x {args.context} a step"
    )
    progress = Report(
        TextColumn("{task.description:17}"),
        BarColumn(12),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]:10} {task.fields[speed]:11} {task.fields[sent]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with (folder / "metrics.jsonl").open("w", buffering=1) as log:
        try:
            with progress:
                for run in runs:
                    train(trainer, run, progress, log, text)
        except KeyboardInterrupt:
            console.print("interrupted; this is what there is")
        for run in runs:
            if run.losses:
                record = dataclasses.asdict(run) | {"exchange": repr(run.exchange)}
                record["whole"] = run.whole and run.whole.func.__name__
                record |= {"memory": repr(run.memory), "workers": mesh.size, "jax": jax.__version__}
                record |= {"device": mesh.devices.flat[0].device_kind, "parameters": parameters}
                log.write(json.dumps({"summary": record}) + "\n")
    console.print(table(runs, trainer))
    for sentence in sentences(runs, trainer):
        console.print(sentence, markup=False, highlight=False)
    plot(runs, folder / "curves.png")
    console.print(f"written: {folder}/curves.png, {folder}/metrics.jsonl")


if __name__ == "__main__":
    main()
