"""What each method does to training: the same model, data, seed and steps, at the bytes it sends.

Two tasks: a byte-level language model under Adam, and a residual convolutional network on
scikit-learn's digits under SGD with momentum 0.9. The learning rate of each method is the best of
one grid, on the first seed; the other seeds run at that rate. Results are written after each run,
and runs whose results are there already are not repeated.
"""

import argparse
import collections
import dataclasses
import functools
import importlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
from _record import head
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from rich.console import Console

import fftgrad as fg

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import train_lm  # noqa: E402  (after the path)

WORKERS = 8
AXIS = "data"
Transformation = optax.GradientTransformationExtraArgs
Params = Any


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--tasks", default="lm,digits", help="which tasks")
    add("--methods", default="", help="parts of names, by semicolon; all if empty")
    add("--steps", type=int, default=200, help="optimizer steps of each run")
    add("--seeds", type=int, default=2, help="how many seeds")
    add("--rates", default="0.5,1,2", help="learning rates tried, in units of the task's own")
    add("--out", type=pathlib.Path, default=pathlib.Path("benchmarks"), help="for the results")
    add("--name", default="convergence", help="of the files written")
    add("--show", action="store_true", help="run nothing, show what is there")
    add("--smoke", action="store_true", help="a few steps of tiny models")
    args = parser.parse_args()
    if args.smoke:
        args.steps, args.seeds, args.rates = 2, 1, "1"
        args.methods = args.methods or "dense;PowerSGD rank 1"
    return args


# Tasks


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its data, and the optimizer that people use for it."""

    name: str
    rate: float
    params: Callable[[int], Params]
    loss: Callable[[Params, Any], jax.Array]
    batches: Callable[[int], Iterator[Any]]
    assess: Callable[[Params], dict[str, float]]
    adam: bool


def language_model(smoke: bool) -> Task:
    """Nats per byte of Python's standard library."""
    context, width, layers = (16, 32, 1) if smoke else (64, 64, 2)
    per_worker = 2 if smoke else 4
    model = train_lm.ByteLM(width, layers)
    train, held_out = train_lm.corpus()

    def loss(params: Params, batch: jax.Array) -> jax.Array:
        logits: Any = model.apply(params, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    def batches(seed: int) -> Iterator[Any]:
        rng = np.random.default_rng(seed)
        while True:
            yield train_lm.sample(rng, train, WORKERS * per_worker, context)

    def assess(params: Params) -> dict[str, float]:
        rng = np.random.default_rng(1)
        parts = [train_lm.sample(rng, held_out, 256, context) for _ in range(1 if smoke else 8)]
        return {"loss": float(np.mean([evaluate(params, part) for part in parts]))}

    evaluate = jax.jit(loss)
    return Task(
        "lm",
        8e-3,
        lambda seed: model.init(jax.random.key(seed), jnp.zeros((1, context), jnp.int32)),
        loss,
        batches,
        assess,
        adam=True,
    )


class Block(nn.Module):
    """Two convolutions around which the input goes."""

    channels: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # (B, H, W, C)
        y = nn.Conv(self.channels, (3, 3), self.stride, use_bias=False)(nn.relu(x))
        y = nn.relu(nn.GroupNorm(num_groups=4)(y))
        y = nn.GroupNorm(num_groups=4)(nn.Conv(self.channels, (3, 3), use_bias=False)(y))
        if x.shape != y.shape:
            x = nn.Conv(self.channels, (1, 1), self.stride, use_bias=False)(x)
        return x + y


class ResNet(nn.Module):
    """A residual network for images of 8 × 8."""

    channels: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # (B, 8, 8, 1) -> (B, 10)
        x = nn.Conv(self.channels, (3, 3), use_bias=False)(x)
        x = Block(self.channels)(x)
        x = Block(2 * self.channels, 2)(x)
        x = Block(4 * self.channels, 2)(x)
        return nn.Dense(10)(nn.relu(x).mean((1, 2)))


def digits(smoke: bool) -> Task:
    """1,437 images to train on, 360 held out."""
    data: Any = importlib.import_module("sklearn.datasets").load_digits()
    images = (data.images[..., None] / 8 - 1).astype(np.float32)
    labels = data.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[360:], order[:360]
    model = ResNet(4 if smoke else 16)
    per_worker = 2 if smoke else 16

    def loss(params: Params, batch: Any) -> jax.Array:
        logits: Any = model.apply(params, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    def batches(seed: int) -> Iterator[Any]:
        rng = np.random.default_rng(seed)
        while True:
            chosen = rng.choice(train, WORKERS * per_worker, replace=False)
            yield images[chosen], labels[chosen]

    @jax.jit
    def evaluate(params: Params) -> tuple[jax.Array, jax.Array]:
        logits: Any = model.apply(params, images[test])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels[test])
        return losses.mean(), (logits.argmax(-1) == labels[test]).mean()

    def assess(params: Params) -> dict[str, float]:
        loss, accuracy = evaluate(params)
        return {"loss": float(loss), "accuracy": float(accuracy)}

    return Task(
        "digits",
        0.05,
        lambda seed: model.init(jax.random.key(seed), jnp.asarray(images[:1])),
        loss,
        batches,
        assess,
        adam=False,
    )


# Methods


@dataclasses.dataclass(frozen=True)
class Method:
    """What replaces the dense mean, and what the optimizer behind it needs for that.

    Attributes:
      make: the transformation, given the number of steps of the run.
      momentum: whether the optimizer keeps its momentum. Feedback is one already.
      signs: whether the updates are signs: plain descent at a small rate then.
      corrects: whether the memory has the momentum that the optimizer lacks.
      warm_up: share of the steps that run at first, in the branch of that number.
      published: the ratio as papers count it, without indices and scales.
      counted: with indices of 32 bits, and scales, as most implementations send them.
    """

    name: str
    make: Callable[[int], Transformation]
    momentum: bool = True
    signs: bool = False
    adam: bool = False
    corrects: bool = False
    warm_up: float = 0.0
    branches: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    published: float | None = None
    counted: float | None = None


def fixed(tx: Transformation) -> Callable[[int], Transformation]:
    """The same transformation, whatever the number of steps."""

    def make(steps: int) -> Transformation:
        del steps
        return tx

    return make


def pmean(
    codec: fg.Codec | fg.Exchange, memory: fg.Memory = fg.NoMemory()
) -> Callable[[int], Transformation]:
    """The compressed mean, whatever the number of steps."""
    exchange = codec if isinstance(codec, fg.Exchange) else fg.AllGather(codec)
    return fixed(fg.compressed_pmean(exchange, memory, axis_name=AXIS))


def methods() -> list[Method]:
    """All the rows."""
    m, decayed, four = fg.methods, fg.ErrorFeedback(decay=0.95), fg.RangeFloat(4)
    dct, fft = fg.Dct(block=64), fg.Fft(block=64)

    return [
        Method("dense", pmean(fg.AllReduce()), published=1, counted=1),
        Method("bfloat16", pmean(fg.Cast("bfloat16")), published=2, counted=2),
        # The FFT paper's own comparison, at its settings.
        Method("FFT (paper)", fixed(m.fft_sparsification()), published=21.3, counted=16),
        Method(
            "top-k 15 % (paper)",
            fixed(m.top_k(0.15, memory=fg.NoMemory())),
            published=6.67,
            counted=3.33,
        ),
        Method("QSGD 3 bits (paper)", fixed(m.qsgd(bits=3)), published=10.6, counted=10.4),
        Method(
            "TernGrad no clip (paper)",
            fixed(m.terngrad(clip=None, dense=("params/Dense_0",))),
            published=16,
            counted=16,
        ),
        # Methods as published.
        Method("QSGD 4 bits", fixed(m.qsgd(bits=4)), published=8, counted=7.9),
        Method("TernGrad", fixed(m.terngrad()), published=16, counted=16),
        Method(
            "TernGrad, shared scale", fixed(m.terngrad(workers=WORKERS)), published=16, counted=6.4
        ),
        Method("EDEN 1 bit (DRIVE)", fixed(m.eden(bits=1)), published=32, counted=31.8),
        Method("EDEN 2 bits", fixed(m.eden(bits=2)), published=16, counted=15.9),
        Method("majority vote", fixed(m.majority_vote()), signs=True, published=32, counted=32),
        Method("signSGD + EF", fixed(m.sign_sgd()), published=32, counted=32),
        Method(
            "1-bit Adam",
            lambda steps: m.scale_by_one_bit_adam(max(1, steps // 5), WORKERS, b2=0.99),
            adam=True,
            warm_up=0.2,
            branches=((1,), (0,)),
            published=32,
            counted=16,
        ),
        Method("top-k 1 % + EF", fixed(m.top_k(0.01)), momentum=False, published=100, counted=50),
        Method(
            "random-k 10 % + EF", fixed(m.random_k(0.1)), momentum=False, published=10, counted=10
        ),
        Method("DGC 1 %", fixed(m.dgc(0.01)), False, corrects=True, published=100, counted=50),
        Method(
            "RedSync 1 %",
            fixed(m.redsync(0.01, dense_below=1024, trimmed_below=32768)),
            momentum=False,
            corrects=True,
            published=100,
            counted=50,
        ),
        Method(
            "RedSync 1 %, quantized",
            fixed(
                m.redsync(
                    0.01,
                    quantize=True,
                    output=("params/Dense_0",),
                    dense_below=1024,
                    trimmed_below=32768,
                )
            ),
            momentum=False,
            corrects=True,
            published=200,
            counted=100,
        ),
        Method("ScaleCom 50x", fixed(m.scalecom(50)), published=50, counted=25),
        Method(
            "ScaleCom 50x, FFT 64",
            fixed(m.scalecom(50, transform=fg.Fft(block=64), exact=True)),
            published=50,
            counted=25,
        ),
        Method("AdaComp", fixed(m.adacomp(conv_bin=50, bin_size=500)), published=100),
        Method("PowerSGD rank 1", fixed(m.power_sgd(rank=1))),
        Method("PowerSGD rank 4", fixed(m.power_sgd(rank=4))),
        # Feedback is a momentum: the same without the optimizer's.
        Method("signSGD + EF, no momentum", fixed(m.sign_sgd()), False, published=32, counted=32),
        Method("ScaleCom 50x, no momentum", fixed(m.scalecom(50)), False, published=50, counted=25),
        Method("PowerSGD rank 1, no momentum", fixed(m.power_sgd(rank=1)), False),
        Method("PowerSGD rank 4, no momentum", fixed(m.power_sgd(rank=4)), False),
        Method("DeMo k = 32", fixed(m.demo(k=32)), signs=True),
        Method("DeMo k = 8", fixed(m.demo(k=8)), signs=True),
        # Ours: the same feedback for all, another codec each.
        Method("top-k 4 %, 4 bits", pmean(fg.chain(fg.TopK(0.04), four), decayed), False),
        Method("DCT 64, 4 %, 4 bits", pmean(fg.chain(dct, fg.TopK(0.04), four), decayed), False),
        Method("FFT 64, 4 %, 4 bits", pmean(fg.chain(fft, fg.TopK(0.04), four), decayed), False),
        Method("top-k 1 %, sign", pmean(fg.chain(fg.TopK(0.01), fg.Sign()), decayed), False),
        Method(
            "two stages, top-k 4 %, 4 bits",
            pmean(fg.TwoStage(fg.chain(fg.TopK(0.04), four), WORKERS), decayed),
            momentum=False,
        ),
        Method("shared top-k 4 %", pmean(fg.SharedSupport(fg.TopK(0.04)), decayed), False),
        Method(
            "shared by the mean 4 %",
            pmean(fg.SharedSupport(fg.TopK(0.04), chooser=fg.Drift()), decayed),
            momentum=False,
        ),
        Method("DCT 64, 1 %, sign", pmean(fg.chain(dct, fg.TopK(0.01), fg.Sign()), decayed), False),
    ]


def optimizer(task: Task, method: Method, steps: int) -> Transformation:
    """The method and what follows it, up to the learning rate."""
    exchange = method.make(steps)
    if method.signs or method.adam:
        tail = optax.identity()
    elif task.adam:
        tail = optax.scale_by_adam(b1=0.9 if method.momentum else 0.0, b2=0.99)
    elif method.momentum:
        tail = optax.trace(0.9)
    else:
        # Momentum 0.9 makes ten times of a gradient, unless the memory does.
        tail = optax.scale(1.0 if method.corrects else 10.0)
    return optax.with_extra_args_support(optax.chain(exchange, tail))


def schedule(task: Task, method: Method, rate: float, steps: int) -> Callable[[int], Any]:
    """A rise, and half a cosine down to a tenth."""
    # A step of Adam has about the size of its rate, as one of signs has.
    base = 1e-3 if method.signs else 8e-3 if method.adam else task.rate
    peak = rate * base
    return optax.warmup_cosine_decay_schedule(0.0, peak, max(1, steps // 10), steps + 1, peak / 10)


# Runs


@dataclasses.dataclass
class Program:
    """A task under a method, compiled once for all rates and seeds."""

    task: Task
    method: Method
    steps: int
    mesh: Mesh

    def __post_init__(self) -> None:
        task, mesh = self.task, self.mesh
        tx = optimizer(task, self.method, self.steps)
        self.spread = NamedSharding(mesh, P(AXIS))
        self.replicated = NamedSharding(mesh, P())

        def step(params: Params, state: Any, batch: Any, rate: jax.Array) -> Any:
            own = jax.lax.pcast(params, AXIS, to="varying")
            loss, gradient = jax.value_and_grad(task.loss)(own, batch)
            updates, state = tx.update(gradient, state, params)
            updates = optax.tree.scale(-rate, updates)
            return optax.apply_updates(params, updates), state, loss[None]

        params, batch = self.params(0), jax.device_put(next(task.batches(0)), self.spread)
        specs = fg.state_specs(jax.eval_shape(tx.init, params), AXIS)
        init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)
        self.init = jax.jit(init).lower(params).compile()
        mapped = jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P(), specs, P(AXIS), P()),
            out_specs=(P(), specs, P(AXIS)),
        )
        rate = jax.device_put(jnp.float32(0), self.replicated)
        lowered = jax.jit(mapped, donate_argnums=(0, 1)).lower(
            params, self.init(params), batch, rate
        )
        self.step = lowered.compile()

    def params(self, seed: int) -> Params:
        """The first parameters, on all devices."""
        return jax.device_put(self.task.params(seed), self.replicated)


def run(program: Program, rate: float, seed: int) -> Any:
    """One training run, as a record."""
    task, method, steps = program.task, program.method, program.steps
    params = program.params(seed)
    state = program.init(params)
    batches = task.batches(seed)
    rates = schedule(task, method, rate, steps)
    start = time.perf_counter()
    losses: list[jax.Array] = []
    for count in range(steps):
        batch = jax.device_put(next(batches), program.spread)
        now = jax.device_put(jnp.float32(rates(count)), program.replicated)
        params, state, loss = program.step(params, state, batch, now)
        losses.append(loss)
    curve = [float(np.mean(loss)) for loss in losses]
    elapsed = time.perf_counter() - start

    by_branch: collections.Counter[tuple[int, ...]] = collections.Counter()
    for collective in fg.audit(program.step):
        by_branch[collective.branch] += collective.bytes
    first, later = (by_branch[branch] for branch in method.branches)
    warm_up = round(method.warm_up * steps)
    dense = 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
    mean = (first * warm_up + later * (steps - warm_up)) / steps
    return {
        "task": task.name,
        "method": method.name,
        "rate": rate,
        "seed": seed,
        "steps": steps,
        **task.assess(params),
        "bytes": later,
        "ratio": dense / later,
        "mean_ratio": dense / mean,
        "published": method.published,
        "dense_bytes": dense,
        "warm_up": [warm_up, first],
        "ms_per_step": 1e3 * elapsed / steps,
        "curve": [round(value, 4) for value in curve],
    }


def errors(task: Task, listed: list[Method], mesh: Mesh) -> Iterator[tuple[str, float]]:
    """The relative error of the mean of one gradient, without memory, of each method.

    The gradient is that of a dense run after 50 steps; none for methods whose updates are no mean.
    """
    program = Program(task, Method("dense", pmean(fg.AllReduce())), 50, mesh)
    batches, params = task.batches(0), program.params(0)
    state = program.init(params)
    for _ in range(50):
        batch = jax.device_put(next(batches), program.spread)
        rate = jax.device_put(jnp.float32(task.rate / 2), program.replicated)
        params, state, _ = program.step(params, state, batch, rate)

    def gradient(params: Params, batch: Any) -> Params:
        own = jax.lax.pcast(params, AXIS, to="varying")
        return jax.tree.map(lambda g: g[None], jax.grad(task.loss)(own, batch))

    mapped = jax.shard_map(gradient, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P(AXIS))
    rows = jax.jit(mapped)(params, jax.device_put(next(batches), program.spread))
    exact = jax.tree.map(lambda g: g.mean(0), rows)
    for method in listed:
        if method.signs or method.adam:
            continue
        tx = method.make(50)

        def mean(rows: Params, tx: Transformation = tx) -> Params:
            own = jax.tree.map(lambda g: g[0], rows)
            return tx.update(own, tx.init(own))[0]

        mapped = jax.shard_map(mean, mesh=mesh, in_specs=P(AXIS), out_specs=P())
        difference = jax.tree.map(jnp.subtract, jax.jit(mapped)(rows), exact)
        yield method.name, float(optax.tree.norm(difference) / optax.tree.norm(exact))


def score(record: Any) -> float:
    """Lower is better; a run that diverged is worst."""
    return record["loss"] if np.isfinite(record["loss"]) else float("inf")


def main() -> None:
    """Runs what is missing, and shows all that there is."""
    args = parse_args()
    os.environ.setdefault("PJRT_NPROC", str(4 * WORKERS))
    jax.config.update("jax_num_cpu_devices", WORKERS)
    mesh = Mesh(np.array(jax.devices("cpu")[:WORKERS]), (AXIS,), axis_types=(AxisType.Auto,))
    console = Console()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{args.name}.json"
    results: Any = {**head(), "errors": {}, "runs": []}
    if path.exists() and not args.smoke:
        results = json.loads(path.read_text())
    makers = {"lm": language_model, "digits": digits}
    wanted = [word for word in args.methods.split(";") if word]
    rates = [float(rate) for rate in args.rates.split(",")]

    @functools.cache
    def program(task: Task, method: Method) -> Program:
        return Program(task, method, args.steps, mesh)

    def get(task: Task, method: Method, rate: float, seed: int) -> Any:
        key = {
            "task": task.name,
            "method": method.name,
            "rate": rate,
            "seed": seed,
            "steps": args.steps,
        }
        for record in results["runs"]:
            if key.items() <= record.items():
                return record
        record = run(program(task, method), rate, seed)
        results["runs"].append(record)
        path.write_text(json.dumps(results))
        shown = ("task", "method", "rate", "seed", "loss", "ratio", "ms_per_step")
        console.print({name: record[name] for name in shown})
        return record

    for task in (makers[name](args.smoke) for name in args.tasks.split(",")):
        listed = [m for m in methods() if not wanted or any(w in m.name for w in wanted)]
        for method in [] if args.show else listed:
            best = min((get(task, method, rate, 0) for rate in rates), key=score)
            for seed in range(1, args.seeds):
                get(task, method, best["rate"], seed)
            program.cache_clear()
        if not args.show:
            known = results["errors"].setdefault(task.name, {})
            for name, error in errors(task, [m for m in listed if m.name not in known], mesh):
                known[name] = error
                path.write_text(json.dumps(results))
    print(markdown(results))
    plot(results["runs"], args.tasks.split(","), args.out / f"{args.name}.png")
    console.print(f"written: {path}, {path.with_suffix('.png')}")


# Results


def chosen(runs: list[Any], task: str) -> dict[str, list[Any]]:
    """The runs of each method at its best rate, the longest there are."""
    out: dict[str, list[Any]] = {}
    for name in dict.fromkeys(r["method"] for r in runs if r["task"] == task):
        own = [r for r in runs if r["task"] == task and r["method"] == name]
        own = [r for r in own if r["steps"] == max(o["steps"] for o in own)]
        best = min((r for r in own if r["seed"] == 0), key=score)
        out[name] = [r for r in own if r["rate"] == best["rate"]]
    return out


def markdown(results: Any) -> str:
    """One row a method: what it sends, and what became of the training."""
    runs = results["runs"]
    tasks = list(dict.fromkeys(r["task"] for r in runs))
    by_task = {task: chosen(runs, task) for task in tasks}
    by_name = {method.name: method for method in methods()}
    names = dict.fromkeys(name for rows in by_task.values() for name in rows)
    head = ["method", "published", "counted"]
    for task in tasks:
        head += [f"{task}: ratio", "error", "loss", "to dense", *["accuracy"] * (task == "digits")]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in names:
        method = by_name.get(name, Method(name, pmean(fg.AllReduce())))
        cells = [name, *(f"{x:g}" if x else "" for x in (method.published, method.counted))]
        for task in tasks:
            own, dense = (by_task[task].get(key, []) for key in (name, "dense"))
            width = 4 + (task == "digits")
            if not own:
                cells += [""] * width
                continue
            losses = [r["loss"] for r in own]
            change = 100 * (np.mean(losses) / np.mean([r["loss"] for r in dense]) - 1)
            error = results["errors"].get(task, {}).get(name)
            accuracy = [r["accuracy"] for r in own if "accuracy" in r]
            cells += [f"{own[0]['ratio']:.1f}", f"{error:.2f}" if error else ""]
            cells += [f"{np.mean(losses):.3f} ± {np.ptp(losses) / 2:.3f}", f"{change:+.1f} %"]
            cells += [f"{100 * np.mean(accuracy):.1f} %"] if accuracy else []
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(runs: list[Any], tasks: list[str], path: pathlib.Path) -> None:
    """Training loss against the bytes that a worker has sent."""
    mpl.use("agg")
    figure = Figure(figsize=(14, 7 * len(tasks)), layout="constrained")
    for axes, task in zip(figure.subplots(len(tasks), 1, squeeze=False)[:, 0], tasks, strict=True):
        for number, (name, own) in enumerate(chosen(runs, task).items()):
            curve = own[0]["curve"]
            window = min(15, len(curve))
            smooth = np.convolve(curve, np.ones(window) / window, "valid")
            steps = np.arange(window, len(curve) + 1)
            warm_up, first = own[0]["warm_up"]
            sent = np.minimum(steps, warm_up) * first
            sent = sent + np.maximum(steps - warm_up, 0) * own[0]["bytes"]
            style = ("-", "--", ":", "-.")[number // 10 % 4]
            axes.plot(sent / 1e6, smooth, style, color=f"C{number % 10}", label=name)
        axes.set(title=task, xscale="log", xlabel="MB that each worker has sent")
        axes.set_ylabel("training loss")
        axes.legend(fontsize="small", ncols=2, loc="center left", bbox_to_anchor=(1, 0.5))
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
