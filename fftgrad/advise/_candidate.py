"""A way to exchange gradients, and those that a plan compares unless it is given others."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import get_args

import jax
import optax

import fftgrad as fg
from fftgrad._contracts import AxisName, PyTree
from fftgrad._values import check_choice, check_kind, constructor_call
from fftgrad.advise._convergence import SEEN, Loss
from fftgrad.advise._inputs import FAST, check_count

NAME = re.compile(r"(?<![\w.'])(([A-Z]\w*|chain)\()")


@dataclasses.dataclass(frozen=True, repr=False)
class Candidate:
    """Value: a way to exchange gradients, which `fg.advise.plan` compares with others.

    Args:
      name: by which rows and timings are known.
      exchange: how payloads travel and are averaged.
      memory: what is done with what a step does not send.
      every: H, the steps between two exchanges; with more than one each worker trains on its own
        meanwhile, as by `fg.optimizers.diloco`.
      dense: whether it is one of those with which the others are compared.
      momentum: whether the optimizer keeps its momentum; error feedback is one already.
      loss: what to expect of the loss.
      steps: how many times dense's steps it takes to dense's loss: a plan's order counts them.
      layout: as for `compressed_pmean`; local steps have none.

    Raises:
      TypeError: if a part is none.
      ValueError: if `every` or `steps` is not positive, if `loss` is none of the classes, or if
        local steps have a layout.

    Example:
      >>> import fftgrad as fg
      >>> fg.advise.Candidate("signs", fg.AllGather(fg.Sign()), fg.ErrorFeedback()).code("data")
      "fg.compressed_pmean(fg.AllGather(codec=fg.Sign()), fg.ErrorFeedback(), axis_name='data')"
    """

    name: str
    exchange: fg.Exchange
    memory: fg.Memory = fg.NoMemory()
    every: int = 1
    dense: bool = False
    momentum: bool = True
    loss: Loss = "not measured"
    steps: float = 1.0
    layout: fg.Layout = fg.Layout()

    __repr__ = constructor_call

    def __post_init__(self) -> None:
        check_kind("Candidate(exchange)", self.exchange, fg.Exchange, "use AllGather(codec).")
        check_kind("Candidate(memory)", self.memory, fg.Memory, "use ErrorFeedback().")
        check_count("Candidate(every)", self.every, "use 4.")
        check_choice("Candidate(loss)", self.loss, get_args(Loss))
        if not 0 < self.steps < math.inf:
            raise ValueError(
                f"Candidate(steps): must be positive and finite, got {self.steps}; use 1.2 for a "
                "fifth more than dense's."
            )
        if self.every > 1 and self.layout != fg.Layout():
            raise ValueError(
                f"Candidate(layout): must be left out with local steps, which have none, got "
                f"{self.layout!r}; leave it to the exchange."
            )

    def transformation(self, axis_name: AxisName) -> optax.GradientTransformationExtraArgs:
        """What exchanges the gradients; with local steps, around an optimizer that does nothing."""
        if self.every == 1:
            return fg.compressed_pmean(
                self.exchange, self.memory, axis_name=axis_name, layout=self.layout
            )
        return fg.optimizers.diloco(
            optax.identity(), optax.sgd(1.0), self.every, self.exchange, self.memory,
            axis_name=axis_name,
        )  # fmt: skip

    def code(self, axis_name: AxisName) -> str:
        """The expression that makes it, where `fg` is fftgrad and `optimizer` the user's own."""
        parts = [repr(self.exchange), repr(self.memory)]
        if self.every > 1:
            head = ["optimizer", "optax.sgd(1.0)", repr(self.every)]
            return _call("fg.optimizers.diloco", [*head, *parts], axis_name)
        if self.memory == fg.NoMemory():
            parts.pop()
        if self.layout != fg.Layout():
            parts.append(f"layout={self.layout!r}")
        return _call("fg.compressed_pmean", parts, axis_name)


def _call(function: str, parts: list[str], axis_name: AxisName) -> str:
    inside = NAME.sub(lambda found: f"fg.{_room(found[2])}{found[1]}", ", ".join(parts))
    return f"{function}({inside}, axis_name={axis_name!r})"


def _room(name: str) -> str:
    """Where a part is that has no name on top."""
    return "" if name in fg.__all__ else "codecs." if hasattr(fg.codecs, name) else "exchanges."


def check_rows(owner: str, rows: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The rows; refuses what are no candidates, and two of one name."""
    for row in rows:
        remedy = "use fg.advise.Candidate('mine', fg.AllGather(codec))."
        check_kind(f"{owner}(rows)", row, Candidate, remedy)
    names = [row.name for row in rows]
    if len(set(names)) < len(names):
        raise ValueError(f"{owner}(rows): must have a name each, got {names}; rename one.")
    return tuple(rows)


def candidates(
    like: PyTree, workers: int, fast: int = 1, fast_axis: str = FAST
) -> tuple[Candidate, ...]:
    """What a plan compares: dense, every family that fits, and local steps.

    Args:
      like: the gradient, or its shapes; low ranks are for those that have matrices, which the
        pieces that fast links leave are not.
      workers: how many there are along the slow axis.
      fast: how many are joined by fast links, at each of them.
      fast_axis: the name of their axis.
    """
    none, feedback, decayed = fg.NoMemory(), fg.ErrorFeedback(), fg.ErrorFeedback(decay=0.95)
    few, four = fg.LogLevels(bits=3), fg.LogLevels(bits=4)
    signs = fg.TwoStage(fg.Sign(), workers)
    halves = fg.TwoStage(fg.Cast("bfloat16"), workers, none)
    two_bits = fg.TwoStage(fg.codecs.LloydMax(bits=2, block=256), workers)
    eden = fg.chain(fg.Hadamard(), fg.codecs.LloydMax(bits=1))
    top, dct = fg.chain(fg.TopK(0.04), four), fg.Dct(64)
    by_leaf, gather = fg.Layout("leaf"), fg.AllGather
    rows = [
        _row("dense float32", fg.AllReduce(), none, dense=True),
        _row("dense bfloat16", halves, none, dense=True),
        _row("QSGD 4 bits", gather(fg.UniformLevels(bits=4)), none),
        _row("EDEN 1 bit (DRIVE)", gather(eden), none),
        _row("TernGrad, shared scale", fg.IntegerSum(workers), none, layout=by_leaf),
        _row("random-k 10 %", fg.AllReduce(fg.RandomK(0.1)), feedback),
        _row("shared top-k 4 %", fg.SharedSupport(fg.TopK(0.04)), decayed),
        _row("top-k 4 %, 4 bits", gather(top), decayed),
        _row("top-k 1 %, 3 bits", gather(fg.chain(fg.TopK(0.01), few)), decayed),
        _row("top-k 0.1 %, 4 bits", gather(fg.chain(fg.TopK(0.001), four)), decayed),
        _row("two stages, top-k 4 %, 4 bits", fg.TwoStage(top, workers), decayed),
        _row("DCT 64, 4 %, 4 bits", gather(fg.chain(dct, top)), decayed),
        _row(
            "DCT 64, budget 100x, no decay", gather(fg.chain(dct, fg.Budget(ratio=100))), feedback
        ),
        _row("budget 300x", gather(fg.Budget(ratio=300)), decayed),
        _row("signs, two stages", signs, decayed),
        _row("2 bits, two stages", two_bits, fg.ErrorFeedback(decay=0.9), momentum=True),
        _row("4 local steps, signs", signs, decayed, every=4, momentum=True),
        _row("8 local steps, signs", signs, decayed, every=8, momentum=True),
    ]
    if fast == 1 and any(len(leaf.shape) >= 2 for leaf in jax.tree.leaves(like)):
        rows.append(_row("PowerSGD rank 4", fg.PowerSgd(4), feedback))
        rows.append(_row("ACP-SGD rank 4", fg.AcpSgd(4), feedback))
    rows = [row if row.dense or row.every > 1 else _with_small_dense(row, like) for row in rows]
    if fast > 1:
        rows = [_over_fast(row, fast, fast_axis) for row in rows if row.layout == fg.Layout()]
    return tuple(rows)


def _row(
    name: str,
    exchange: fg.Exchange,
    memory: fg.Memory,
    *,
    every: int = 1,
    dense: bool = False,
    momentum: bool = False,
    layout: fg.Layout = fg.Layout(),
) -> Candidate:
    """With what was seen of it; without a memory it keeps its momentum."""
    seen = SEEN.get(name)
    return Candidate(
        name, exchange, memory, every, dense, momentum or memory == fg.NoMemory(),
        seen.kind if seen else "not measured", seen.steps if seen else 1.0, layout,
    )  # fmt: skip


def _with_small_dense(row: Candidate, like: PyTree) -> Candidate:
    """The same with the smallest leaves dense, which a twentieth of its bytes has room for."""
    exchange = row.exchange
    if not isinstance(exchange, fg.AllGather | fg.TwoStage):
        return row
    if not isinstance(exchange.codec, fg.Codec):
        return row
    room = fg.wire_bytes(exchange, like) / 20 / 4
    sizes = sorted(math.prod(leaf.shape) for leaf in jax.tree.leaves(like))
    most = max((n for n in sizes if sum(m for m in sizes if m <= n) <= room), default=0)
    if not most or most == sizes[-1]:
        return row
    policy = fg.Policy(fg.Rule(fg.Identity(), max_size=most), default=exchange.codec)
    return dataclasses.replace(row, exchange=dataclasses.replace(exchange, codec=policy))


def _over_fast(row: Candidate, fast: int, fast_axis: str) -> Candidate:
    """The same between groups of workers, each of which averages exactly first."""
    exchange = fg.Hierarchical(fast_axis, fast, slow=row.exchange, memory=row.memory)
    return dataclasses.replace(row, exchange=exchange, memory=fg.NoMemory())
