"""The exchanges that a plan compares, with the loss that each reached in measured runs."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import optax

import fftgrad as fg
from fftgrad._contracts import AxisName, PyTree
from fftgrad._values import check, check_choice, check_count, check_kind, check_within, plain, value
from fftgrad.exchanges._bucketing import BUCKET_LIMIT
from fftgrad.exchanges._recipe import recipe_of

Loss = Literal["as dense", "close", "check", "not measured"]
"""Class of the final loss in runs of small models; docs/plan.md has the bounds."""
STEPS: dict[Loss, float] = {
    "as dense": 1.0,
    "close": 1.2,  # 1.03 ** (1 / 0.18)
    "check": 1.5,  # 1.08 ** (1 / 0.18)
    "not measured": 2.0,
}
"""Steps to dense's loss, divided by dense's steps, for the highest loss of a class.

The loss of a language model fell as steps^-0.18 between 200 and 2,000 steps."""
LATE = functools.partial(fg.optimizers.feedback_adam, lead=1.0)
"""The optimizer of rows that were not tested on a held-out task."""
LED = functools.partial(fg.optimizers.feedback_adam, lead=0.3)
MUON = functools.partial(fg.optimizers.feedback_muon, lead=0.3)
LOCAL_MUON = functools.partial(optax.contrib.muon, consistent_rms=0.2, adam_b2=0.99)
NAME = re.compile(r"(?<![\w.'])(([A-Z]\w*|chain)\()")


@value
class Candidate:
    """Value: a way to exchange gradients, which `fg.planning.plan` compares with others.

    Args:
      name: name of the row and of its timing.
      method: recipe, such as `fg.methods.top_k(0.01)`, or an exchange alone.
      every: steps between two exchanges. If more than 1, each worker takes local steps, as with
        `fg.optimizers.diloco`.
      dense: True for a dense row, with which the other rows are compared.
      optimizer: complete optimizer that replaces the user's, such as `fg.optimizers.feedback_adam`;
        with local steps, the inner optimizer, such as `optax.contrib.muon`.
      loss: class of the final loss.
      steps: steps to dense's loss, divided by dense's steps. The default follows from `loss`: 1 for
        "as dense", 1.2 for "close", 1.5 for "check", 2 for "not measured".
      ratio: highest ratio at which the loss was measured, if the ratio of the exchange depends on
        the model. If a plan's ratio is more than twice as high, its class is "check".

    Example:
      >>> fg.planning.Candidate("QSGD", fg.methods.qsgd(bits=4)).code("data")
      "fg.compressed_pmean(fg.AllGather(codec=fg.UniformQuantizer()), axis_name='data')"
    """

    name: str
    method: fg.Recipe | fg.exchanges.Exchange
    _: dataclasses.KW_ONLY
    every: int = 1
    dense: bool = False
    optimizer: Callable[..., Any] | None = None
    loss: Loss = "not measured"
    steps: float | None = None
    ratio: float | None = None

    def __post_init__(self) -> None:
        own = self.recipe
        check_count("Candidate(every)", self.every, "use 4.")
        check_choice("Candidate(loss)", self.loss, get_args(Loss))
        remedy = "use 1.2 for a fifth more than dense's."
        check_within("Candidate(steps)", self.to_loss, "(0, inf)", remedy)
        fine, rule = self.every == 1 or own.bucketing == fg.Bucketing(), "have no bucketing"
        remedy = "leave it to the exchange, because local steps have one bucket."
        check(fine, "Candidate(method)", rule, repr(own.bucketing), remedy)

    @property
    def to_loss(self) -> float:
        """Steps to dense's loss, divided by dense's steps."""
        return (1.0 if self.dense else STEPS[self.loss]) if self.steps is None else self.steps

    @property
    def recipe(self) -> fg.Recipe:
        """The recipe of `method`."""
        return recipe_of("Candidate", self.method)

    def transformation(self, axis_name: AxisName) -> optax.GradientTransformationExtraArgs:
        """Make the optax transformation that exchanges; with local steps, a `diloco`.

        It includes `optimizer`, whose time is part of the codec time. The learning rate is not
        zero, because local steps would then send only zeros.
        """
        own, whole = self.recipe, self.optimizer
        if self.every > 1:
            inner = whole(1.0) if whole else optax.identity()
            return fg.optimizers.diloco(inner, optax.sgd(1.0), self.every, own, axis_name=axis_name)
        if whole is None:
            return fg.compressed_pmean(own, axis_name=axis_name)
        parts = {"exchange": own.exchange, "memory": own.memory, "bucketing": own.bucketing}
        return whole(1.0, axis_name=axis_name, **parts)

    def code(self, axis_name: AxisName) -> str:
        """Write the Python expression, with the user's `optimizer` or `learning_rate`."""
        own, whole = self.recipe, self.optimizer
        made = getattr(whole, "func", whole)
        options = [f"{k}={plain(option)!r}" for k, option in getattr(whole, "keywords", {}).items()]
        exchange, memory = repr(own.exchange), repr(own.memory)
        bucketing = [] if own.bucketing == fg.Bucketing() else [f"bucketing={own.bucketing!r}"]
        if self.every > 1:
            inner = ", ".join(["learning_rate", *options])
            inner = f"optax.contrib.{made.__name__}({inner})" if made else "optimizer"
            function = "fg.optimizers.diloco"
            parts = [inner, "optax.sgd(1.0)", str(self.every), exchange, memory]
        elif made:
            function, options = f"fg.optimizers.{made.__name__}", [*options, *bucketing]
            parts = ["learning_rate", f"exchange={exchange}", f"memory={memory}", *options]
        else:
            function = "fg.compressed_pmean"
            parts = [exchange, *([] if own.memory == fg.NoMemory() else [memory]), *bucketing]
        inside = NAME.sub(lambda found: f"fg.{_room(found[2])}{found[1]}", ", ".join(parts))
        return f"{function}({inside}, axis_name={axis_name!r})"


def _room(name: str) -> str:
    """Return the module of a class within `fg`, with a dot."""
    return "" if name in fg.__all__ else "codecs." if hasattr(fg.codecs, name) else "exchanges."


def check_rows(rows: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Check that rows are candidates with different names, and that one is dense."""
    remedy = "use fg.planning.Candidate('mine', fg.AllGather(codec))."
    for row in rows:
        check_kind("plan(rows)", row, Candidate, remedy)
    names = [row.name for row in rows]
    check(len({*names}) == len(names), "plan(rows)", "have a name each", names, "rename one.")
    fine, remedy = any(row.dense for row in rows), "add one with dense=True."
    check(fine, "plan(rows)", "have a dense row to compare with", names, remedy)
    return tuple(rows)


def candidates(like: PyTree, workers: int, fast: int = 1) -> tuple[Candidate, ...]:
    """Function: list the default rows of a plan: dense, compressed, and with local steps.

    To compare your own row with the default rows, pass
    `rows=[*fg.planning.candidates(params, 8), mine]` to `fg.planning.plan`.

    Args:
      like: the gradient, or its shapes. Low-rank rows need matrices, and `fast=1`.
      workers: number of workers along the slow axis.
      fast: number of workers in a group with fast links, the axis "fast".

    Returns:
      The rows, of which the first is dense float32.

    Example:
      >>> fg.planning.candidates(jax.ShapeDtypeStruct((1000,), "float32"), workers=8)[0].name
      'dense float32'
    """
    top_k, dct = fg.methods.top_k, fg.Dct(64)
    feedback, decayed = fg.ErrorFeedback(), fg.ErrorFeedback(decay=0.95)
    halves = fg.TwoStage(fg.Cast("bfloat16"), workers)
    signs = fg.Recipe(fg.TwoStage(fg.Sign(), workers), decayed)
    two_bits = fg.TwoStage(fg.codecs.LloydMax(bits=2, block=256), workers)
    filled = fg.Recipe(fg.TwoStage(fg.Budget(ratio=25), workers), feedback)
    four_bits = fg.TwoStage(fg.chain(fg.TopK(0.04), fg.LogQuantizer(bits=4)), workers)
    picked = fg.Recipe(four_bits, decayed)
    tried = functools.partial(Candidate, loss="check")
    rows = [
        Candidate("dense float32", fg.AllReduce(), dense=True, loss="as dense"),
        Candidate("dense bfloat16", halves, dense=True, loss="as dense"),
        tried("QSGD 4 bits", fg.methods.qsgd(bits=4)),
        tried("EDEN 1 bit (DRIVE)", fg.methods.eden()),
        tried("TernGrad, shared scale", fg.methods.terngrad(workers=workers)),
        tried("random-k 10 %", fg.methods.random_k(0.1), optimizer=LATE),
        tried(
            "shared top-k 4 %",
            fg.Recipe(fg.exchanges.LeaderTopK(fg.TopK(0.04)), decayed),
            optimizer=LATE,
        ),
        tried("top-k 4 %, 4 bits", top_k(0.04, 4, memory=decayed), optimizer=LATE),
        tried("two stages, top-k 4 %, 4 bits", picked, optimizer=LATE),
        tried("DCT 64, 4 %, 4 bits", top_k(0.04, 4, transform=dct, memory=decayed), optimizer=LATE),
        Candidate("two stages 25x, Muon", filled, optimizer=MUON, loss="close"),
        tried("signs, two stages", signs, optimizer=LATE, steps=1.4),
        tried("2 bits, two stages", fg.Recipe(two_bits, fg.ErrorFeedback(decay=0.9)), steps=1.13),
        tried("4 local steps, signs", signs, every=4, steps=1.2),
    ]
    # Larger matrices are split into pieces, and low-rank exchanges do not compress the pieces.
    shapes = [leaf.shape for leaf in jax.tree.leaves(like) if len(leaf.shape) >= 2]
    matrices = any(math.prod(shape) <= BUCKET_LIMIT for shape in shapes)
    sides = {side for shape in shapes for side in (math.prod(shape[:-1]), shape[-1])}
    if matrices:
        local: Any = {"every": 4, "optimizer": LOCAL_MUON}
        own = fg.Recipe(fg.AllGather(fg.Budget(ratio=25)), feedback)
        both = fg.Recipe(fg.TwoStage(fg.Budget(ratio=12.5), workers), feedback)
        rows += [Candidate("4 local steps of Muon, 25x", own, **local, loss="close")]
        rows += [tried("4 local steps, two stages, Muon", both, **local)]
    if matrices and fast == 1:
        power_sgd = fg.methods.power_sgd(4)
        turned = fg.Eigenbasis(fg.TwoStage(fg.Budget(ratio=50), workers))
        if any(1 < side <= turned.largest for side in sides):  # longer sides are not rotated
            own = fg.Recipe(turned, feedback)
            rows.append(Candidate("eigenbasis 50x, Muon", own, optimizer=MUON, loss="as dense"))
        rows += [
            Candidate("PowerSGD 4, Muon", power_sgd, optimizer=MUON, loss="close", ratio=19.0),
            tried("PowerSGD rank 4", power_sgd, optimizer=LED),
            tried("ACP-SGD rank 4", fg.methods.acp_sgd(4), optimizer=LATE),
        ]
    if fast == 1:
        return tuple(rows)
    over = functools.partial(fg.Hierarchical, "fast", fast)  # no compression within a group
    return tuple(
        dataclasses.replace(row, method=over(slow=row.recipe.exchange, memory=row.recipe.memory))
        for row in rows
        if row.recipe.bucketing == fg.Bucketing()
    )
