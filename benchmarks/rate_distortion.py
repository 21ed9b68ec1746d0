"""Error against bits of every family of codecs, beside an ideal entropy coder.

On gradients of a byte-level language model of 3.3 million parameters, of a convolutional network of
2.8 million, and on a heavy-tailed vector without any structure. The bound is that of an
entropy-coded scalar quantizer (ECSQ): uniform steps with a dead zone, each level at the mean of
what falls into it, and as many bits as the zero-order entropy of the levels has. It knows nothing
of where the values are, so a codec that does may be below it.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import _style as style
import gradients
import jax
import jax.numpy as jnp
import numpy as np
from _record import head, parser, save, table, write
from _style import styles
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.console import Console

import fftgrad as fg

TARGETS = (0.05, 0.01, 0.001)
"""The table is at the errors of so many of the largest values, kept exactly."""

SHARES = (0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0005)
DEAD_ZONES = (0.5, 0.6, 0.8, 1.0, 1.2)
HALVINGS = 18
NOTHING = fg.Identity()


def kept(*others: fg.Codec, transform: fg.Codec = NOTHING) -> list[fg.Codec]:
    """Top-k of every share, before something."""
    return [fg.chain(transform, fg.TopK(fraction=share), *others) for share in SHARES]


def filled(transform: fg.Codec = NOTHING) -> list[fg.Codec]:
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
    def error(x: jax.Array) -> jax.Array:
        step = fg.Step.of(0)
        back = fg.decompress(codec, fg.compress(codec, x, step=step), x, step=step)
        return jnp.sqrt(jnp.sum(jnp.square(x - back)) / jnp.sum(jnp.square(x)))

    return Point(8 * fg.wire_bytes(codec, x) / x.size, float(error(x)))


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


SHOWN = {
    "Budget": "Budget",
    "top-k, LogLevels(4)": "top-k, 4 bits",
    CUSTOMARY: "top-k, int32",
    "EDEN": "EDEN",
}
"""The curves of the figure, by their names in it."""
TITLES = {
    "lm": "A gradient of a language model",
    "conv": "A gradient of convolutions",
    "heavy tail": "Random values with a heavy tail",
}


def draw(rows: list[Any]) -> Figure:
    """Error against bits of some families, for each vector, beside the bound."""
    figure = style.figure(0.5 + 2.5 * len(rows))
    panels: Any = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
    looks = styles([*SHOWN.values(), BOUND])
    for axes, row in zip(panels, rows, strict=True):
        lines = dict[str, Line2D]()
        for family, name in SHOWN.items():
            points = row["points"][family]
            bits, errors = zip(*((p["bits"], p["error"]) for p in points), strict=True)
            (lines[name],) = axes.plot(bits, errors, marker=".", **looks[name])
        bits, errors = zip(*((p["bits"], p["error"]) for p in row["bound"]), strict=True)
        (lines[BOUND],) = axes.plot(bits, errors, **looks[BOUND])
        axes.set(xscale="log", title=TITLES[row["vector"]], ylim=(0, 1.05))
        axes.set_ylabel("relative error")
        if axes is panels[0]:
            figure.legend(lines.values(), lines, ncols=3, loc="outside upper center")
    panels[-1].set_xlabel("bits a value")
    panels[-1].xaxis.set_major_formatter("{x:g}")
    return figure


BOUND = "entropy bound"


def row(vector: str, x: np.ndarray, few: bool) -> dict[str, Any]:
    """What the families and the bound do on a vector."""
    values, error = jnp.asarray(x), exact(x)
    points = {
        name: [measure(codec, values) for codec in codecs[: 1 if few else None]]
        for name, codecs in FAMILIES.items()
    }
    points[CUSTOMARY] = [Point(64 * share, error(share)) for share in SHARES]
    targets: list[dict[str, Any]] = [
        {"share": s, "error": error(s), "bound": bound(x, error(s))} for s in TARGETS
    ]
    for target in targets:
        found = {name: at(own, target["error"]) for name, own in points.items()}
        target["over"] = {name: bits and bits / target["bound"] for name, bits in found.items()}
    return {
        "vector": vector,
        "values": x.size,
        "points": {name: list(map(dataclasses.asdict, own)) for name, own in points.items()},
        "bound": [{"bits": bound(x, error(s)), "error": error(s)} for s in SHARES],
        "targets": targets,
    }


def main() -> None:
    """Measures, writes JSON and a figure, and shows a table."""
    args = parser(
        __doc__,
        "rate_distortion",
        steps=(60, "of training before the gradient"),
        show=(False, "run nothing, draw what is there"),
    ).parse_args()
    if args.show:
        path = args.out / "errors.json"
        save(draw(json.loads(path.read_text())["rows"]), args.out, "rate_distortion")
        return
    count = 10_000 if args.smoke else 3_000_000
    vectors = {
        "lm": gradients.trained(gradients.small_source(args.smoke), args.steps),
        "conv": gradients.trained(gradients.convolutions(args.smoke), args.steps),
        "heavy tail": np.random.default_rng(0).standard_t(3, count).astype(np.float32),
    }
    rows: list[dict[str, Any]] = []
    for vector, x in vectors.items():
        rows.append(row(vector, x, args.smoke))
        overs = [target["over"] for target in rows[-1]["targets"]]
        cells = [
            [name, *(f"{over[name]:.2f}" if over[name] else None for over in overs)]
            for name in rows[-1]["points"]
        ]
        title = f"{vector}: bits a value over the bound's, at the error of top-k"
        columns = ["", *(f"{share:.1%}" for share in TARGETS)]
        Console().print(table(title, columns, cells))
    write(args.out / "errors.json", head() | {"rows": rows})
    save(draw(rows), args.out, "rate_distortion")


if __name__ == "__main__":
    main()
