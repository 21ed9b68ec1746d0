"""Adam and SGD behind error feedback, with settings that were measured together."""

import re
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from optax.contrib import MuonDimensionNumbers

from fftgrad import _axes
from fftgrad._contracts import AxisName, Exchange, Memory, PyTree
from fftgrad._values import check_choice, check_within
from fftgrad.codecs._budget import Budget
from fftgrad.exchanges import AllGather, Hierarchical, Recipe
from fftgrad.exchanges._bucketing import Bucketing
from fftgrad.memories import ErrorFeedback, NoMemory
from fftgrad.training._gradients import widened
from fftgrad.training._pmean import CompressedPmeanState, NonFinite, compressed_pmean

FILLED = AllGather(Budget(ratio=100))
WHOLE = "use 0.5, or 1.0 for the whole momentum."


class FeedbackState(NamedTuple):
    """State of `feedback_adam`, `feedback_muon` and `feedback_sgd`.

    Attributes:
      pmean: the state of the compressed mean, which counts bad steps in `skipped`.
      inner: the state of the optimizer behind it, equal on all workers.
    """

    pmean: CompressedPmeanState
    inner: optax.OptState


def feedback_adam(
    learning_rate: optax.ScalarOrSchedule,
    exchange: Exchange | Recipe = FILLED,
    memory: Memory | None = None,
    *,
    nu: float = 0.5,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Any = None,
    bucketing: Bucketing | None = None,
    non_finite: NonFinite = "skip",
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    """Optimizer: a compressed mean with error feedback, and an Adam that leads it.

    What feedback sends late comes on top of an average that is late already: behind a delay of one
    step, a momentum of 0.9 is stable up to a rate times curvature of 1.0, and without a delay up to
    38. So the new gradient g has a share of its own beside the average m of all:

        u = ((1 - nu) g + nu m) / (√v + eps).

    That is QHAdam. With nu = 1 it is Adam, with 0 it has no momentum; both end worse here. Only the
    residual differs between the workers.

    Args:
      learning_rate: of Adam, a number or an optax schedule.
      exchange: how gradients are compressed and averaged, or a method, such as
        `fg.methods.top_k(0.01)`.
      memory: what is done with what a step does not send; if left out, the recipe's, or
        `ErrorFeedback()`.
      nu: share of the average in the update: 0.7 for two stages, 0.5 for a gather of `Budget(100)`.
      b1: decay of the average.
      b2: decay of Adam's second moment.
      eps: added to its root.
      weight_decay: of `optax.adamw`, in units of the learning rate.
      mask: which leaves decay, as for `optax.adamw`; all if left out. Under
        `optax.inject_hyperparams` a function needs `static_args="mask"`. Otherwise optax calls it
        with the step number, as a schedule, and a mask by `ndim` lets nothing decay.
      bucketing: what the largest are counted over; see `Bucketing`.
      non_finite: what becomes of a step in which anything is not finite, on any worker: "skip"
        leaves the step out on all workers and counts it, "propagate" returns NaN for it. Adam's
        state stays as it was in both cases.
      axis_name: the axis of the workers.

    Returns:
      A whole optimizer, as `optax.adam` is.

    Wire: that of the exchange; at the default 0.32 bits a parameter, 100 times less than float32.

    Shapes: leaves float32, bfloat16 or float16 of any shape; the state is float32.

    Claims: parameters equal on all workers. A step in which anything is not finite changes neither
      parameters, residuals nor Adam's state, and `state.pmean.skipped` counts it. As in
      `optax.adam`, a finite gradient above 1e19, whose square is not finite, makes the root
      infinite for good.

    Raises:
      ValueError: if `nu` is outside [0, 1], or `b1` or `b2` outside [0, 1), or a number negative.

    Example:
      >>> tx = fg.optimizers.feedback_adam(learning_rate=3e-4, axis_name="data")

    References:
      Stich et al., NeurIPS 2018, arXiv:1809.07599. Ma and Yarats, ICLR 2019, arXiv:1810.06801
      (QHAdam).
    """
    for name, decay in (("b1", b1), ("b2", b2)):
        check_number(f"feedback_adam({name})", decay, "[0, 1)", "use 0.9 and 0.99.")
    check_number("feedback_adam(nu)", nu, "[0, 1]", WHOLE)
    adam = optax.scale_by_adam(b1=b1, b2=b2, eps=eps)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        state = adam.update(updates, state, params)[1]
        average = optax.tree.bias_correction(state.mu, b1, state.count)
        square = optax.tree.bias_correction(state.nu, b2, state.count)
        led = _led(nu, updates, average)
        return jax.tree.map(lambda u, v: u / (v**0.5 + eps), led, square), state

    return behind_feedback(
        "feedback_adam",
        (exchange, memory, bucketing, non_finite, axis_name),
        optax.GradientTransformation(adam.init, update),
        *descent("feedback_adam", learning_rate, weight_decay, mask),
    )


def feedback_sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.9,
    exchange: Exchange | Recipe = FILLED,
    memory: Memory | None = None,
    *,
    nu: float = 0.5,
    bucketing: Bucketing | None = None,
    non_finite: NonFinite = "skip",
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    """Optimizer: a compressed mean with error feedback, and an SGD whose momentum leads it.

    A momentum of m applies each gradient 1 / (1 - m) times, over time. So that tuned learning rates
    carry over, the update has that factor too: with m̄ the average of the gradients g, of decay m,

        u = ((1 - nu) g + nu m̄) / (1 - m).

    With nu = 1 it is SGD with momentum. Why the gradient has a share of its own: `feedback_adam`.

    Args:
      learning_rate: as for `optax.sgd(learning_rate, momentum)`, a number or an optax schedule.
      momentum: of the dense optimizer that this replaces.
      exchange: as for `feedback_adam`, and so are the other arguments.
      memory: what is done with what a step does not send.
      nu: share of the average in the update.
      bucketing: what the largest are counted over; see `Bucketing`.
      non_finite: as for `feedback_adam`.
      axis_name: the axis of the workers.

    Returns:
      A whole optimizer, as `optax.sgd` is.

    Wire: that of the exchange.

    Claims: parameters equal on all workers. After a step that is not finite, as `feedback_adam`.

    Raises:
      ValueError: if `momentum` is outside [0, 1), or `nu` outside [0, 1], or the rate negative.

    Example:
      >>> tx = fg.optimizers.feedback_sgd(learning_rate=0.05, momentum=0.9, axis_name="data")

    References:
      Stich et al., NeurIPS 2018, arXiv:1809.07599. Ma and Yarats, ICLR 2019, arXiv:1810.06801
      (QHM).
    """
    remedy = "use that of the dense optimizer, or 0.0."
    check_number("feedback_sgd(momentum)", momentum, "[0, 1)", remedy)
    check_number("feedback_sgd(nu)", nu, "[0, 1]", WHOLE)
    ema = optax.ema(momentum, debias=False)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        average, state = ema.update(updates, state, params)
        return optax.tree.scale(1 / (1 - momentum), _led(nu, updates, average)), state

    return behind_feedback(
        "feedback_sgd",
        (exchange, memory, bucketing, non_finite, axis_name),
        optax.GradientTransformation(ema.init, update),
        *descent("feedback_sgd", learning_rate),
    )


def _led(nu: float, new: Any, average: Any) -> Any:
    return jax.tree.map(lambda g, m: (1 - nu) * g + nu * m, new, average)


def check_number(argument: str, number: Any, interval: str, remedy: str) -> None:
    """Refuses a number outside of an interval, unless it is an array, as injected ones are."""
    if not isinstance(number, jax.Array):
        check_within(argument, number, interval, remedy)


def descent(
    owner: str, learning_rate: optax.ScalarOrSchedule, weight_decay: float = 0.0, mask: Any = None
) -> tuple[optax.GradientTransformation, ...]:
    """What makes a step of a direction."""
    if not callable(learning_rate):
        remedy = "use 3e-4, or an optax schedule."
        check_number(f"{owner}(learning_rate)", learning_rate, "[0, inf)", remedy)
    check_number(f"{owner}(weight_decay)", weight_decay, "[0, inf)", "use 0.1, or 0.0 for none.")
    none = not isinstance(weight_decay, jax.Array) and weight_decay == 0
    decay = [] if none else [optax.add_decayed_weights(weight_decay, mask)]
    return *decay, optax.scale_by_learning_rate(learning_rate)


def behind_feedback(
    owner: str,
    mean: tuple[Exchange | Recipe, Memory | None, Bucketing | None, NonFinite, AxisName],
    *steps: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """A compressed mean, then the steps, of which one that is not finite leaves no trace."""
    exchange, memory, bucketing, non_finite, axis_name = mean
    if memory is None and not isinstance(exchange, Recipe):
        memory = NoMemory() if isinstance(exchange, Hierarchical) else ErrorFeedback()
    check_choice(f"{owner}(non_finite)", non_finite, get_args(NonFinite))
    # A bad mean need not become zero first: the whole step is replaced below.
    compressed: Any = compressed_pmean(exchange, memory, bucketing=bucketing, axis_name=axis_name)
    optimizer = optax.with_extra_args_support(optax.chain(*steps))
    instead = jnp.nan if non_finite == "propagate" else 0.0

    def init(params: optax.Params) -> FeedbackState:
        # In float16 an eps of 1e-8 is zero, and so is the square of 1e-4.
        wide = widened(params)
        return FeedbackState(compressed.init(wide), optimizer.init(wide))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, FeedbackState]:
        before, own = state.pmean, state.inner
        mean, after = compressed.update(widened(updates), before, params, **extra)
        moves, moved = optimizer.update(mean, own, params, **extra)
        good = after.skipped == before.skipped
        moves = jax.tree.map(lambda move: jnp.where(good, move, instead), moves)
        moves = optax.tree.cast_like(moves, updates)
        return moves, FeedbackState(after, optax.tree.where(good, moved, own))

    return optax.GradientTransformationExtraArgs(init, update)


def feedback_muon(
    learning_rate: optax.ScalarOrSchedule,
    exchange: Exchange | Recipe = FILLED,
    memory: Memory | None = None,
    *,
    lead: float = 0.5,
    beta: float = 0.95,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Any = None,
    muon_weight_dimension_numbers: Any = None,
    bucketing: Bucketing | None = None,
    non_finite: NonFinite = "skip",
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    """Optimizer: a compressed mean with error feedback, and a Muon with a gradient beside it.

    Muon sends all directions of an averaged gradient equally far, so noise in its average costs
    much, and so does a delay. With g the mean gradient, m its average of decay beta and v that of
    its square,

        u = 0.2 √max(rows, columns) orthogonal(m) + lead g / (√v + eps)

    for matrices; for other leaves the first term is Adam's. The average alone may be slow and free
    of noise, because the second term, in which noise turns nothing else, answers at once.

    Args:
      learning_rate: of Muon, whose updates are as long as Adam's (`consistent_rms=0.2`); a number
        or an optax schedule. Try dense Muon's and half of it.
      exchange: as for `feedback_adam`, and so are the arguments that both have.
      memory: what is done with what a step does not send.
      lead: how much of the normalized gradient: 0.3 for two stages, 0.5 for `Budget(100)` gathered.
      beta: decay of Muon's average, which is not Nesterov's.
      b1: decay of Adam's average.
      b2: decay of the average of squares.
      eps: added to its root.
      weight_decay: in units of the learning rate.
      mask: which leaves decay. A function needs `static_args`, as for `feedback_adam`.
      muon_weight_dimension_numbers: as for `optax.contrib.muon`: which leaves are matrices, and of
        which axes. Pass `fg.optimizers.muon_dimensions` for a transformer. If left out, all leaves
        with two axes are matrices, embeddings too, and attention kernels with three are not.
      bucketing: what the largest are counted over; see `Bucketing`.
      non_finite: as for `feedback_adam`.
      axis_name: the axis of the workers.

    Returns:
      A whole optimizer, as `optax.contrib.muon` is.

    Wire: that of the exchange.

    Shapes: leaves float32, bfloat16 or float16 of any shape; the state is float32.

    Claims: parameters equal on all workers. After a step that is not finite, as `feedback_adam`.

    Raises:
      ValueError: if `lead` or another number is negative, or a decay outside [0, 1); while tracing,
        if a gradient is known to vary over a model axis, as a piece of a matrix does: pieces are no
        matrices. Without `check_vma` that is not seen.

    Differs from the paper: Muon has Nesterov's momentum, and no second term.

    Example:
      >>> tx = fg.optimizers.feedback_muon(learning_rate=3e-3, axis_name="data")

    References:
      Jordan et al., 2024, https://kellerjordan.github.io/posts/muon (Muon). Stich et al., NeurIPS
      2018, arXiv:1809.07599.
    """
    for name, decay in (("beta", beta), ("b1", b1), ("b2", b2)):
        check_number(f"feedback_muon({name})", decay, "[0, 1)", "use 0.95, 0.9 and 0.99.")
    check_number("feedback_muon(lead)", lead, "[0, inf)", "use 0.5, or 0.0 for Muon alone.")
    slow = optax.contrib.muon(
        -1.0,
        beta=beta,
        eps=eps,
        nesterov=False,
        adam_b1=b1,
        adam_b2=b2,
        muon_weight_dimension_numbers=muon_weight_dimension_numbers,
        consistent_rms=0.2,
    )
    quick = optax.scale_by_rms(b2, eps, eps_in_sqrt=False, bias_correction=True)

    def init(params: optax.Params) -> tuple[Any, Any]:
        return slow.init(params), quick.init(params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        refuse_pieces(updates, axis_name)
        # Muon wants parameters for a weight decay that is zero here.
        orthogonal, averages = slow.update(updates, state[0], updates)
        normal, squares = quick.update(updates, state[1])
        led = jax.tree.map(lambda o, n: o + lead * n, orthogonal, normal)
        return led, (averages, squares)

    return behind_feedback(
        "feedback_muon",
        (exchange, memory, bucketing, non_finite, axis_name),
        optax.GradientTransformation(init, update),
        *descent("feedback_muon", learning_rate, weight_decay, mask),
    )


NO_MATRIX = re.compile(
    r"embed|emb(?![a-z])|(?:^|[/_])(?:pos|position|wte|wpe|vocab|logits)(?:_?\d+)?(?:/|$)"
    r"|(?:^|/)(?:(?:lm|output|out|cls|classifier)_)?head(?:_?\d+)?(?:/|$)"
    r"|(?:^|/)(?:bias|scale)$"
)
"""Paths of embeddings, heads, and of biases and scales, which have two axes in attention."""
ATTENTION = re.compile(r"(?:^|/)(?:(query|key|value)|out)/kernel$")
"""Paths of Flax's kernels of attention: (in, heads, size), and (heads, size, out) of the last."""


def muon_dimensions(params: PyTree) -> PyTree:
    """Function: the matrices of a transformer for Muon, in Flax NNX, Flax Linen or Equinox.

    Weights with two axes are matrices. So are Flax's attention kernels, which have three axes: all
    heads together are one matrix. Adam keeps the rest: embeddings, the head, biases and scales.
    Embeddings and heads are known by their names: `embed`, `embedding`, `tok_emb`, `wte`, `wpe`,
    `pos`, `position`, `vocab`, `head`, `lm_head`, `logits`; an `Embedding` of Equinox by its class.
    A head with another name, such as Linen's `Dense_0`, is taken for a matrix: name it. Layers that
    `nn.scan` stacks have one axis more: give their dimension numbers yourself.

    Args:
      params: the parameters, or their shapes.

    Returns:
      A tree like `params` of `optax.contrib.MuonDimensionNumbers`, with None for Adam's leaves.

    Example:
      >>> shapes = {"embed": jnp.ones((9, 4)), "query": {"kernel": jnp.ones((4, 2, 2))}}
      >>> fg.optimizers.muon_dimensions(shapes)["query"]
      {'kernel': MuonDimensionNumbers(reduction_axis=(0,), output_axis=(1, 2))}
      >>> tx = fg.optimizers.feedback_muon(
      ...     3e-3, muon_weight_dimension_numbers=fg.optimizers.muon_dimensions, axis_name="data"
      ... )
    """

    def of(path: Any, leaf: Any) -> Any:
        if _is_embedding(leaf):
            return jax.tree.map(lambda _: None, leaf)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if path and path[-1] == jax.tree_util.GetAttrKey("value"):  # of a variable of NNX
            name = name.rpartition("/")[0]
        attention = ATTENTION.search(name)
        if leaf.ndim == 3 and attention:
            first = 1 if attention[1] else 2
            return MuonDimensionNumbers(tuple(range(first)), tuple(range(first, 3)))
        return None if leaf.ndim != 2 or NO_MATRIX.search(name.lower()) else MuonDimensionNumbers()

    return jax.tree.map_with_path(of, params, is_leaf=_is_embedding)


def _is_embedding(node: Any) -> bool:
    """Whether it is a module of Equinox, by its name: the library does not import it."""
    return type(node).__name__ == "Embedding"


def refuse_pieces(mean: Any, axis_name: AxisName) -> None:
    """Refuses matrices that are sharded over other axes of a shard_map."""
    for path, leaf in jax.tree.leaves_with_path(mean):
        others = _axes.varying(leaf).difference(_axes.names(axis_name))
        if others:
            raise ValueError(
                "feedback_muon.update(updates): must be whole on each worker, got a gradient "
                f"{jax.tree_util.keystr(path)} that varies over {sorted(others)}; use "
                "feedback_adam, or leave these axes to the compiler (axis_names of shard_map)."
            )
