"""What papers claim about one gradient, on two real ones: errors, quantizers, searches.

The gradients are that of data/gradient.npy, a byte-level language model half-way through training,
and that of a convolutional network of 2.8 million parameters on digits after 60 steps. Compared are
the codecs of the FFT paper's own comparison at its settings (theta = 0.85, 10 bits; QSGD of 3 bits;
TernGrad without clipping, by layer, its last layer left alone), by the distribution of the errors
of single values, which is that paper's measure, and by the relative error. RedSync's two searches
are written down here as its published re-implementations have them.
"""

import argparse
import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rate_distortion
from _record import DATA, RESULTS, head
from models import ResNet
from rate_distortion import train_lm
from rich.console import Console
from rich.table import Table

import fftgrad as fg

SPECTRUM = fg.chain(fg.Fft(block=None), fg.TopK(fraction=0.15))
PAPER = "FFT (paper)"
CODECS: dict[str, fg.Codec] = {
    PAPER: fg.chain(fg.Fft(block=None, half=True), fg.TopK(fraction=0.15), fg.RangeFloat(bits=10)),
    "FFT, not quantized": SPECTRUM,
    "FFT 64, not quantized": fg.chain(fg.Fft(block=64), fg.TopK(fraction=0.15)),
    "top-k": fg.TopK(fraction=0.15),
    "QSGD": fg.UniformLevels(bits=3),
    "TernGrad": fg.Ternary(clip=None),
}
RIVALS = ("top-k", "QSGD", "TernGrad")
BITS = 10
FRACTIONS = (0.01, 0.001)
STOP = 0.2
"""Where both of RedSync's published searches stop, or how far they go down at once."""


@dataclasses.dataclass(frozen=True)
class Gradient:
    """A gradient in one vector.

    Attributes:
      layers: of each leaf, in order, how many values it has and whether it is of the last layer.
    """

    name: str
    values: np.ndarray
    layers: list[tuple[int, bool]]


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=pathlib.Path, default=RESULTS / "papers")
    add("--steps", type=int, default=60, help="of training before the second gradient")
    add("--smoke", action="store_true", help="a tiny model alone")
    return parser.parse_args()


def gradients(args: argparse.Namespace) -> list[Gradient]:
    """Both gradients, with the layers of their models; with `--smoke` a tiny one."""
    image, trained = jnp.zeros((1, 8, 8, 1)), rate_distortion.convolutions(args)
    if args.smoke:
        return [Gradient("convolutions", trained, layers(ResNet(1, 4, pre=True), image))]
    tokens, saved = jnp.zeros((1, 128), jnp.int32), np.load(DATA / "gradient.npy")
    return [
        Gradient("language model", saved, layers(train_lm.ByteLM(96, 2), tokens)),
        Gradient("convolutions", trained, layers(ResNet(2, 64, pre=True), image)),
    ]


def layers(model: Any, example: jax.Array) -> list[tuple[int, bool]]:
    """The leaves of a model, in the order of its gradient's."""
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), example))
    found = jax.tree_util.tree_flatten_with_path(params)[0]
    # In both models the last layer is the only one that hangs from the root by this name.
    return [
        (math.prod(leaf.shape), jax.tree_util.keystr(path).startswith("['params']['Dense_0']"))
        for path, leaf in found
    ]


# Errors


def received(codec: fg.Codec, x: np.ndarray) -> np.ndarray:
    """What comes out of a message."""
    return np.asarray(both_ways(codec)(jnp.asarray(x)), np.float64)


@functools.cache
def both_ways(codec: fg.Codec) -> Callable[[jax.Array], jax.Array]:
    """Compress and decompress, compiled once for each shape."""

    @jax.jit
    def both(x: jax.Array) -> jax.Array:
        step = fg.Step.of(0)
        return fg.decompress(codec, fg.compress(codec, x, step=step), x, step=step)

    return both


def by_layer(codec: fg.Codec, gradient: Gradient) -> np.ndarray:
    """The same for each layer on its own, but for the last, which is not compressed."""
    ends = np.cumsum([size for size, _ in gradient.layers])
    pieces = np.split(gradient.values, ends[:-1])
    return np.concatenate(
        [
            piece if last else received(codec, piece)
            for piece, (_, last) in zip(pieces, gradient.layers, strict=True)
        ]
    )


def relative(error: np.ndarray, x: np.ndarray) -> float:
    """The length of the error, over that of the vector."""
    return float(np.linalg.norm(error) / np.linalg.norm(x.astype(np.float64)))


def below(error: np.ndarray, *others: np.ndarray) -> float:
    """The share of the ranks at which the sorted errors are below those of all the others.

    That is where its cumulative distribution lies above all of theirs.
    """
    least = np.min([np.sort(np.abs(other)) for other in others], axis=0)
    return float(np.mean(np.sort(np.abs(error)) < least))


def smaller(error: np.ndarray, other: np.ndarray) -> float:
    """The share of the values whose error is smaller than another codec's."""
    return float(np.mean(np.abs(error) < np.abs(other)))


def errors(gradient: Gradient) -> dict[str, Any]:
    """Of each codec, and how the paper's compare with its rivals'."""
    x = gradient.values
    found = {
        name: (by_layer(codec, gradient) if name == "TernGrad" else received(codec, x)) - x
        for name, codec in CODECS.items()
    }
    rivals = [found[name] for name in RIVALS]
    own = found[PAPER]
    return {
        "relative": {name: relative(error, x) for name, error in found.items()},
        "smaller": {name: smaller(own, found[name]) for name in RIVALS},
        "below": {name: below(own, found[name]) for name in RIVALS},
        "below_all": below(own, *rivals),
    }


# The quantizer


def quantized(x: np.ndarray) -> dict[str, float]:
    """What ten bits add to the frequencies that are kept, by four codes."""
    main: Any = fg.compress(SPECTRUM, jnp.asarray(x)).main
    kept = np.concatenate([np.real(main), np.imag(main)])
    top, side = np.abs(kept).max(), 2 ** (BITS - 1) - 1
    even = np.round(kept / top * side) / side * top
    codecs = {
        "tuned to [-1, 1]": fg.codecs.FixedRangeFloat.tuned(-1.0, 1.0, BITS),
        "tuned to its range": fg.codecs.FixedRangeFloat.tuned(-float(top), float(top), BITS),
        "fitted": fg.RangeFloat(BITS),
    }
    found = {name: relative(received(codec, kept) - kept, kept) for name, codec in codecs.items()}
    return {"largest": float(top), **found, "even steps": relative(even - kept, kept)}


# Clipping


def clipped(gradient: Gradient) -> dict[str, float]:
    """By how much TernGrad's clipping, by layer, shortens a gradient and turns it, in degrees."""
    ends = np.cumsum([size for size, _ in gradient.layers])
    pieces = np.split(gradient.values.astype(np.float64), ends[:-1])
    bounds = [2.5 * piece.std() for piece in pieces]
    short = np.concatenate([np.clip(p, -b, b) for p, b in zip(pieces, bounds, strict=True)])
    before, after = np.linalg.norm(gradient.values), np.linalg.norm(short)
    cosine = gradient.values @ short / (before * after)
    return {"shorter": float(1 - after / before), "degrees": math.degrees(math.acos(cosine))}


# Searches


def trimmed(magnitude: np.ndarray, k: int) -> tuple[int, int]:
    """How many pass RedSync's falling threshold, and how often they were counted."""
    mean, largest = magnitude.mean(), magnitude.max()
    ratio, passes, count = 1 - STOP, 0, 0
    while count < k:
        count = int(np.sum(magnitude > mean + ratio * (largest - mean)))
        ratio, passes = ratio - STOP, passes + 1
    return count, passes


def bisected(magnitude: np.ndarray, k: int, stop: float) -> tuple[int, int]:
    """The same of its binary search, which ends between k and 2k or at a step of `stop`."""
    mean, largest = magnitude.mean(), magnitude.max()
    low, high, passes, count = 0.0, 1.0, 0, 0
    while high - low > stop:
        ratio = (low + high) / 2
        count = int(np.sum(magnitude > mean + ratio * (largest - mean)))
        passes += 1
        if k < count < 2 * k:
            break
        low, high = (low, ratio) if count < k / 2 else (ratio, high)
    return count, passes


def searched(x: np.ndarray, fraction: float) -> dict[str, Any]:
    """What each search selects, in units of k, and in how many passes."""
    magnitude, k = np.abs(x.astype(np.float64)), math.ceil(fraction * x.size)
    searches: dict[str, Callable[[], tuple[int, int]]] = {
        "trimmed": lambda: trimmed(magnitude, k),
        "binary, stops at 0.2": lambda: bisected(magnitude, k, STOP),
    }
    found = {name: search() for name, search in searches.items()}
    ours = int(np.count_nonzero(received(fg.Threshold(fraction), x)))
    return {
        "fraction": fraction,
        **{name: [count / k, passes] for name, (count, passes) in found.items()},
        "Threshold": ours / k,
    }


def main() -> None:
    """Measures, writes JSON, and shows tables."""
    args = parse_args()
    console = Console()
    rows: list[Any] = []
    for gradient in gradients(args):
        x = gradient.values
        found = errors(gradient)
        rows.append(
            {
                "gradient": gradient.name,
                "values": x.size,
                **found,
                "quantized": quantized(x),
                "clipped": clipped(gradient),
                "searches": [searched(x, fraction) for fraction in FRACTIONS],
            }
        )
        title = f"{gradient.name}: the paper's FFT below all others at {found['below_all']:.1%}"
        table = Table("", "relative error", "FFT smaller", "FFT below", title=title)
        for name, error in found["relative"].items():
            shares = [found[key].get(name) for key in ("smaller", "below")]
            table.add_row(name, f"{error:.3f}", *("" if s is None else f"{s:.1%}" for s in shares))
        console.print(table)
        console.print(rows[-1]["quantized"], rows[-1]["clipped"], *rows[-1]["searches"])
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "errors.json"
    path.write_text(json.dumps(rounded(head() | {"rows": rows})) + "\n")
    console.print(f"written: {path}")


def rounded(content: Any) -> Any:
    """With four digits of each number, which is more than the page shows."""
    if isinstance(content, float):
        return float(f"{content:.4g}")
    if isinstance(content, dict):
        return {key: rounded(value) for key, value in content.items()}
    return [rounded(value) for value in content] if isinstance(content, list) else content


if __name__ == "__main__":
    main()
