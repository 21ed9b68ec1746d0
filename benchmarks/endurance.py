"""Many steps of a small model: what has to hold for as long as a training runs.

One method of each family, with a fifth of the labels drawn anew in each step, so that the gradients
do not vanish. Now and then: whether all workers hold the same bits, how long the residuals and
their mean are, how far

    sum of what was applied + mean residual - sum of the mean gradients

is from zero, relative to the last sum and added up in float64, and how much memory and how many
arrays the process has.
"""

import ctypes
import gc
import os
import pathlib
from typing import Any, Literal, NamedTuple

import _style as style
import jax
import numpy as np
import optax
from _record import POINTS, markdown, save
from _style import label_ends, styles
from claims import gathered
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from methods import AXIS, Method, Setting, Transformation, fed_back, gradients_of, onlooker, watched
from program import Column, Point, Program, Study
from tasks import Batch

import fftgrad as fg

WORKERS, EVERY, RATE = 4, 10, 0.1
DGC = "DGC 5 %"


class Applied(NamedTuple):
    """The state of what looks on behind an exchange."""

    applied: Any


def descent(name: str, exchange: fg.Recipe, scale: float = 1.0) -> Method:
    """Plain descent behind an exchange; what it applies is kept in the state."""
    mean = fg.compressed_pmean(exchange, axis_name=AXIS)
    seen = optax.chain(mean, optax.scale(scale), onlooker(Applied))
    return watched(fed_back(name, seen, corrects=True))


def feedback(
    name: str, exchange: fg.Exchange | fg.Codec, scope: Literal["leaf"] | None = None, **kept: Any
) -> Method:
    """A method with feedback that forgets nothing."""
    exchange = fg.AllGather(exchange) if isinstance(exchange, fg.Codec) else exchange
    return descent(name, fg.Recipe(exchange, fg.ErrorFeedback(**kept), fg.Layout(scope)))


def local(_: Setting, inner: Transformation) -> Transformation:
    """Steps that each worker takes on its own."""
    memory, outer = fg.ErrorFeedback(), optax.sgd(1.0)
    return fg.optimizers.diloco(inner, outer, EVERY, memory=memory, axis_name=AXIS)


def whole(tree: Any) -> np.ndarray:
    """All leaves in one vector."""
    leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves)


class Endures(Column):
    """What has to hold, at some points of the run."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        size = sum(leaf.size for leaf in jax.tree.leaves(program.task.params(0)))
        self.wanted, self.applied = np.zeros((2, size))
        self.equal, self.points = True, list[dict[str, Any]]()

    def see(self, count: int, before: Point, after: Point) -> None:
        """Adds up, and looks where it is time."""
        given, applied = gathered(gradients_of(after.state)), np.zeros(0)
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
        gap = np.linalg.norm(self.applied + left - self.wanted) / (
            np.linalg.norm(self.wanted) or 1.0
        )
        return {
            "step": count,
            "residual": float(f"{float(found['residual']):.4g}"),
            "mean_residual": float(f"{np.linalg.norm(left):.4g}"),
            "telescoping": None if self.program.method.name == DGC else float(f"{gap:.3g}"),
            "resident_mb": round(resident_mb(), 1),
            "arrays": len(jax.live_arrays()),
        }

    def record(self, end: Point, batch: Batch) -> dict[str, Any]:
        """All points, by what they have."""
        skipped = int(fg.metrics(end.state)["skipped"])
        curves = {name: [point[name] for point in self.points] for name in self.points[0]}
        return {"replicas_equal": self.equal, "skipped": skipped, **curves}


def kept(state: Any) -> np.ndarray:
    """What is still to be applied: the mean residual, and that of the owners of shards."""
    found = jax.tree.leaves(
        state, is_leaf=lambda node: isinstance(node, fg.training.CompressedPmeanState)
    )
    (pmean,) = (node for node in found if isinstance(node, fg.training.CompressedPmeanState))
    total = gathered(residuals(pmean.memory)).mean(0)
    for owned in residuals(pmean.exchange):
        total += np.asarray(owned, np.float64).ravel()
    return total


def residuals(state: Any) -> list[jax.Array]:
    """The arrays in fields of that name."""
    field = jax.tree_util.GetAttrKey("residual")
    return [leaf for path, leaf in jax.tree.leaves_with_path(state) if field in path]


def same_bits(leaf: jax.Array) -> bool:
    """Whether all devices hold the same bits."""
    return len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1


def resident_mb() -> float:
    """Memory that the process has and uses, where the system tells."""
    status = pathlib.Path("/proc/self/statm")
    if not status.exists():
        return float("nan")
    gc.collect()
    # Or what threads have freed and keep would count, and grows until each had a large array.
    trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def show(results: dict[str, Any], folder: pathlib.Path, name: str) -> None:
    """Residual, telescoping error and memory over time: a table, and a line a method."""
    del name
    print(tables(results))
    save(draw(results), folder, "endurance")


def errors(run: dict[str, Any]) -> list[float]:
    """What is lost of the sums, where that is known."""
    return [gap for gap in run["telescoping"] if gap is not None]


def tables(results: dict[str, Any]) -> str:
    """Of each method whether replicas stayed equal, lengths of residuals, and what sums lost."""
    rows: list[list[str]] = []
    for run in results["runs"]:
        residual, gaps = run["residual"], errors(run)
        lengths = [residual[0], max(residual), residual[-1], max(run["mean_residual"])]
        equal = "yes" if run["replicas_equal"] else "no"
        ends = [f"{gap:.1e}" for gap in (gaps[0], gaps[-1])] if gaps else ["", ""]
        rows.append([run["method"], equal, *(f"{length:.3g}" for length in lengths), *ends])
    first, last = (results["runs"][0]["step"][i] for i in (0, -1))
    columns = [
        "method",
        "replicas equal",
        f"residual after {first:,}",
        "largest",
        f"after {last:,}",
    ]
    columns += ["largest of the mean", f"telescoping after {first:,}", f"after {last:,}"]
    return markdown(columns, rows)


def draw(results: dict[str, Any]) -> Figure:
    """Residual, telescoping error and memory over time, a line a method."""
    figure = style.figure(7.4)
    axes: Any = figure.subplots(3, 1, sharex=True)
    looks = styles(SHOWN)
    lines: list[dict[str, Line2D]] = [{}, {}, {}]
    for run in (run for run in results["runs"] if run["method"] in looks):
        memory = np.subtract(run["resident_mb"], run["resident_mb"][0])
        for i, curve in enumerate((run["residual"], errors(run), memory)):
            shown, own = run["step"][: len(curve)], looks[run["method"]]
            (lines[i][run["method"]],) = axes[i].plot(shown, curve, **own)
    axes[0].set(yscale="log", title="Norm of the residual")
    axes[1].set(yscale="log", title="Relative telescoping error")
    axes[2].set(title="Resident memory, MB above the first point", xlabel="steps")
    axes[2].xaxis.set_major_formatter("{x:,.0f}")
    for axis, own in zip(axes, lines, strict=True):
        label_ends(axis, own)
    return figure


SHOWN = (
    "top-k 5 %",
    "top-k 5 %, bfloat16 residual",
    "FFT 16, 10 %, 8 bits",
    "signs",
    "PowerSGD rank 2",
)
"""The curves of the figure; the table has all."""
TOP_K, BITS = fg.TopK(fraction=0.05), fg.RangeFloat(bits=8)
STUDY = Study(
    folder="endurance",
    file="endurance",
    rows=[
        feedback("top-k 5 %", TOP_K),
        feedback("top-k 5 %, bfloat16 residual", TOP_K, dtype="bfloat16"),
        feedback("FFT 16, 10 %, 8 bits", fg.chain(fg.Fft(16), fg.TopK(0.1), BITS)),
        feedback("signs", fg.Sign(), "leaf"),
        feedback("EDEN 2 bits", fg.chain(fg.Hadamard(), fg.codecs.LloydMax(bits=2))),
        feedback("PowerSGD rank 2", fg.PowerSgd(rank=2), "leaf"),
        feedback("two stages, top-k 5 %", fg.TwoStage(fg.chain(TOP_K, BITS), WORKERS)),
        feedback("shared top-k 5 %", fg.SharedSupport(TOP_K)),
        feedback("integer sum, 7 levels", fg.IntegerSum(WORKERS, levels=7)),
        feedback("budget 30x", fg.Budget(ratio=30)),
        descent(DGC, fg.methods.dgc(0.05), scale=0.1),
        watched(
            Method(
                "diloco, 10 local steps",
                around=local,
                momentum=False,
                corrects=True,
                every=EVERY,
                own=True,
            )
        ),
    ],
    show=show,
    tasks=("noisy digits",),
    steps=20_000,
    seeds=1,
    workers=WORKERS,
    column=Endures,
    smoke=("top-k 5 %", "two stages, top-k 5 %", "diloco, 10 local steps"),
    few=20,
)
