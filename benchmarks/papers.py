"""What papers claim about one gradient, on two real ones: errors, quantizers, searches.

The gradients are that of data/gradient.npy, a byte-level language model half-way through training,
and that of a convolutional network of 2.8 million parameters on digits after 60 steps. Compared are
the codecs of the FFT paper's own comparison at its settings (theta = 0.85, 10 bits; QSGD of 3 bits;
TernGrad without clipping, by layer, its last layer left alone), by the distribution of the errors
of single values, which is that paper's measure, and by the relative error. RedSync's two searches
are written down here as its published re-implementations have them.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import gradients
import jax
import jax.numpy as jnp
import numpy as np
from _record import head, parser, table, write
from gradients import Gradient
from rich.console import Console

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


def both(smoke: bool, steps: int) -> list[Gradient]:
    """Both gradients, with the layers of their models; of a smoke run a tiny one."""
    conv, job = gradients.convolutions(smoke), gradients.main_job(smoke)
    found = Gradient("convolutions", gradients.trained(conv, steps), gradients.layers(conv))
    saved = Gradient("language model", np.load(gradients.SAVED), gradients.layers(job))
    return [found] if smoke else [saved, found]


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
    out = parser(__doc__, "papers", steps=(60, "of training before the second gradient"))
    args, console, rows = out.parse_args(), Console(), list[dict[str, Any]]()
    for gradient in both(args.smoke, args.steps):
        x, found = gradient.values, errors(gradient)
        own: dict[str, Any] = {"quantized": quantized(x), "clipped": clipped(gradient)}
        own["searches"] = [searched(x, fraction) for fraction in FRACTIONS]
        rows.append({"gradient": gradient.name, "values": x.size, **found, **own})
        cells = [
            [name, f"{error:.3f}", *(told.get(name) for told in (found["smaller"], found["below"]))]
            for name, error in found["relative"].items()
        ]
        title = f"{gradient.name}: the paper's FFT below all others at {found['below_all']:.1%}"
        console.print(table(title, ("", "relative error", "FFT smaller", "FFT below"), cells))
        console.print(own)
    write(args.out / "errors.json", head() | {"rows": rows})


if __name__ == "__main__":
    main()
