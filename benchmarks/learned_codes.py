"""What an autoencoder makes of the largest values of gradients, beside a quantizer of 4 bits.

A task is trained as `fg.contrib.learned.lgc` does while its autoencoder learns: dense for a fifth
of the steps, then with the exact values at the positions that a leader chooses, 0.1 % of each leaf.
The values of all workers in each of these steps are kept. The autoencoder learns those of the first
steps once, as `lgc` would, or many times over, and is then asked for those of later steps, which it
has not seen. Errors are relative: of every worker's values from the leader's code and one value of
innovation, and of the mean of the workers from the mean code. Those of the quantizer are of the
leader's values.
"""

import itertools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _record import markdown
from claims import gathered
from jax import lax
from methods import Setting, fed_back, gradients_of, watched
from program import Column, Point, Program, Study
from tasks import Batch, cosine

import fftgrad as fg
from fftgrad.contrib import _autoencoder, learned

FRACTION = 0.001
RATES, TURNS = (0.001, 0.1), (1, 50)
"""Of the autoencoder's descent; how often the values are learned."""


def phases(steps: int) -> tuple[int, int]:
    """How many steps are dense, and how many later ones are learned."""
    return steps // 5, 3 * steps // 5


def exact(setting: Setting) -> fg.Recipe:
    """The largest of each leaf as they are, after a dense start."""
    shared = fg.SharedSupport(lambda *_: fg.TopK(FRACTION))
    phased = fg.Scheduled({0: fg.AllReduce(), max(1, phases(setting.steps)[0]): shared})
    return fg.Recipe(phased, fg.ErrorFeedback())


class Learned(Column):
    """The errors of codes of the values that were sent."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.sent: list[np.ndarray] = []

    def see(self, count: int, before: Point, after: Point) -> None:
        """Keeps what has left the residuals of the workers, at the positions of the step."""
        if count > phases(self.program.setting.steps)[0]:
            was, now = (gathered(optax.tree.get(at.state, "residual")) for at in (before, after))
            found = was + gathered(gradients_of(after.state)) - now
            sent = np.where(now == 0, found, 0).astype(np.float32)
            self.sent.append(sent[:, np.all(now == 0, axis=0)])

    def record(self, end: Point, batch: Batch) -> dict[str, Any]:
        """An error for each code."""
        k = min(rows.shape[1] for rows in self.sent)
        rows = jnp.asarray(np.stack([rows[:, :k] for rows in self.sent]))
        _, seen = phases(self.program.setting.steps)
        found: list[dict[str, Any]] = [
            {"code": f"LogLevels({bits})", "later": quantized(rows, fg.LogLevels(bits), seen)}
            for bits in (2, 3, 4)
        ]
        for variant in ("leader", "all_reduce"):
            errors = taught(rows, seen, variant)
            for turns, rate in itertools.product(TURNS, RATES):
                last, later = errors(rate, turns)
                code = {"code": variant, "k": k, "rate": rate, "turns": turns}
                found.append(code | {"learned": last, "later": later})
        return {"errors": found}


def taught(rows: jax.Array, seen: int, variant: str) -> Callable[[float, int], list[float]]:
    """The errors of the last learned steps, and of those that come later, by rate and turns."""
    net, pick = learned.Autoencoder(), fg.TopK(k=1) if variant == "leader" else None
    items = jnp.arange(len(rows), dtype=jnp.int32), rows

    def learn(params: Any, item: tuple[jax.Array, jax.Array], rate: Any) -> Any:
        number, values = item
        return _autoencoder.learn(net, params, values, number % rows.shape[1], pick, rate)

    @jax.jit
    def run(items: tuple[jax.Array, jax.Array], rate: jax.Array, turns: jax.Array) -> jax.Array:
        first = jax.tree.map(lambda a: a[:seen], items)

        def turn(_: jax.Array, params: Any) -> Any:
            return lax.scan(lambda net, item: learn(net, item, rate), params, first)[0]

        params = lax.fori_loop(0, turns, turn, net.init())
        return lax.map(lambda item: learn(params, item, 0.0).error, items)

    def errors(rate: float, turns: int) -> list[float]:
        found = np.asarray(run(items, jnp.float32(rate), jnp.int32(turns)))
        return [float(np.mean(part)) for part in (found[max(0, seen - 10) : seen], found[seen:])]

    return errors


def quantized(rows: jax.Array, codec: fg.Codec, seen: int) -> float:
    """The error of the leaders' values through a codec, in the later steps."""

    def error(values: jax.Array) -> jax.Array:
        back = fg.decompress(codec, fg.compress(codec, values), values)
        return jnp.linalg.norm(values - back) / jnp.linalg.norm(values)

    leaders = jnp.stack([rows[i, i % rows.shape[1]] for i in range(seen, len(rows))])
    return float(jnp.mean(lax.map(error, leaders)))


def show(results: dict[str, Any], folder: pathlib.Path, name: str) -> None:
    """A row for each code and task."""
    del folder, name
    columns = ("code", "rate", "turns", "learned", "later")
    rows = [
        [run["task"], *(str(error.get(column, "")) for column in columns)]
        for run in results["runs"]
        for error in run["errors"]
    ]
    print(markdown(["task", *columns], rows))


STUDY = Study(
    folder="learned",
    file="errors",
    rows=[watched(fed_back("exact values", exact, phases=((0.2, (0,)),), later=(1,)))],
    show=show,
    tasks=("lm", "digits"),
    steps=100,
    seeds=1,
    schedule=lambda peak, steps: cosine(peak, 2 * steps),
    column=Learned,
    smoke=("exact values",),
)
