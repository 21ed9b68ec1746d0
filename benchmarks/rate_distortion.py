"""Error against bits of every family of codecs, beside an ideal entropy coder.

On gradients of a byte-level language model of 3.3 million parameters, of a convolutional network of
2.8 million, and on a heavy-tailed vector without any structure. The bound is that of an
entropy-coded scalar quantizer (ECSQ): uniform steps with a dead zone, each level at the mean of
what falls into it, and as many bits as the zero-order entropy of the levels has. It knows nothing
of where the values are, so a codec that does may be below it.
"""

import argparse
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
from _record import head
from models import ResNet
from rich.console import Console
from rich.table import Table

import fftgrad as fg

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import train_lm  # noqa: E402  (after the path)

SHARES = (0.05, 0.01, 0.001)
"""The targets are the errors of so many of the largest values, kept exactly."""

DEAD_ZONES = (0.5, 0.6, 0.8, 1.0, 1.2)
HALVINGS = 6

FAMILIES: dict[str, Callable[[float], fg.Codec]] = {
    "budget": lambda share: fg.Budget(ratio=max(1.0, 4.0 / share)),
    **{
        f"top-k, {bits} bits": lambda share, bits=bits: fg.chain(
            fg.TopK(fraction=share), fg.LogLevels(bits)
        )
        for bits in (4, 6)
    },
    "top-k, range float 8": lambda share: fg.chain(fg.TopK(fraction=share), fg.RangeFloat(8)),
}
"""Codecs by the share of the values that they keep, or about so."""


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=pathlib.Path, default=ROOT / "benchmarks/results/rate_distortion")
    add("--steps", type=int, default=60, help="of training before the gradient")
    add("--smoke", action="store_true", help="tiny models")
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


def bound(x: np.ndarray, error: float) -> float:
    """Bits a value of the best entropy-coded quantizer of this error, among the dead zones."""
    magnitude = np.abs(x.astype(np.float64))
    whole = float(np.linalg.norm(magnitude))
    return min(_entropy(magnitude, whole, zone, error) for zone in DEAD_ZONES)


def _entropy(magnitude: np.ndarray, whole: float, zone: float, error: float) -> float:
    low, high = math.log(magnitude.max() * 1e-6), math.log(magnitude.max())
    bits = math.inf
    for _ in range(3 * HALVINGS):
        step = math.exp((low + high) / 2)
        kept = magnitude > zone * step
        cell = np.floor((magnitude[kept] - zone * step) / step).astype(np.int64)
        count = np.bincount(cell)
        mean = np.bincount(cell, magnitude[kept]) / np.maximum(count, 1)
        lost = np.sum(magnitude[~kept] ** 2) + np.sum((magnitude[kept] - mean[cell]) ** 2)
        if math.sqrt(lost) / whole > error:
            high = math.log(step)
            continue
        low = math.log(step)
        share = np.concatenate([[np.sum(~kept)], count]) / magnitude.size
        share = share[share > 0]
        bits = float(-np.sum(share * np.log2(share)) + np.mean(kept))  # with signs
    return bits


def measure(codec: fg.Codec, x: jax.Array) -> tuple[float, float]:
    """Bits a value, and the relative error."""
    lost = jax.jit(lambda x: x - fg.decompress(codec, fg.compress(codec, x), x))(x)
    error = np.linalg.norm(np.asarray(lost, np.float64)) / np.linalg.norm(np.asarray(x, np.float64))
    return 8 * (fg.wire_bytes(codec, x) - 8) / x.size, float(error)


def reached(family: Callable[[float], fg.Codec], x: jax.Array, share: float, error: float) -> Any:
    """Bits a value for an error, at a share near to this one; None out of reach."""
    low, high, found = math.log(share / 3), math.log(min(1.0, 4 * share)), None
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        bits, got = measure(family(math.exp(middle)), x)
        if got <= error:
            high, found = middle, {"bits": bits, "error": got}
        else:
            low = middle
    return found


def draw(rows: list[Any], path: pathlib.Path) -> None:
    """Bits over those of the bound, by family, for each vector and error."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(VECTORS), figsize=(12, 4), sharey=True)
    for axis, vector in zip(axes, VECTORS, strict=True):
        for family in FAMILIES:
            points = [r for r in rows if r["vector"] == vector and r["family"] == family]
            points = [p for p in points if p["bits"] is not None]
            axis.plot([p["bound"] for p in points], [p["over"] for p in points], "o-", label=family)
        axis.axhline(1.0, color="black", linewidth=1)
        axis.set(xscale="log", title=vector, xlabel="bits a value of the bound")
    axes[0].set(ylabel="bits over the bound", ylim=(0.5, 2.2))
    axes[-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measures, writes JSON and a figure, and shows a table."""
    args = parse_args()
    console = Console()
    table = Table("vector", "error", "bound", *FAMILIES)
    rows: list[Any] = []
    for vector, make in VECTORS.items():
        x = make(args)
        size = np.sort(np.abs(x.astype(np.float64)))[::-1]
        for share in SHARES:
            rest = size[math.ceil(share * x.size) :]
            error = float(np.linalg.norm(rest) / np.linalg.norm(size))
            ideal, cells = bound(x, error), []
            for name, family in FAMILIES.items():
                found = reached(family, jnp.asarray(x), share, error)
                bits = found and found["bits"]
                over = bits and bits / ideal
                rows.append(
                    {
                        "vector": vector,
                        "values": x.size,
                        "share": share,
                        "target": error,
                        "bound": ideal,
                        "family": name,
                        "bits": bits,
                        "over": over,
                    }
                )
                cells.append(f"{over:.2f}" if over else "-")
            table.add_row(vector, f"{error:.3f}", f"{ideal:.4f}", *cells)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "errors.json").write_text(json.dumps(head() | {"rows": rows}, indent=1) + "\n")
    draw(rows, args.out / "errors.png")
    console.print(table)
    console.print(f"written: {args.out}")


if __name__ == "__main__":
    main()
