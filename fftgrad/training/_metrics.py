"""Scalars of an optimizer state, for a logger."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import AxisName, PyTree
from fftgrad._values import check
from fftgrad.ops._shapes import by_path
from fftgrad.training._pmean import CompressedPmeanState
from fftgrad.training._state import ShardedState, is_state


def metrics(opt_state: PyTree, *, axis_name: AxisName | None = None) -> dict[str, Any]:
    """Function: the metrics of the exchange in an optimizer state, as a flat dict of scalars.

    Use it with any logger: `wandb.log(fg.metrics(opt_state))`. The keys are:

        step          number of updates; of outer steps with `diloco`
        skipped       number of these updates in which a value was not finite; for bad inner steps
                      of `diloco`, see its `state.skipped`
        overflow      number of values that no codec could represent, of all workers and good steps
        residual      √(Σ_i ||e_i||² / w), where e_i is the residual of worker i, or the whole state
                      of its memory if no field is called `residual`; 0.0 without memory
        exchange_residual   the same for the memory inside `Hierarchical`
        error         relative error of the last good step, with `track_error=True`

    Args:
      opt_state: an optax state that contains the state of `compressed_pmean`, or the state of
        `fg.optimizers.sharded`, which gives step, skipped and residual. Named tuples may be dicts,
        as in `nnx.state`. If there are several states, as under `optax.partition`, each key begins
        with the path of its state. Outside `shard_map`, pass the global state, and call `metrics`
        in all processes, because each process holds the residuals of its own workers.
      axis_name: the axis, or axes, of the workers, if you call `metrics` inside `shard_map`. The
        workers then sum ||e_i||² by an all-reduce of 4 bytes for each key with a residual.

    Returns:
      A dict of arrays, scalars. For the bytes of a step, see `fg.wire_bytes`.

    Raises:
      ValueError: if there is no state of `compressed_pmean`.

    Example:
      >>> tx = fg.compressed_pmean(fg.AllGather(fg.Sign()), fg.ErrorFeedback(), axis_name="data")
      >>> found = fg.metrics(tx.init({"w": jnp.ones(320)}))
      >>> {name: float(found[name]) for name in ("step", "skipped", "residual")}
      {'step': 0.0, 'skipped': 0.0, 'residual': 0.0}
    """
    states = by_path(opt_state, is_leaf=_has_metrics)
    states = {name: state for name, state in states.items() if _has_metrics(state)}
    rule, got = "hold a state of compressed_pmean", f"{type(opt_state).__name__} without one"
    check(bool(states), "metrics(opt_state)", rule, got, "pass the optimizer's state.")
    out: dict[str, Any] = {}
    for name, state in states.items():
        before = f"{name}/" if len(states) > 1 else ""
        out |= {before + key: value for key, value in _of_state(state, axis_name).items()}
    return out


def _has_metrics(node: Any) -> bool:
    return is_state(node, CompressedPmeanState, ShardedState)


def _of_state(state: Any, axis_name: AxisName | None) -> dict[str, jax.Array]:
    fields = state if isinstance(state, Mapping) else state._asdict()
    key = (jax.tree_util.DictKey if fields is state else jax.tree_util.GetAttrKey)("residual")
    memory, exchange = fields.get("memory", ()), fields.get("exchange", ())
    counts = ("step", "skipped", "overflow")
    out = {name: jax.tree.leaves(fields[name])[0] for name in counts if name in fields}
    out["residual"] = _norm(_below(key, memory) or jax.tree.leaves(memory), axis_name)
    for error in jax.tree.leaves(fields.get("error", ())):
        out["error"] = error
    inside = _below(key, exchange)
    return out | ({"exchange_residual": _norm(inside, axis_name)} if inside else {})


def _below(key: Any, tree: PyTree) -> list[jax.Array]:
    """List the arrays with a key in their paths."""
    return [leaf for path, leaf in jax.tree.leaves_with_path(tree) if key in path]


def _norm(leaves: list[jax.Array], axis_name: AxisName | None) -> jax.Array:
    """Return √(Σ_i ||e_i||² / w) of arrays with a leading axis of w workers."""
    squares = jnp.zeros((), jnp.float32)
    for leaf in leaves:
        # A residual may be in host memory, where JAX cannot compute.
        leaf = jax.device_put(leaf, jax.memory.Space.Device)
        squares += jnp.sum(jnp.square(leaf.astype(jnp.float32))) / leaf.shape[0]
    if axis_name is not None and leaves:
        squares = lax.pmean(squares, axis_name)
        squares = _axes.over_other_axes(lax.psum, squares)
    return jnp.sqrt(squares)
