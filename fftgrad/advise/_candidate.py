"""A way to exchange gradients, and those that a plan compares unless it is given others."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import get_args

import jax
import optax

import fftgrad
from fftgrad import codecs
from fftgrad._contracts import AxisName, Codec, Exchange, Memory, PyTree
from fftgrad._values import check_choice, check_kind, constructor_call
from fftgrad.advise._convergence import LONGER, SEEN, Loss
from fftgrad.advise._inputs import FAST, check_count
from fftgrad.codecs._chain import chain
from fftgrad.codecs.quantizers import Cast, LloydMax, LogLevels, Sign, UniformLevels
from fftgrad.codecs.selectors import Budget, RandomK, TopK
from fftgrad.codecs.transforms import Dct, Hadamard, Identity
from fftgrad.exchanges import (
    AcpSgd,
    AllGather,
    AllReduce,
    Hierarchical,
    IntegerSum,
    PowerSgd,
    SharedSupport,
    TwoStage,
)
from fftgrad.exchanges._layout import Layout
from fftgrad.exchanges._policy import Policy, Rule
from fftgrad.memories import ErrorFeedback, NoMemory
from fftgrad.optimizers import diloco
from fftgrad.tools._wire_bytes import wire_bytes
from fftgrad.training import compressed_pmean

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
    exchange: Exchange
    memory: Memory = NoMemory()
    every: int = 1
    dense: bool = False
    momentum: bool = True
    loss: Loss = "not measured"
    steps: float = 1.0
    layout: Layout = Layout()

    __repr__ = constructor_call

    def __post_init__(self) -> None:
        check_kind("Candidate(exchange)", self.exchange, Exchange, "use AllGather(codec).")
        check_kind("Candidate(memory)", self.memory, Memory, "use ErrorFeedback().")
        check_count("Candidate(every)", self.every, "use 4.")
        check_choice("Candidate(loss)", self.loss, get_args(Loss))
        if not 0 < self.steps < math.inf:
            raise ValueError(
                f"Candidate(steps): must be positive and finite, got {self.steps}; use 1.2 for a "
                "fifth more than dense's."
            )
        if self.every > 1 and self.layout != Layout():
            raise ValueError(
                f"Candidate(layout): must be left out with local steps, which have none, got "
                f"{self.layout!r}; leave it to the exchange."
            )

    def transformation(self, axis_name: AxisName) -> optax.GradientTransformationExtraArgs:
        """What exchanges the gradients; with local steps, around an optimizer that does nothing."""
        if self.every == 1:
            return compressed_pmean(
                self.exchange, self.memory, axis_name=axis_name, layout=self.layout
            )
        return diloco(
            optax.identity(), optax.sgd(1.0), self.every, self.exchange, self.memory,
            axis_name=axis_name,
        )  # fmt: skip

    def code(self, axis_name: AxisName) -> str:
        """The expression that makes it, where `fg` is fftgrad and `optimizer` the user's own."""
        parts = [repr(self.exchange), repr(self.memory)]
        if self.every > 1:
            head = ["optimizer", "optax.sgd(1.0)", repr(self.every)]
            return _call("fg.optimizers.diloco", [*head, *parts], axis_name)
        if self.memory == NoMemory():
            parts.pop()
        if self.layout != Layout():
            parts.append(f"layout={self.layout!r}")
        return _call("fg.compressed_pmean", parts, axis_name)


def _call(function: str, parts: list[str], axis_name: AxisName) -> str:
    inside = NAME.sub(lambda found: f"fg.{_room(found[2])}{found[1]}", ", ".join(parts))
    return f"{function}({inside}, axis_name={axis_name!r})"


def _room(name: str) -> str:
    """Where a part is that has no name on top."""
    return "" if name in fftgrad.__all__ else "codecs." if hasattr(codecs, name) else "exchanges."


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
    """Function: what a plan compares: dense, every family that fits, and local steps.

    Args:
      like: the gradient, or its shapes; low ranks are for those that have matrices, which the
        pieces that fast links leave are not.
      workers: how many there are along the slow axis.
      fast: how many are joined by fast links, at each of them.
      fast_axis: the name of their axis.
    """
    feedback, decayed = ErrorFeedback(), ErrorFeedback(decay=0.95)
    few, four = LogLevels(bits=3), LogLevels(bits=4)
    signs = TwoStage(Sign(), workers)
    two_bits = TwoStage(LloydMax(bits=2, block=256), workers)
    rows = [
        _seen("dense", AllReduce(), dense=True, name="dense float32"),
        _seen(
            "bfloat16",
            TwoStage(Cast("bfloat16"), workers, NoMemory()),
            dense=True,
            name="dense bfloat16",
        ),
        _seen("QSGD 4 bits", AllGather(UniformLevels(bits=4))),
        _seen("EDEN 1 bit (DRIVE)", AllGather(chain(Hadamard(), LloydMax(bits=1)))),
        _seen("TernGrad, shared scale", IntegerSum(workers), layout=Layout("leaf")),
        _seen("random-k 10 % + EF", AllReduce(RandomK(0.1)), feedback),
        _seen("shared top-k 4 %", SharedSupport(TopK(0.04)), decayed),
        _seen("top-k 4 %, 4 bits", AllGather(chain(TopK(0.04), four)), decayed),
        _seen("top-k 1 %, 3 bits", AllGather(chain(TopK(0.01), few)), decayed),
        Candidate(
            "top-k 0.1 %, 4 bits", AllGather(chain(TopK(0.001), four)), decayed, momentum=False
        ),
        _seen("two stages, top-k 4 %, 4 bits", TwoStage(chain(TopK(0.04), four), workers), decayed),
        _seen("DCT 64, 4 %, 4 bits", AllGather(chain(Dct(64), TopK(0.04), four)), decayed),
        _seen(
            "DCT 64, budget 100x, no decay", AllGather(chain(Dct(64), Budget(ratio=100))), feedback
        ),
        _seen("budget 300x", AllGather(Budget(ratio=300)), decayed),
        _longer("sign", signs, decayed, name="signs, two stages"),
        _longer("lloyd-max", two_bits, ErrorFeedback(decay=0.9), name="2 bits, two stages"),
        _longer("local-4", signs, decayed, every=4, name="4 local steps, signs"),
        _longer("local-8", signs, decayed, every=8, name="8 local steps, signs"),
    ]
    if _has_matrices(like) and fast == 1:
        rows.append(_seen("PowerSGD rank 4, no momentum", PowerSgd(4), feedback))
        rows.append(_seen("ACP-SGD rank 4, no momentum", AcpSgd(4), feedback))
    rows = [
        dataclasses.replace(row, exchange=_with_small_dense(row.exchange, like))
        if row.every == 1 and not row.dense
        else row
        for row in rows
    ]
    if fast > 1:
        rows = [_over_fast(row, fast, fast_axis) for row in rows if row.layout == Layout()]
    return tuple(rows)


def _with_small_dense(exchange: Exchange, like: PyTree) -> Exchange:
    """The same with the smallest leaves dense, which a twentieth of its bytes has room for."""
    if not isinstance(exchange, AllGather | TwoStage) or not isinstance(exchange.codec, Codec):
        return exchange
    room = wire_bytes(exchange, like) / 20 / 4
    sizes = sorted(math.prod(leaf.shape) for leaf in jax.tree.leaves(like))
    most = max((n for n in sizes if sum(m for m in sizes if m <= n) <= room), default=0)
    if not most or most == sizes[-1]:
        return exchange
    policy = Policy(Rule(Identity(), max_size=most), default=exchange.codec)
    return dataclasses.replace(exchange, codec=policy)


def _seen(
    method: str,
    exchange: Exchange,
    memory: Memory = NoMemory(),
    *,
    name: str = "",
    dense: bool = False,
    layout: Layout = Layout(),
) -> Candidate:
    momentum, loss = memory == NoMemory(), SEEN[method].kind
    return Candidate(
        name or method.split(" + ")[0].removesuffix(", no momentum"),
        exchange, memory, dense=dense, momentum=momentum, loss=loss, layout=layout,
    )  # fmt: skip


def _longer(
    method: str, exchange: Exchange, memory: Memory, *, name: str, every: int = 1
) -> Candidate:
    momentum, seen = every > 1 or method == "lloyd-max", LONGER[method]
    return Candidate(
        name, exchange, memory, every, momentum=momentum, loss=seen.kind, steps=seen.steps
    )


def _has_matrices(like: PyTree) -> bool:
    return any(len(leaf.shape) >= 2 for leaf in jax.tree.leaves(like))


def _over_fast(row: Candidate, fast: int, fast_axis: str) -> Candidate:
    """The same between groups of workers, each of which averages exactly first."""
    exchange = Hierarchical(fast_axis, fast, slow=row.exchange, memory=row.memory)
    return dataclasses.replace(row, exchange=exchange, memory=NoMemory())
