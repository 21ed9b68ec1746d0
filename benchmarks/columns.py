"""What a study of `convergence.py` asks of a run, beside its loss and its bytes."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _record import POINTS
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from methods import AXIS, METHODS, Method, Setting, Transformation, gradients_of, watched
from program import Column, Point, Program
from tasks import Batch, Params, Task

import fftgrad as fg


class Curve(Column):
    """Held-out losses by step, twenty times in a run."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.every = max(1, program.setting.steps // 20)
        self.losses: list[list[float]] = []

    def see(self, count: int, before: Point, after: Point) -> None:
        """Assesses the parameters now and then."""
        if count % self.every == 0:
            loss = self.program.task.assess(self.program.common(after))["loss"]
            self.losses.append([count, round(loss, 4)])

    def record(self, end: Point, batch: Batch) -> dict[str, Any]:
        """The curve."""
        return {"assessed": self.losses}


class Bytes(Column):
    """Over a worker's link, and of its state."""

    def record(self, end: Point, batch: Batch) -> dict[str, Any]:
        """Both, and how many times less than float32 crosses a link."""
        workers = self.program.mesh.size
        count = sum(p.size for p in jax.tree.leaves(end.params))
        sent = sum(c.link_bytes(workers) for c in fg.audit(self.program.compiled))
        own = [leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(end.state)]
        dense = 2 * 4 * count * (workers - 1) // workers
        return {"link_bytes": sent, "ratio": dense / sent, "state_bytes": sum(own)}


CHUNK = 50
"""Values for each one that ScaleCom sends."""


class Overlap(Column):
    """How many of the values that a worker of ScaleCom chooses are the largest of the mean."""

    def record(self, end: Point, batch: Batch) -> dict[str, Any]:
        """Of the vectors that the workers would choose from in the next step."""
        if not self.program.method.name.startswith("ScaleCom"):
            return {}
        next_one, _ = self.program.step(end, batch, 0.0)
        residuals = gathered(optax.tree.get(end.state, "residual"))
        return {"overlap": overlap(residuals + gathered(gradients_of(next_one.state)))}


def gathered(tree: Any) -> np.ndarray:
    """A row for each worker."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


def overlap(vectors: np.ndarray) -> float:
    """The share of the largest values of each vector that are the largest of the mean, too."""
    mean = vectors.mean(0)
    k = -(-mean.size // CHUNK)
    best, *chosen = (np.argpartition(np.abs(row), -k)[-k:] for row in (mean, *vectors))
    return float(np.mean([np.isin(own, best).mean() for own in chosen]))


EVERY, RATE, DGC = 10, 0.1, "DGC 5 %"
"""Of the study of endurance."""


class Endures(Column):
    """What has to hold for as long as a training runs, at some points of the run.

    Whether all workers hold the same bits, how long the residuals and their mean are, and how far

        sum of what was applied + mean residual - sum of the mean gradients

    is from zero, relative to the last sum and added up in float64.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        size = sum(leaf.size for leaf in jax.tree.leaves(program.task.params(0)))
        self.wanted, self.applied = np.zeros((2, size))
        self.equal, self.points = True, list[dict[str, Any]]()

    def see(self, count: int, before: Point, after: Point) -> None:
        """Adds up, and looks where it is time."""
        given = gathered(gradients_of(after.state))
        if self.program.method.own:
            anchor = whole(self.program.common(before))
            applied = anchor - whole(self.program.common(after))
            # As the workers compute it, or the rounding of a step would count as lost.
            own = np.float32(gathered(before.params)) - np.float32(RATE) * np.float32(given)
            given = (count % EVERY == 0) * (anchor - own)
        else:
            applied = whole(optax.tree.get(after.state, "applied"))
        self.wanted += given.mean(0)
        self.applied += applied
        steps = self.program.setting.steps
        if count % max(1, steps // (2 * POINTS)) == 0:
            shared = self.program.common(after)
            self.equal &= all(same_bits(leaf) for leaf in jax.tree.leaves(shared))
        if count % max(1, steps // POINTS) == 0:
            self.points.append(self.look(count, after.state))

    def look(self, count: int, state: Any) -> dict[str, Any]:
        """One point."""
        left, found = kept(state), fg.metrics(state)
        size = np.linalg.norm(self.wanted) or 1.0
        gap = np.linalg.norm(self.applied + left - self.wanted) / size
        return {
            "step": count,
            "residual": float(f"{float(found['residual']):.4g}"),
            "mean_residual": float(f"{np.linalg.norm(left):.4g}"),
            "telescoping": None if self.program.method.name == DGC else float(f"{gap:.3g}"),
        }

    def record(self, end: Point, batch: Batch) -> dict[str, Any]:
        """All points, by what they have."""
        curves = {name: [point[name] for point in self.points] for name in self.points[0]}
        return {"replicas_equal": self.equal, **curves}


def whole(tree: Any) -> np.ndarray:
    """All leaves in one vector."""
    leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves)


def kept(state: Any) -> np.ndarray:
    """What is still to be applied: the mean residual, and that of the owners of shards."""
    found = jax.tree.leaves(
        state, is_leaf=lambda node: isinstance(node, fg.training.CompressedPmeanState)
    )
    (pmean,) = (node for node in found if isinstance(node, fg.training.CompressedPmeanState))

    def residuals(tree: Any) -> list[jax.Array]:
        field = jax.tree_util.GetAttrKey("residual")
        return [leaf for path, leaf in jax.tree.leaves_with_path(tree) if field in path]

    total = gathered(residuals(pmean.memory)).mean(0)
    for owned in residuals(pmean.exchange):
        total += np.asarray(owned, np.float64).ravel()
    return total


def same_bits(leaf: jax.Array) -> bool:
    """Whether all devices hold the same bits."""
    return len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1


def errors(task: Task, rows: list[Method], mesh: Mesh) -> Iterator[tuple[str, float]]:
    """The relative error of the mean of one gradient, without memory, of each method.

    The gradient is that of a dense run after 50 steps; none for methods whose updates are no mean.
    """
    rows = [row for row in rows if row.exchange is not None and row.directs is None]
    if not rows:
        return
    program = Program(task, watched(METHODS[0]), 50, mesh)
    batches, at = task.batches(0, mesh.size), program.fresh(task.params(0))
    for batch in itertools.islice(batches, 51):
        at, _ = program.step(at, batch, task.rate / 2)
    own = gradients_of(at.state)
    exact = jax.tree.map(lambda g: g.mean(0), own)
    for row in rows:
        tx = row.mean(Setting(mesh.size, 50))

        def mean(rows: Params, tx: Transformation = tx) -> Params:
            own = jax.tree.map(lambda g: g[0], rows)
            return tx.update(own, tx.init(own))[0]

        mapped = jax.shard_map(mean, mesh=mesh, in_specs=P(AXIS), out_specs=P())
        difference = jax.tree.map(jnp.subtract, jax.jit(mapped)(own), exact)
        yield row.name, float(optax.tree.norm(difference) / optax.tree.norm(exact))
