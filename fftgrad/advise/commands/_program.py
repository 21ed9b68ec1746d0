"""A whole program for a row of a plan, which trains a matrix until the user puts a model there."""

import re
import textwrap

from fftgrad import _axes
from fftgrad.advise import Plan, PlanRow
from fftgrad.advise._inputs import groups

HEAD = '''\
"""{about}

Put your own model, data and learning rate in their places. With simulated workers on a CPU:
JAX_NUM_CPU_DEVICES={workers} PJRT_NPROC={threads} python THIS_FILE
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import {shardings}

import fftgrad as fg

mesh = jax.make_mesh({sizes}, {names}, axis_types=(AxisType.Auto,) * {axes})
{yours}tx = {tx}
x, w = jax.random.normal(jax.random.key(0), ({rows}, 100)), jnp.zeros((100, 100))
y = jnp.tanh(x @ jax.random.normal(jax.random.key(1), (100, 100)) / 10)


def loss(w, x, y):
    return jnp.mean((jnp.tanh(x @ w) - y) ** 2)


'''
USUAL = """\
def step(w, state, x, y):  # of one worker, on its rows of x and y
    _, grad = fg.value_and_grad(loss, {axis})(w, x, y)
    updates, state = tx.update(grad, state, w)
    return optax.apply_updates(w, updates), state


state = fg.init_state(tx, w, mesh, {axis})
train = fg.data_parallel(step, mesh, {axis})  # of all workers
before = loss(w, x, y)
for _ in range(100):
    w, state = train(w, state, x, y)
print(before, "->", loss(w, x, y))
"""
LOCAL = """\
def step(rows, state, x, y):  # of one worker, which trains parameters of its own: its row
    own = rows[0]
    updates, state = tx.update(jax.grad(loss)(own, x, y), state, own)
    return optax.apply_updates(own, updates)[None], state


state = fg.init_state(tx, w, mesh, {axis})
specs, row = fg.state_specs(state, {axis}), P({axis})
train = jax.jit(
    jax.shard_map(step, mesh=mesh, in_specs=(row, specs, row, row), out_specs=(row, specs))
)
rows = jax.device_put(jnp.broadcast_to(w, ({workers}, *w.shape)), NamedSharding(mesh, row))
for _ in range(100):
    rows, state = train(rows, state, x, y)
print(loss(w, x, y), "->", loss(state.anchor, x, y))  # of what the workers have in common
"""
YOURS = {"learning_rate": "0.02", "optimizer": "optax.adam(0.02)"}
"""What a row leaves to the user, as it trains this model."""


def program(found: Plan, row: PlanRow, about: str) -> str:
    """The source; `about` is what the plan says of the row."""
    own, local = found.measured, row.every > 1
    joined = groups("plan", own.workers, own.fast, own.axis_name)
    names = _axes.names(joined.axis_name)
    sizes = joined.sizes + (1,) * (len(names) - len(joined.sizes))
    yours = [
        f"{name} = {made}  # find yours\n"
        for name, made in YOURS.items()
        if re.search(rf"\b{name}\b", row.code)
    ]
    chained = f"optax.chain(\n    {row.code},\n    optax.sgd(0.3),\n)"
    return (HEAD + (LOCAL if local else USUAL)).format(
        about="\n".join(textwrap.wrap(about, 96, break_on_hyphens=False)),
        workers=own.workers,
        threads=4 * own.workers,
        shardings="AxisType, NamedSharding, PartitionSpec as P" if local else "AxisType",
        sizes=sizes,
        names=names,
        axes=len(names),
        yours="".join(yours),
        tx=row.code if local or row.whole else chained,
        rows=16 * own.workers,
        axis=repr(joined.axis_name),
    )
