"""Gossip on a strongly convex problem: the distance to the optimum, by step and by byte.

Least squares with data of its own on each worker, so that the workers' optima differ, and exact
gradients. Every method starts at zero and has a constant learning rate, the same for all. What
share γ of the neighbors' pull a method follows, and the scale of the one-bit quantizer, were chosen
on the problem `tuned`; on `other`, with another seed and another condition number, the same are
used.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import _style as style
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _record import head, markdown, parser, save, table, write
from _style import styles
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.console import Console

import fftgrad as fg
from fftgrad.contrib import gossip

AXIS = "data"
RATE = 0.1
COLUMNS = ["link_bytes", "to_1e-2", "to_1e-4", "last", "slope"]
"""Of the results: bytes over a worker's link and step, steps, and log10 of the distance."""
WORKERS = 8
GRAPHS = {"ring": gossip.ring(WORKERS), "exponential": gossip.exponential(WORKERS)}


@dataclasses.dataclass(frozen=True)
class Problem:
    """f_i(x) = x'H_i x / 2 - c_i'x on worker i, of which the mean has a known optimum."""

    name: str
    seed: int
    condition: float
    values: int = 256
    workers: int = WORKERS

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """H [w, n, n] and c [w, n], float64; the largest eigenvalue of the mean H is 1."""
        rng = np.random.default_rng(self.seed)
        n = self.values
        scales = np.logspace(0, -0.5 * np.log10(self.condition), n)
        basis = np.linalg.qr(rng.standard_normal((n, n)))[0]
        rows = rng.standard_normal((self.workers, 2 * n, n)) * scales @ basis.T
        h = np.einsum("wri,wrj->wij", rows, rows) / (2 * n)
        targets = rng.standard_normal(n) + rng.standard_normal((self.workers, n))
        h /= np.linalg.eigvalsh(h.mean(0))[-1]
        return h, np.einsum("wij,wj->wi", h, targets)


@dataclasses.dataclass(frozen=True)
class Method:
    """A method, what it sends to each neighbor, and how far it follows them."""

    name: str
    # BEER, which tracks gradients, or CHOCO-SGD, which sends parameters alone
    optimizer: Callable[..., optax.GradientTransformationExtraArgs]
    codec: fg.Codec
    gamma: float
    gradients: fg.Codec | None = None  # what encodes BEER's gradients, if it is not the same codec

    def make(self, weights: np.ndarray) -> optax.GradientTransformationExtraArgs:
        """The method on a graph."""
        own = {"gradients": self.gradients} if self.gradients else {}
        descent, gamma = optax.sgd(RATE), self.gamma
        return self.optimizer(descent, self.codec, weights, gamma=gamma, axis_name=AXIS, **own)


BEER, CHOCO = gossip.beer, gossip.choco_sgd
TOP, FOUR = fg.chain(fg.TopK(fraction=0.1), fg.LogLevels(bits=6)), fg.LogLevels(bits=4)
FAST, SLOW = (fg.codecs.DynamicSign(scale, 0.992) for scale in (2.0, 0.5))
METHODS = [
    Method("gradient tracking, float32", BEER, fg.Identity(), 1.0),
    Method("BEER, top-k 10 %, 6 bits", BEER, TOP, 0.15),
    Method("BEER, 4 bits", BEER, FOUR, 0.6),
    Method("BEER, sign", BEER, fg.Sign(), 0.1),
    Method("BEER, one bit, dynamic", BEER, SLOW, 0.3, FAST),
    Method("CHOCO-SGD, top-k 10 %, 6 bits", CHOCO, TOP, 0.15),
    Method("CHOCO-SGD, 4 bits", CHOCO, FOUR, 0.6),
    Method("decentralized SGD, float32", CHOCO, fg.Identity(), 1.0),
]


def run(method: Method, graph: str, problem: Problem, steps: int) -> Any:
    """One run, as a record."""
    h, c = problem.data()
    optimum = np.linalg.solve(h.mean(0), c.mean(0))
    tx = method.make(GRAPHS[graph])
    h32, c32 = jnp.asarray(h, jnp.float32), jnp.asarray(c, jnp.float32)

    def own(x: jax.Array, state: Any, h: jax.Array, c: jax.Array) -> tuple[Any, Any]:
        moves, state = tx.update(jnp.dot(h, x, precision="highest") - c, state, x)
        return optax.apply_updates(x, moves), state

    step: Any = jax.vmap(own, axis_name=AXIS)

    @jax.jit
    def train(x: jax.Array, state: Any) -> tuple[Any, jax.Array]:
        def one(carry: Any, _: None) -> tuple[Any, jax.Array]:
            x, state = step(*carry, h32, c32)
            return (x, state), x

        return jax.lax.scan(one, (x, state), None, steps)

    x = jnp.zeros(c.shape, jnp.float32)
    _, path = train(x, jax.vmap(tx.init)(x))
    apart = np.asarray(path, np.float64) - optimum
    distances = np.sqrt((apart**2).sum(-1).mean(-1)) / np.linalg.norm(optimum)
    logs = np.log10(np.concatenate([[1.0], distances]))
    vectors = 2 if method.optimizer is BEER else 1
    each = vectors * (fg.wire_bytes(method.codec, x[0]) - 8) + 8
    sent = each * (np.count_nonzero(GRAPHS[graph][0]) - 1)
    record: dict[str, Any] = {"problem": problem.name, "graph": graph, "method": method.name}
    record |= {"link_bytes": sent, "last": round(float(logs[-1]), 2)}
    for depth in (2, 4):
        there = np.flatnonzero(logs <= -depth)
        record[f"to_1e-{depth}"] = int(there[0]) if len(there) else None
    middle, end = record["to_1e-2"], record["to_1e-4"]
    slope = float(np.polyfit(range(end - middle), logs[middle:end], 1)[0]) if end else None
    record["slope"] = slope and round(slope, 5)
    points = [(i, float(logs[i])) for i in range(0, steps + 1, max(1, steps // 200))]
    return record, points


SHOWN = {
    "gradient tracking, float32": "gradient tracking, float32",
    "BEER, top-k 10 %, 6 bits": "BEER, top-k 10 %",
    "BEER, one bit, dynamic": "BEER, one bit",
    "CHOCO-SGD, top-k 10 %, 6 bits": "CHOCO-SGD, top-k 10 %",
    "CHOCO-SGD, 4 bits": "CHOCO-SGD, 4 bits",
}
"""The curves of the figure, by their names in it."""


def draw(curves: list[Any]) -> Figure:
    """The distance on a ring against steps, and against bytes over a worker's link."""
    problems = list(dict.fromkeys(record["problem"] for record, _ in curves))
    figure = style.figure(0.7 + 2.6 * len(problems))
    axes = figure.subplots(len(problems), 2, sharey=True, squeeze=False)
    looks, lines = styles(SHOWN.values()), dict[str, Line2D]()
    for row, problem in zip(axes, problems, strict=True):
        own = [c for c in curves if c[0]["problem"] == problem and c[0]["graph"] == "ring"]
        for record, points in own:
            steps, logs = (np.array(side) for side in zip(*points, strict=True))
            if name := SHOWN.get(record["method"]):
                (lines[name],) = row[0].plot(steps, logs, **looks[name])
                row[1].plot(steps[1:] * record["link_bytes"], logs[1:], **looks[name])
        row[0].set(ylabel="log10 distance", title=f"Problem: {problem}")
        row[1].set(xscale="log")
    axes[-1, 0].set(xlabel="steps")
    axes[-1, 1].set(xlabel="bytes over a worker's link")
    figure.legend(lines.values(), lines, ncols=2, loc="outside upper center")
    return figure


def tables(results: dict[str, Any]) -> str:
    """What each method takes on a ring until its distance is 10^-4, and where others stop."""
    rows: list[list[str]] = []
    tuned, other = (results["found"][problem]["ring"] for problem in ("tuned", "other"))
    for name, (size, *_) in tuned.items():
        cells = [name, f"{size:,}"]
        for _, _, steps, last, _ in (tuned[name], other[name]):
            sent = f"{steps * size / 1000:,.0f}" if steps else f"stops: {last}"
            cells += [f"{steps:,}" if steps else "", sent]
        rows.append(cells)
    columns = ["on a ring, 8 workers", "bytes a step", "tuned: steps to 10^-4", "kB to 10^-4"]
    return markdown([*columns, "other: steps", "kB"], rows)


def main() -> None:
    """Measures, writes JSON and a figure, and shows a table."""
    args = parser(__doc__, "gossip", steps=(1500, "of each run")).parse_args()
    problems = [Problem("tuned", 0, 5.0), Problem("other", 1, 10.0)]
    graphs, methods = list(GRAPHS), METHODS
    if args.smoke:
        problems = [dataclasses.replace(problems[0], values=16, workers=4)]
        graphs, methods, args.steps = graphs[:1], [METHODS[1], METHODS[5]], 20
    curves, found = list[Any](), dict[str, Any]()
    for problem in problems:
        for graph in graphs:
            own = [run(method, graph, problem, args.steps) for method in methods]
            curves += own
            rows = {record["method"]: [record[c] for c in COLUMNS] for record, _ in own}
            found.setdefault(problem.name, {})[repr(graph)] = rows
            title = f"{problem.name}, {graph!r}, {problem.workers} workers"
            cells = [[name, *row] for name, row in rows.items()]
            Console().print(table(title, ("", *COLUMNS), cells))
    write(args.out / "least_squares.json", {**head(), "columns": COLUMNS, "found": found})
    save(draw(curves), args.out, "gossip")


if __name__ == "__main__":
    main()
