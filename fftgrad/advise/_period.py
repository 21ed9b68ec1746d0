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

STEPS = 1 << 16
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
    if found is None or given in (None, found) or streams:
        return given or found or 1
    raise ValueError(
        f"{owner}(every): must be {found}, the steps of this chain to an exchange, got {given}; "
        "leave it out, or put fg.optimizers.diloco around the optimizer."
    )


def _period(tx: Any, like: PyTree, state: PyTree, axes: Mapping[str, int]) -> int | None:
    """From the condition under which it exchanges, for each of many steps.

    1 if there is none, and None if it is not that of one period.
    """
    with _platform.one():
        trace = jax.make_jaxpr(tx.update, axis_env=list(axes.items()))
        closed = trace(like, state, like)
    jaxpr = closed.jaxpr
    if not any(c.branch for c in _collectives.found_in(jaxpr, axes)):
        return 1
    due = [found for eqn in jaxpr.eqns if (found := _condition(eqn)) is not None]
    if len(set(due)) != 1:
        return None
    ((condition, sends),) = set(due)
    made = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    counters = {var for var in jaxpr.invars if var.aval.shape == () and var.aval.dtype == jnp.int32}

    def branch(step: jax.Array) -> jax.Array:
        known = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        known |= dict.fromkeys(counters, step)

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

        return jnp.asarray(value(condition)).astype(jnp.int32)

    try:
        taken = jax.vmap(branch)(jnp.arange(STEPS, dtype=jnp.int32))
    except (KeyError, NameError):  # it depends on more than the number of the step
        return None
    steps = np.flatnonzero(taken == sends)
    return int(steps[-1] - steps[-2]) if len(steps) > 1 else None


def _condition(eqn: core.JaxprEqn) -> tuple[Any, int] | None:
    """By what it is decided whether it sends, and for which value; None if no branch or all do."""
    if eqn.primitive.name != "cond" or isinstance(eqn.invars[0], core.Literal):
        return None
    branches = _collectives.programs_in(eqn)
    sending = [i for i, own in enumerate(branches) if _alone.has(own, {*_collectives.KINDS})]
    return (eqn.invars[0], sending[0]) if len(sending) == 1 else None
