"""In how many steps a transformation exchanges once, read off its trace."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from fftgrad._contracts import PyTree
from fftgrad._values import check_count
from fftgrad.advise import _alone
from fftgrad.ops import _collectives, _platform
from fftgrad.optimizers._diloco import DilocoState

STEPS = 1 << 13
"""Of which the conditions are looked at."""


def period(owner: str, tx: Any, like: PyTree, axes: Mapping[str, int], given: int | None) -> int:
    """The steps between two exchanges; refuses another number than that of the transformation.

    Streamed fragments are sent in each step, and their period is what the caller counts in.
    """
    if given is not None:
        check_count(f"{owner}(every)", given, "leave it out.")
    state = jax.eval_shape(tx.init, like)
    found = _period(tx, like, state, axes)
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, DilocoState))
    streams = found == 1 and any(isinstance(node, DilocoState) for node in nodes)
    if given is None or given == found or streams:
        return given or found
    raise ValueError(
        f"{owner}(every): must be {found}, the steps of this chain to an exchange, got {given}; "
        "leave it out, or put fg.optimizers.diloco around the optimizer."
    )


def _period(tx: Any, like: PyTree, state: PyTree, axes: Mapping[str, int]) -> int:
    """From the condition under which it exchanges, for each of many steps; 1 if there is none."""
    with _platform.one():
        trace = jax.make_jaxpr(tx.update, axis_env=list(axes.items()))
        closed = trace(like, state, like)
    jaxpr = closed.jaxpr
    due = [eqn.invars[0] for eqn in jaxpr.eqns if _sends_under_a_condition(eqn)]
    if len(set(due)) != 1:
        return 1
    made = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    counters = {var for var in jaxpr.invars if var.aval.shape == () and var.aval.dtype == jnp.int32}

    def is_due(step: jax.Array) -> jax.Array:
        known = dict(zip(jaxpr.constvars, closed.consts, strict=True)) | dict.fromkeys(
            counters, step
        )

        def value(atom: Any) -> Any:
            if isinstance(atom, core.Literal):
                return atom.val
            if atom not in known:
                eqn = made[atom]
                out = eqn.primitive.bind(
                    *map(value, eqn.invars), **eqn.primitive.get_bind_params(eqn.params)
                )
                outs = out if eqn.primitive.multiple_results else [out]
                known.update(zip(eqn.outvars, outs, strict=True))
            return known[atom]

        return jnp.asarray(value(due[0])).astype(bool)

    try:
        steps = np.flatnonzero(jax.vmap(is_due)(jnp.arange(STEPS, dtype=jnp.int32)))
    except KeyError:  # it depends on more than the number of the step
        return 1
    return int(steps[-1] - steps[-2]) if len(steps) > 1 else 1


def _sends_under_a_condition(eqn: core.JaxprEqn) -> bool:
    """Whether one of its branches sends; where all do, each step exchanges."""
    if eqn.primitive.name != "cond":
        return False
    return sum(_alone.has(p, {*_collectives.KINDS}) for p in _collectives.programs_in(eqn)) == 1
