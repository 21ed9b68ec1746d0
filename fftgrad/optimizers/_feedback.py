"""Adam and Muon on compressed gradients with error feedback."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax import lax
from optax.contrib import MuonDimensionNumbers

from fftgrad import _axes
from fftgrad._contracts import AxisName, Exchange, Memory, PyTree
from fftgrad._values import check, check_choice, check_within
from fftgrad.codecs._budget import Budget
from fftgrad.exchanges import AllGather, Hierarchical, Recipe
from fftgrad.exchanges._bucketing import Bucketing
from fftgrad.memories import ErrorFeedback, NoMemory
from fftgrad.ops import _shapes
from fftgrad.training._gradients import widened
from fftgrad.training._pmean import CompressedPmeanState, NonFinite, compressed_pmean

FILLED = AllGather(Budget(ratio=100))  # fills a byte budget: 100x fewer bytes than float32


class FeedbackState(NamedTuple):
    """State of `feedback_adam` and `feedback_muon`."""

    pmean: CompressedPmeanState  # counts bad steps in `skipped`
    inner: optax.OptState  # state of Adam or Muon, equal on all workers


def feedback_adam(
    learning_rate: optax.ScalarOrSchedule,
    exchange: Exchange | Recipe = FILLED,
    memory: Memory | None = None,
    *,
    lead: float = 0.5,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Any = None,
    bucketing: Bucketing | None = None,
    non_finite: NonFinite = "skip",
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    """Optimizer: Adam on a compressed mean with error feedback, plus a share of the new gradient.

    Error feedback delays gradients, which makes momentum less stable. With momentum 0.9, learning
    rate times curvature may be up to 38 without delay, but only 1.0 with a delay of one step. So
    the update adds a share of the new mean gradient g to Adam's average m; v averages the squares:

        u = (lead g + (1 - lead) m) / (√v + eps).

    This is QHAdam with ν = 1 - lead. With lead = 0 it is Adam; with lead = 1 it has no momentum.
    The default reaches a lower loss than both. Only the residual differs between the workers.

    Args:
      learning_rate: Adam's learning rate, a number or an optax schedule.
      exchange: the exchange of the gradients, or a method, such as `fg.methods.top_k(0.01)`.
      memory: the memory of unsent gradients; by default the method's own, or `ErrorFeedback()`.
      lead: share of the new gradient in the update. Use 0.3 with `TwoStage`, and 0.5, the default,
        with the default exchange.
      b1: decay of m.
      b2: decay of v.
      eps: added to √v.
      weight_decay: as for `optax.adamw`: multiplied by the learning rate.
      mask: the leaves that decay, as for `optax.adamw`; all by default. If you pass a function
        through `optax.inject_hyperparams`, also pass `static_args="mask"`. Otherwise optax calls
        the mask with the step number, like a schedule; a mask that tests `ndim` is then False.
      bucketing: the values that a codec compresses together; see `Bucketing`.
      non_finite: the result of a bad step: "skip" leaves all parameters unchanged, "propagate"
        returns NaN.
      axis_name: the axis of the workers.

    Wire: bytes of the exchange; by default 0.32 bits a parameter, 100x fewer bytes than float32.

    Shapes: leaves float32, bfloat16 or float16 of any shape; the state is float32.

    Claims: parameters are equal on all workers. A bad step changes neither residuals nor Adam's
      state, and `state.pmean.skipped` counts it. As in `optax.adam`, the square of a gradient above
      1e19 overflows, and v stays infinite.

    Example:
      >>> tx = fg.optimizers.feedback_adam(learning_rate=3e-4, axis_name="data")

    References:
      Stich et al., NeurIPS 2018, arXiv:1809.07599. Ma and Yarats, ICLR 2019, arXiv:1810.06801
      (QHAdam).
    """
    check_numbers("feedback_adam", "[0, 1)", "use 0.9 and 0.99.", b1=b1, b2=b2)
    check_numbers("feedback_adam", "[0, 1]", "use 0.5, or 0.0 for Adam alone.", lead=lead)
    adam = optax.scale_by_adam(b1=b1, b2=b2, eps=eps)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        state = adam.update(updates, state, params)[1]
        average = optax.tree.bias_correction(state.mu, b1, state.count)
        square = optax.tree.bias_correction(state.nu, b2, state.count)
        led = jax.tree.map(lambda g, m: lead * g + (1 - lead) * m, updates, average)
        return jax.tree.map(lambda u, v: u / (v**0.5 + eps), led, square), state

    return behind_feedback(
        "feedback_adam",
        (exchange, memory, bucketing, non_finite, axis_name),
        optax.GradientTransformation(adam.init, update),
        *(learning_rate, weight_decay, mask),
    )


def check_numbers(owner: str, interval: str, remedy: str, **numbers: Any) -> None:
    """Refuse numbers outside of an interval; skip arrays, which `inject_hyperparams` passes."""
    for name, number in numbers.items():
        if not isinstance(number, jax.Array):
            check_within(f"{owner}({name})", number, interval, remedy)


def behind_feedback(
    owner: str,
    mean: tuple[Exchange | Recipe, Memory | None, Bucketing | None, NonFinite, AxisName],
    direction: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float,
    mask: Any,
) -> optax.GradientTransformationExtraArgs:
    """Chain a compressed mean and an optimizer. A bad step updates neither."""
    exchange, memory, bucketing, non_finite, axis_name = mean
    if memory is None and not isinstance(exchange, Recipe):
        memory = NoMemory() if isinstance(exchange, Hierarchical) else ErrorFeedback()
    check_choice(f"{owner}(non_finite)", non_finite, get_args(NonFinite))
    if not callable(learning_rate):
        check_numbers(owner, "[0, inf)", "use 3e-4, or a schedule.", learning_rate=learning_rate)
    check_numbers(owner, "[0, inf)", "use 0.1, or 0.0 for none.", weight_decay=weight_decay)
    decays = isinstance(weight_decay, jax.Array) or weight_decay != 0
    decay = [optax.add_decayed_weights(weight_decay, mask)] if decays else []
    steps = direction, *decay, optax.scale_by_learning_rate(learning_rate)
    # `compressed_pmean` need not remove a NaN from the mean, because `update` replaces a bad step.
    compressed: Any = compressed_pmean(exchange, memory, bucketing=bucketing, axis_name=axis_name)
    optimizer = optax.with_extra_args_support(optax.chain(*steps))
    instead = jnp.nan if non_finite == "propagate" else 0.0

    def init(params: optax.Params) -> FeedbackState:
        # The state is float32, because eps=1e-8 and the square of 1e-4 underflow in float16.
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
    share_axis: AxisName | None = None,
    bucketing: Bucketing | None = None,
    non_finite: NonFinite = "skip",
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    """Optimizer: Muon on a compressed mean with error feedback, plus the normalized new gradient.

    Muon scales all singular directions of the average gradient to equal length, which amplifies the
    noise in weak directions. With g the new mean gradient, m the average of the mean gradients with
    decay beta, and v the average of their squares with decay b2, the update of a matrix is

        u = 0.2 √max(rows, columns) orthogonal(m) + lead g / (√v + eps).

    For other leaves, Adam's update replaces the first term. The second term reacts without delay,
    so m can be a long, smooth average. The second term is not orthogonalized, because that would
    amplify the noise of g. Shapes and claims are those of `feedback_adam`.

    Args:
      learning_rate: a number or an optax schedule, as for `optax.contrib.muon` with
        `consistent_rms=0.2`. Try the learning rate of dense Muon, and half of it.
      exchange: as for `feedback_adam`.
      memory: as for `feedback_adam`.
      lead: factor of the second term: 0.3 for `TwoStage`, 0.5 for the default exchange.
      beta: decay of m.
      b1: decay of Adam's average, for leaves that are not matrices.
      b2: decay of v.
      eps: added to √v.
      weight_decay: as for `feedback_adam`.
      mask: as for `feedback_adam`.
      muon_weight_dimension_numbers: the matrices and their axes, as for `optax.contrib.muon`. Pass
        `fg.optimizers.muon_dimensions` for a transformer. By default, Muon updates all leaves with
        two axes, including embeddings, and Adam updates attention kernels with three axes.
      share_axis: axis along which workers share the orthogonalization, best with fast links. Each
        worker orthogonalizes some of the matrices, and an all-gather sends the results to all. With
        None, each worker orthogonalizes all matrices.
      bucketing: as for `feedback_adam`.
      non_finite: as for `feedback_adam`.
      axis_name: the axis of the workers.

    Wire: bytes of the exchange. `share_axis` adds one all-gather of the matrices in bfloat16: each
      of the w workers along this axis contributes 2/w bytes per value.

    Raises:
      ValueError: while tracing, if a gradient is sharded over a model axis, because Muon needs the
        whole matrix. With `check_vma=False` this is not detected.

    Differs from the paper: no Nesterov momentum; the second term.

    Example:
      >>> tx = fg.optimizers.feedback_muon(learning_rate=3e-3, axis_name="data")

    References:
      Jordan et al., 2024, https://kellerjordan.github.io/posts/muon (Muon). Stich et al., NeurIPS
      2018, arXiv:1809.07599.
    """
    decays = {"beta": beta, "b1": b1, "b2": b2}
    check_numbers("feedback_muon", "[0, 1)", "use 0.95, 0.9 and 0.99.", **decays)
    check_numbers("feedback_muon", "[0, inf)", "use 0.5, or 0.0 for Muon alone.", lead=lead)
    rms = 0.2
    slow = optax.contrib.muon(
        -1.0,
        ns_steps=0,  # scales to a norm of about 1; `orthogonal` iterates, on stacks
        beta=beta,
        eps=eps,
        nesterov=False,
        adam_b1=b1,
        adam_b2=b2,
        muon_weight_dimension_numbers=muon_weight_dimension_numbers,
        consistent_rms=rms,
    )
    quick = optax.scale_by_rms(b2, eps, eps_in_sqrt=False, bias_correction=True)

    def init(params: optax.Params) -> tuple[Any, Any]:
        return slow.init(params), quick.init(params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        refuse_pieces(updates, axis_name)
        # Muon reads parameters only for its weight decay, which is zero here.
        slowed, averages = slow.update(updates, state[0], updates)
        slowed = orthogonal(slowed, muon_weight_dimension_numbers, rms, share_axis)
        normal, squares = quick.update(updates, state[1])
        led = jax.tree.map(lambda s, n: s + lead * n, slowed, normal)
        return led, (averages, squares)

    return behind_feedback(
        "feedback_muon",
        (exchange, memory, bucketing, non_finite, axis_name),
        optax.GradientTransformation(init, update),
        *(learning_rate, weight_decay, mask),
    )


def orthogonal(updates: PyTree, numbers: Any, rms: float, share_axis: AxisName | None) -> PyTree:
    """Orthogonalize the matrices of a tree, which optax's Muon has scaled.

    Matrices of equal shape, up to transposition, form a stack, which needs one program and few
    kernels. `numbers` and `rms` are optax's `muon_weight_dimension_numbers` and `consistent_rms`.
    """
    leaves, structure = jax.tree.flatten(updates)
    stacks: dict[tuple[int, int], list[tuple[int, _Flat]]] = {}
    for place, own in enumerate(_of_leaves(numbers, updates)):
        if own is not None and leaves[place].size:
            flat = _Flat(leaves[place], own)
            stacks.setdefault(flat.short_long, []).append((place, flat))
    scales = [rms * long**0.5 for _, long in stacks]
    wide = [
        jnp.concatenate([flat.matrices for _, flat in own]) / scale
        for own, scale in zip(stacks.values(), scales, strict=True)
    ]
    made = map(iterated, wide) if share_axis is None else _shared(wide, share_axis)
    for members, stack, scale in zip(stacks.values(), made, scales, strict=True):
        pieces = _shapes.cut(stack, [len(flat.matrices) for _, flat in members])
        for (place, flat), own in zip(members, pieces, strict=True):
            leaves[place] = flat.back(own.astype(flat.like.dtype) * scale)
    return jax.tree.unflatten(structure, leaves)


def iterated(x: jax.Array) -> jax.Array:
    """Run the five Newton-Schulz iterations of optax's Muon on a stack of wide matrices."""
    a, b, c = 3.4445, -4.775, 2.0315
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x


def _shared(stacks: Sequence[jax.Array], axis_name: AxisName) -> Iterator[jax.Array]:
    """Orthogonalize an equal part of each stack on each worker, and all-gather bfloat16.

    With fewer matrices than workers, some workers process only padding.
    """
    workers, shares = _axes.size(axis_name, "feedback_muon"), list[jax.Array]()
    if not stacks:
        return
    for stack in stacks:
        count = -(-len(stack) // workers)
        padded = jnp.pad(stack, ((0, count * workers - len(stack)), (0, 0), (0, 0)))
        mine = lax.dynamic_slice_in_dim(padded, lax.axis_index(axis_name) * count, count)
        shares.append(iterated(mine).astype(jnp.bfloat16))
    # Send bits, because XLA widens collectives of bfloat16 on some backends.
    sent = jnp.concatenate([share.ravel() for share in shares])
    rows = _axes.all_gather(lax.bitcast_convert_type(sent, jnp.uint16), axis_name)
    rows, start = lax.bitcast_convert_type(rows, jnp.bfloat16), 0
    for stack, share in zip(stacks, shares, strict=True):
        own = rows[:, start : start + share.size].reshape(-1, *share.shape[1:])
        start += share.size
        yield own[: len(stack)]


class _Flat:
    """A leaf as a stack of matrices, transposed if they have more rows than columns."""

    def __init__(self, leaf: jax.Array, numbers: MuonDimensionNumbers) -> None:
        rows, columns = (
            tuple(a % leaf.ndim for a in ((axes,) if isinstance(axes, int) else axes))
            for axes in numbers
        )
        batch = tuple(a for a in range(leaf.ndim) if a not in rows + columns)
        size = lambda axes: math.prod(leaf.shape[a] for a in axes)  # noqa: E731
        if size(rows) > size(columns):
            rows, columns = columns, rows
        self.order = batch + rows + columns
        self.like = leaf
        self.short_long = (size(rows), size(columns))
        self.matrices = leaf.transpose(self.order).reshape(-1, *self.short_long)

    def back(self, matrices: jax.Array) -> jax.Array:
        """Restore the leaf's shape."""
        moved = matrices.reshape([self.like.shape[a] for a in self.order])
        return moved.transpose(sorted(range(self.like.ndim), key=self.order.__getitem__))


def _of_leaves(numbers: Any, updates: PyTree) -> list[MuonDimensionNumbers | None]:
    """List the dimension numbers of all leaves, with None for a leaf that is not a matrix."""
    if numbers is None:
        return [MuonDimensionNumbers() if u.ndim == 2 else None for u in jax.tree.leaves(updates)]
    numbers = numbers(updates) if callable(numbers) else numbers
    is_leaf = lambda n: n is None or isinstance(n, MuonDimensionNumbers)  # noqa: E731
    spread = lambda n, part: [n] * len(jax.tree.leaves(part))  # noqa: E731
    lists = jax.tree.map(spread, numbers, updates, is_leaf=is_leaf)
    return [n for own in jax.tree.leaves(lists, is_leaf=lambda n: isinstance(n, list)) for n in own]


NO_MATRIX = re.compile(
    r"embed|emb(?![a-z])|(?:^|[/_])(?:pos|position|wte|wpe|vocab|logits)(?:_?\d+)?(?:/|$)"
    r"|(?:^|/)(?:(?:lm|output|out|cls|classifier)_)?head(?:_?\d+)?(?:/|$)"
    r"|(?:^|/)(?:bias|scale)$"
)
"""Paths of leaves that Adam updates even with two axes, such as biases of attention."""
ATTENTION = re.compile(r"(?:^|/)(?:(query|key|value)|out)/kernel$")
"""Paths of Flax's attention kernels: (in, heads, size), but (heads, size, out) for `out`."""


def muon_dimensions(params: PyTree) -> PyTree:
    """Function: find the leaves of a transformer that Muon updates (Flax NNX, Linen, Equinox).

    Weights with two axes are matrices. Flax's attention kernels have three axes; all heads together
    form one matrix. Adam updates all other leaves: embeddings, the head, biases and scales.
    Embeddings and heads are detected by name: `embed`, `embedding`, `tok_emb`, `wte`, `wpe`, `pos`,
    `position`, `vocab`, `head`, `lm_head`, `logits`. An Equinox `Embedding` is detected by class.
    Give the head one of these names: Linen's default `Dense_0` counts as a matrix. Layers stacked
    by `nn.scan` have one more axis; pass their dimension numbers yourself.

    Args:
      params: the parameters, or their shapes.

    Returns:
      A tree of `optax.contrib.MuonDimensionNumbers`, with None for each leaf that Adam updates.

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
        if path and path[-1] == jax.tree_util.GetAttrKey("value"):  # attribute of an NNX variable
            name = name.rpartition("/")[0]
        attention = ATTENTION.search(name)
        if leaf.ndim == 3 and attention:
            first = 1 if attention[1] else 2
            return MuonDimensionNumbers(tuple(range(first)), tuple(range(first, 3)))
        return None if leaf.ndim != 2 or NO_MATRIX.search(name.lower()) else MuonDimensionNumbers()

    return jax.tree.map_with_path(of, params, is_leaf=_is_embedding)


def _is_embedding(node: Any) -> bool:
    """Detect Equinox's module by name, because fftgrad does not import Equinox."""
    return type(node).__name__ == "Embedding"


def refuse_pieces(mean: Any, axis_name: AxisName) -> None:
    for path, leaf in jax.tree.leaves_with_path(mean):
        others = sorted(_axes.varying(leaf).difference(_axes.names(axis_name)))
        argument = f"feedback_muon.update(updates{jax.tree_util.keystr(path)})"
        rule, got = "be whole on each worker", f"a gradient that varies over {others}"
        remedy = "use feedback_adam, or leave these axes to XLA by axis_names of shard_map."
        check(not others, argument, rule, got, remedy)
