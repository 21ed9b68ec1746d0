"""Error against bits of every family of codecs, beside an ideal entropy coder.

On gradients of a byte-level language model of 3.3 million parameters, of a convolutional network of
2.8 million, and on a heavy-tailed vector without any structure. The bound is that of an
entropy-coded scalar quantizer (ECSQ): uniform steps with a dead zone, each level at the mean of
what falls into it, and as many bits as the zero-order entropy of the levels has. It knows nothing
of where the values are, so a codec that does may be below it.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _record import head, short
from models import ResNet
from rich.console import Console
from rich.table import Table

import fftgrad as fg

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import train_lm  # noqa: E402  (after the path)

TARGETS = (0.05, 0.01, 0.001)
"""The table is at the errors of so many of the largest values, kept exactly."""

SHARES = (0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0005)
DEAD_ZONES = (0.5, 0.6, 0.8, 1.0, 1.2)
HALVINGS = 18
AS_IT_IS = fg.Identity()


def kept(*others: fg.Codec, transform: fg.Codec = AS_IT_IS) -> list[fg.Codec]:
    """Top-k of every share, before something."""
    return [fg.chain(transform, fg.TopK(fraction=share), *others) for share in SHARES]


def filled(transform: fg.Codec = AS_IT_IS) -> list[fg.Codec]:
    """Messages of about as many bits."""
    return [fg.chain(transform, fg.Budget(ratio=max(1.0, 4 / share))) for share in SHARES]


FAMILIES: dict[str, list[fg.Codec]] = {
    "Budget": filled(),
    "DCT 64, Budget": filled(fg.Dct(block=64)),
    "top-k, LogLevels(4)": kept(fg.LogLevels(4)),
    "top-k, LogLevels(6)": kept(fg.LogLevels(6)),
    "top-k, RangeFloat(8)": kept(fg.RangeFloat(8)),
    "FFT 64, top-k, RangeFloat(8)": kept(fg.RangeFloat(8), transform=fg.Fft(block=64)),
    "EDEN": [fg.chain(fg.Hadamard(), fg.codecs.LloydMax(bits=bits)) for bits in (1, 2, 3, 4)],
    "Levels (QSGD)": [fg.UniformLevels(bits=bits) for bits in (2, 4, 6, 8)],
    "Ternary (TernGrad)": [fg.Ternary()],
    "Sign": [fg.Sign()],
}
CUSTOMARY = "top-k, int32 and float32"


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=pathlib.Path, default=ROOT / "benchmarks/results/rate_distortion")
    add("--steps", type=int, default=60, help="of training before the gradient")
    add("--smoke", action="store_true", help="tiny models, few codecs")
    return parser.parse_args()


def trained(
    params: Any, loss: Callable[..., jax.Array], batches: Iterator[Any], rate: float, steps: int
) -> np.ndarray:
    """The gradient after some steps of Adam, as a vector."""
    tx = optax.adam(rate, b2=0.99)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        updates, state = tx.update(jax.grad(loss)(params, batch), state)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(steps):
        params, state = step(params, state, next(batches))
    leaves = jax.tree.leaves(jax.jit(jax.grad(loss))(params, next(batches)))
    return np.concatenate([np.ravel(leaf) for leaf in leaves])


def language_model(args: argparse.Namespace) -> np.ndarray:
    """A gradient of nats per byte."""
    text, _ = train_lm.corpus()
    model = train_lm.ByteLM(32, 1) if args.smoke else train_lm.ByteLM(256, 4)
    params = model.init(jax.random.key(0), jnp.zeros((1, 64), jnp.int32))

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        logits: Any = model.apply(params, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    def batches() -> Iterator[jax.Array]:
        rng = np.random.default_rng(0)
        while True:
            yield jnp.asarray(train_lm.sample(rng, text, 8, 64))

    return trained(params, loss, batches(), 2e-3, args.steps)


def convolutions(args: argparse.Namespace) -> np.ndarray:
    """A gradient on images of digits."""
    import sklearn.datasets

    data: Any = sklearn.datasets.load_digits()
    images = (data.images[..., None] / 8 - 1).astype(np.float32)
    labels = data.target.astype(np.int32)
    model = ResNet(1, 4, pre=True) if args.smoke else ResNet(2, 64, pre=True)
    params = model.init(jax.random.key(0), jnp.asarray(images[:1]))

    def loss(params: Any, batch: Any) -> jax.Array:
        logits: Any = model.apply(params, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    def batches() -> Iterator[Any]:
        rng = np.random.default_rng(0)
        while True:
            chosen = rng.choice(len(labels), 32, replace=False)
            yield images[chosen], labels[chosen]

    return trained(params, loss, batches(), 1e-3, args.steps)


def heavy_tailed(args: argparse.Namespace) -> np.ndarray:
    """Student's t with three degrees of freedom, in any order."""
    n = 10_000 if args.smoke else 3_000_000
    return np.random.default_rng(0).standard_t(3, n).astype(np.float32)


VECTORS = {"lm": language_model, "conv": convolutions, "heavy tail": heavy_tailed}


@dataclasses.dataclass(frozen=True)
class Point:
    """What a codec costs on a vector, and what it loses."""

    bits: float
    error: float


def bound(x: np.ndarray, error: float) -> float:
    """Bits a value of the best entropy-coded quantizer of this error, among the dead zones."""
    magnitude = np.abs(x.astype(np.float64))
    return min(_entropy(magnitude, zone, error) for zone in DEAD_ZONES)


def _entropy(magnitude: np.ndarray, zone: float, error: float) -> float:
    whole, largest = float(np.linalg.norm(magnitude)), math.log(magnitude.max())
    low, high, bits = largest - 14, largest, math.inf
    for _ in range(HALVINGS):
        step = math.exp((low + high) / 2)
        sent = magnitude > zone * step
        cell = np.floor((magnitude[sent] - zone * step) / step).astype(np.int64)
        count = np.bincount(cell)
        mean = np.bincount(cell, magnitude[sent]) / np.maximum(count, 1)
        lost = np.sum(magnitude[~sent] ** 2) + np.sum((magnitude[sent] - mean[cell]) ** 2)
        if math.sqrt(lost) / whole > error:
            high = math.log(step)
            continue
        low = math.log(step)
        share = np.concatenate([[np.sum(~sent)], count]) / magnitude.size
        share = share[share > 0]
        bits = float(-np.sum(share * np.log2(share)) + np.mean(sent))  # with signs
    return bits


def measure(codec: fg.Codec, x: jax.Array) -> Point:
    """One message of the codec."""

    @jax.jit
    def squares(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        step = fg.Step.of(0)
        back = fg.decompress(codec, fg.compress(codec, x, step=step), x, step=step)
        return jnp.sum(jnp.square(x - back)), jnp.sum(jnp.square(x))

    lost, whole = squares(x)
    return Point(8 * fg.wire_bytes(codec, x) / x.size, math.sqrt(lost / whole))


def exact(x: np.ndarray) -> Callable[[float], float]:
    """The relative error of a share of the largest values, kept exactly."""
    squares = np.sort(np.square(x.astype(np.float64)))[::-1]
    left = np.append(squares[::-1].cumsum()[::-1], 0.0)
    return lambda share: math.sqrt(left[math.ceil(share * x.size)] / left[0])


def at(points: list[Point], error: float) -> float | None:
    """Bits for an error, on straight lines between the points' logarithms; None beyond them."""
    points = sorted(points, key=lambda point: -point.error)
    if not points[-1].error <= error <= points[0].error:
        return None
    errors = [-math.log(point.error) for point in points]
    bits = [math.log(point.bits) for point in points]
    return math.exp(float(np.interp(-math.log(error), errors, bits)))


def draw(rows: list[Any], path: pathlib.Path) -> None:
    """Error against bits of each family, for each vector, beside the bound."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(rows), figsize=(13, 4.5), sharey=True)
    for axis, row in zip(axes, rows, strict=True):
        for index, (family, points) in enumerate(row["points"].items()):
            bits, errors = zip(*((p["bits"], p["error"]) for p in points), strict=True)
            style = ".-" if len(bits) > 1 else "o"
            colour = "black" if family == CUSTOMARY else f"C{index}"
            axis.plot(bits, errors, style, color=colour, label=family, linewidth=1)
        bits, errors = zip(*((p["bits"], p["error"]) for p in row["bound"]), strict=True)
        axis.plot(bits, errors, "k--", label="entropy bound")
        axis.set(xscale="log", title=row["vector"], xlabel="bits a value", ylim=(0, 1.1))
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="relative error")
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, ncols=4, loc="lower center")
    figure.tight_layout(rect=(0, 0.16, 1, 1))
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measures, writes JSON and a figure, and shows a table."""
    args = parse_args()
    console = Console()
    rows: list[Any] = []
    for vector, make in VECTORS.items():
        x = make(args)
        values, error = jnp.asarray(x), exact(x)
        points = {
            name: [measure(codec, values) for codec in codecs[: 1 if args.smoke else None]]
            for name, codecs in FAMILIES.items()
        }
        points[CUSTOMARY] = [Point(64 * share, error(share)) for share in SHARES]
        rows.append(
            {
                "vector": vector,
                "values": x.size,
                "points": {k: [dataclasses.asdict(p) for p in v] for k, v in points.items()},
                "bound": [
                    dataclasses.asdict(Point(bound(x, error(share)), error(share)))
                    for share in SHARES
                ],
                "targets": [
                    {
                        "share": share,
                        "error": error(share),
                        "bound": (ideal := bound(x, error(share))),
                        "over": {
                            name: bits and bits / ideal
                            for name in points
                            for bits in [at(points[name], error(share))]
                        },
                    }
                    for share in TARGETS
                ],
            }
        )
        title = f"{vector}: bits a value over the bound's, at the error of top-k"
        table = Table("", *(f"{share:.1%}" for share in TARGETS), title=title)
        for name in points:
            overs = [target["over"][name] for target in rows[-1]["targets"]]
            table.add_row(name, *(f"{over:.2f}" if over else "" for over in overs))
        console.print(table)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "errors.json").write_text(json.dumps(short(head() | {"rows": rows})) + "\n")
    draw(rows, args.out / "rate_distortion.png")
    console.print(f"written: {args.out}")


if __name__ == "__main__":
    main()
