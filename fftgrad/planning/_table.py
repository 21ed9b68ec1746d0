"""Codec times of the rows of a plan: from a table of one machine, or timed here."""

import functools
import importlib.resources
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fftgrad as fg
from fftgrad._contracts import PyTree
from fftgrad.planning import _inputs, _timing
from fftgrad.planning._candidates import Candidate
from fftgrad.planning._inputs import Groups
from fftgrad.planning._predict import Timing, time_exchange

LARGEST = 1 << 22
"""Values of the model that is timed instead of a larger one."""
TABLE = importlib.resources.files("fftgrad.planning") / "timings.json"
COPY_VALUES = 1 << 22
COPYING = 0.2
"""Seconds in which one copy at least is not disturbed."""
MUONS = (fg.optimizers.feedback_muon, optax.contrib.muon)
ITERATIONS = 5
"""Newton-Schulz iterations of an orthogonalization."""
TICK = 1e-7
"""The shortest time that can be told from none."""
PASSES = 4
"""Passes over a gradient that groups of workers with fast links make first and last."""


class Point(NamedTuple):
    """The seconds of a row for so many values and workers."""

    values: int
    workers: int
    compress: float
    decompress: float


@functools.cache
def load_table() -> Mapping[str, Any]:
    """The table: its machine, and the points of each row by its name."""
    found = json.loads(TABLE.read_text())
    found["rows"] = {row["name"]: [Point(*p) for p in row["points"]] for row in found["rows"]}
    return found


def in_table(rows: Sequence[Candidate]) -> bool:
    """True if the table has all of them."""
    return {row.name for row in rows} <= {*load_table()["rows"]}


def from_table(
    rows: Sequence[Candidate], like: PyTree, groups: Groups
) -> tuple[dict[str, Timing], str]:
    """Scale the times of the table to this machine, and say so in a sentence."""
    table = load_table()
    slower = copy_seconds() / table["copy_seconds"]
    found = dict[str, Timing]()
    for row in rows:
        compress, decompress = _of(row, like, groups)
        found[row.name] = Timing(compress * slower, decompress * slower)
    device = jax.local_devices()[0]
    guess = "" if device.platform == "cpu" else f" For a {device.platform} this is a guess."
    said = (
        f"Codec times: measured on {table['machine']}, then multiplied by {slower:.2g}, because a "
        f"memory copy takes {slower:.2g} times as long here.{guess} To time the codecs here, pass "
        "--measure (measure=True)."
    )
    return found, said


def timed_here(
    rows: Sequence[Candidate],
    like: PyTree,
    groups: Groups,
    exact: bool,
    tell: Callable[[str], object],
) -> tuple[dict[str, Timing], str]:
    """Time the rows here, and say so; without `exact`, a large model by a smaller one."""
    times = 1.0 if exact else max(1.0, _inputs.count(like) / LARGEST)
    small = like if times == 1 else _inputs.smaller(like, 1 / times)
    found = dict[str, Timing]()
    for row in rows:
        tell(row.name)
        tx = row.transformation(_inputs.axis_of(groups.axes))
        took = time_exchange(tx, small, groups.axes, every=row.every)
        found[row.name] = Timing(times * took.compress, times * took.decompress)
    said = "Codec times: measured here"
    if times > 1:
        said += " for 4 million values, and in proportion beyond; measure=True times the whole"
    return found, f"{said}."


def copy_seconds() -> float:
    """Seconds of a copy into memory that was used before, because fresh memory takes longer."""
    if jax.default_backend() == "cpu":  # on one thread: others may have the other processors
        x, into = (np.ones(COPY_VALUES, np.float32) for _ in range(2))
        run = lambda x: np.copyto(into, x)  # noqa: E731
        return _timing.timed(run, [x], COPYING, 5).least
    copy = jax.jit(lambda x: x * 2.0)
    return _timing.timed(copy, [jnp.ones(COPY_VALUES, jnp.float32)], COPYING, 5).least


def orthogonalizing(like: PyTree) -> float:
    """Multiplications and additions of Muon, for all matrices."""
    shapes = (sorted(leaf.shape) for leaf in jax.tree.leaves(like) if len(leaf.shape) == 2)
    return float(sum(ITERATIONS * (4 * a * a * b + 2 * a**3) for a, b in shapes))


def turning(like: PyTree) -> float:
    """Multiplications and additions of an eigenbasis, for all matrices.

    Three pairs of products turn a matrix there, and its mean and what was sent of it back; a pair
    follows the averages, and a tenth of some products of square ones makes new bases.
    """
    shapes = (leaf.shape for leaf in jax.tree.leaves(like) if len(leaf.shape) == 2)
    return float(sum(8 * a * b * (a + b) + (a**3 + b**3) for a, b in shapes))


def _of(row: Candidate, like: PyTree, groups: Groups) -> tuple[float, float]:
    """Seconds to compress and to decompress on the machine of the table."""
    table, (slow, joined) = load_table(), groups.sizes
    values = _inputs.count(like)
    points = table["rows"][row.name]
    most = max(p.workers for p in points)
    line = [p for p in points if p.workers == most]
    compress = _at([(p.values, p.compress) for p in line], values // joined)
    decompress = _at([(p.values, p.decompress) for p in line], values // joined)
    exchange = row.recipe.exchange
    gathered = exchange.slow if isinstance(exchange, fg.Hierarchical) else exchange
    if isinstance(gathered, fg.AllGather):  # each worker decodes the payloads of all
        others = (slow - most) * _each_worker(points) * values / joined
        decompress = max(decompress * min(1.0, slow / most), decompress + others)
    if getattr(row.optimizer, "func", row.optimizer) in MUONS:
        rate = table["muon_flops_per_second"] / row.every
        decompress += orthogonalizing(like) / rate
    if isinstance(exchange, fg.Eigenbasis):
        decompress += turning(like) / table["muon_flops_per_second"]
    if joined > 1:
        decompress += PASSES * table["copy_seconds"] * values / COPY_VALUES
    return compress, decompress


def _each_worker(points: Sequence[Point]) -> float:
    """Seconds that decoding takes for each value and worker."""
    few, many = (p for p in points if [q.values for q in points].count(p.values) == 2)
    return max(0.0, many.decompress - few.decompress) / (many.workers - few.workers) / few.values


def _at(points: Sequence[tuple[int, float]], values: int) -> float:
    """Between two sizes by a power of it; beyond the largest in proportion."""
    sizes, seconds = zip(*points, strict=True)
    if values >= sizes[-1]:
        return seconds[-1] * values / sizes[-1]
    logs = np.log(np.maximum(seconds, TICK))
    return float(np.exp(np.interp(math.log(max(values, 1)), np.log(sizes), logs)))
