"""Muon behind error feedback, with settings that were measured together."""

import re
from typing import Any

import jax
import optax
import optax.contrib
from optax.contrib import MuonDimensionNumbers

from fftgrad import _axes
from fftgrad._contracts import AxisName, Exchange, Memory, PyTree
from fftgrad.exchanges import Recipe
from fftgrad.exchanges._layout import Layout
from fftgrad.optimizers._feedback import FILLED, behind_feedback, check_number, descent
from fftgrad.training._non_finite import NonFinite


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
    layout: Layout | None = None,
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
      layout: what the largest are counted over; see `Layout`.
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
        (exchange, memory, layout, non_finite, axis_name),
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
