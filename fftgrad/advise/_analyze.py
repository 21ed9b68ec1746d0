"""What gradients look like, and which codec that speaks for; and results as JSON has them."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np

import fftgrad as fg
from fftgrad._contracts import PyTree
from fftgrad.advise import _advice, _figures, _rates, _sample
from fftgrad.advise._bases import BASES
from fftgrad.advise._figures import Figures, StepPair
from fftgrad.advise._rates import Rate
from fftgrad.advise._search_codec import TRANSFORMS

RATIOS = (100, 30, 7.5)
"""Of hundreds: sparse codecs alone; of one bit and of four a value: dense ones, too."""


class Analysis(NamedTuple):
    """What `fg.advise.analyze` found. `print` shows the recommendation.

    Attributes:
      steps: the numbers of the steps.
      workers: the numbers of the workers.
      values: how many values one gradient has.
      sampled: how many of them were looked at, in each step and worker: all, or blocks of 4096.
      seed: by which the blocks were drawn.
      unseen: leaves of 4096 values or more of which no block was drawn.
      whole: the figures of the whole gradient, all leaves as one vector.
      leaves: those of each leaf of 4096 values or more, and of all smaller ones, as one.
      between_steps: what the gradients of one step and of the next one captured have in common.
      rates: what codecs make of it, from the smallest size to the largest, the best of each first.
      recommendation: what follows, each sentence with the figures that it rests on.
    """

    steps: tuple[int, ...]
    workers: tuple[int, ...]
    values: int
    sampled: int
    seed: int
    unseen: tuple[str, ...]
    whole: Figures
    leaves: tuple[Figures, ...]
    between_steps: tuple[StepPair, ...]
    rates: tuple[Rate, ...]
    recommendation: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.recommendation)

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON has it: dicts, lists and numbers; a codec as its `repr`."""
        return plain(self)

    def most_energy(self, count: int) -> list[Figures]:
        """So many leaves, those of the most energy; none where the gradient is one leaf."""
        leaves = sorted(self.leaves, key=lambda leaf: -leaf.energy)
        return leaves[:count] if len(leaves) > 1 else []


def analyze(
    gradients: PyTree,
    *,
    max_values: int = 1 << 22,
    ratios: Sequence[float] = RATIOS,
    tell: Callable[[str], object] = lambda _: None,
) -> Analysis:
    """Function: what gradients look like, and which basis, codec and exchange that speaks for.

    Before a codec is chosen, it tells whether there is anything to choose: how few coefficients
    hold the energy, in which basis; whether neighbors are alike; whether workers agree on what is
    large; and what candidates of `fg.advise.search_codec` lose at some sizes, beside an ideal
    entropy coder. docs/api/advise.md says how to read each figure.

    If there are more than `max_values` values, over all steps and workers, it looks at whole blocks
    of 4096 of a leaf, one drawn from each of so many equal stretches of the gradient, at the same
    positions in all of them. The draw is fixed: the same gradients give the same analysis.

    The codecs are measured on all leaves as one vector, and their `bound` is that of uniform steps
    with a dead zone, with as many bits as the entropy of the levels: it knows nothing of places, so
    that a codec may be below it where large values cluster. Each size compiles four to ten
    programs; three sizes take most of a minute on a CPU, and the rest takes seconds.

    Args:
      gradients: what `fg.advise.load_gradients` returned, a `GradientLog`, or a tree of arrays, as
        of one step and worker; of floating-point numbers of any dtype, looked at in float32.
      max_values: how many values to look at, at least 4096.
      ratios: the sizes at which to measure codecs: how many times fewer bytes than float32; none
        for no codecs.
      tell: hears what is measured, before it is, such as `print`.

    Returns:
      An `Analysis`.

    Example:
      >>> import numpy as np
      >>> wave = np.sin(np.arange(8192, dtype=np.float32) / 9)
      >>> found = fg.advise.analyze({"w": wave}, ratios=())
      >>> found.whole.best, found.recommendation[0][:35]
      ('Fft whole', 'Transform by Fft(block=None) before')
    """
    sample = _sample.take(gradients, max_values)
    ratios = tuple(np.asarray(ratio).item() for ratio in ratios)
    if not all(ratio > 1 for ratio in ratios):
        raise ValueError(f"analyze(ratios): must be above 1, got {ratios}; use (100, 30, 7.5).")
    # Of the powers of two, so that no bit changes: squares neither overflow nor vanish.
    rows = np.ldexp(sample.rows, -np.frexp(np.max(np.abs(sample.rows)))[1])
    steps = np.asarray([step for step, _ in sample.of])
    energy = float(np.sum(np.square(rows, dtype=np.float64)))
    whole = _figures.of("all", sample.values, rows, steps, energy)
    leaves = [
        _figures.of(piece.name, piece.values, rows[:, piece.columns], steps, energy)
        for piece in sample.pieces
    ]
    pairs = _figures.between_steps(rows, sample.of)
    rates = _rates.measured(sample.rows, ratios, _compact(whole), tell)
    return Analysis(
        steps=tuple(sorted({step for step, _ in sample.of})),
        workers=tuple(sorted({worker for _, worker in sample.of})),
        values=sample.values,
        sampled=rows.shape[1],
        seed=_sample.SEED,
        unseen=sample.unseen,
        whole=whole,
        leaves=tuple(leaves),
        between_steps=pairs,
        rates=rates,
        recommendation=tuple(_advice.sentences(whole, leaves, pairs, rates)),
    )


def _compact(whole: Figures) -> fg.Codec:
    """Of the bases that `search_codec` tries, the one in which the largest 1 % hold most."""
    known = [basis for basis in BASES if basis.codec in TRANSFORMS]
    best = min(known, key=lambda basis: float(whole.dropped[basis.name][1]))
    return best.codec or fg.Identity()


def plain(value: Any) -> Any:
    """The same in dicts, lists and numbers; None for one that is not finite."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(k): plain(one) for k, one in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        value = np.asarray(value).tolist()
    if isinstance(value, list | tuple):
        return [plain(one) for one in cast("list[Any]", value)]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else repr(value)
