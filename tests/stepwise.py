"""A step of an exchange, and several steps of a transformation, on all workers in one program."""

import functools

import jax
import numpy as np
import optax
from parallel import AXIS, everywhere

import fftgrad as fg
from fftgrad import _axes

STEP = fg.Step.of(3)


@functools.cache
def _program(tx, mode, workers):
    def varying(state):
        # The loop of steps keeps types, and after one step the state varies by worker.
        return jax.tree.map(lambda a: _axes.vary(a, AXIS), state)

    def step(at, given):
        (state, params), (grad, extra) = at, given
        updates, state = tx.update(grad, state, params, **extra)
        params = None if params is None else optax.apply_updates(params, updates)
        state = varying(state)
        return (state, params), (updates if params is None else params, state)

    def worker(grads, params, extra):
        like = jax.tree.map(lambda g: g[0], grads) if params is None else params
        return jax.lax.scan(step, (varying(tx.init(like)), params), (grads, extra))[1]

    return everywhere(mode, worker, workers)


def once(exchange, x, step=STEP, axis_name=AXIS):
    """Run the first step of an exchange on one worker."""
    return exchange.mean(x, exchange.init(x), fg.exchanges.Comm(axis_name, step))


def stacked(trees):
    """Stack the trees of several steps."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def run(tx, grads, params=None, mode="vmap", **extra):
    """Return the updates and the states of each step, with leaves [steps, workers, ...].

    Gradients and `extra` have such leaves too. With `params`, from which all workers start, return
    the parameters after each step in place of the updates.
    """
    grads, extra = jax.tree.map(lambda a: np.swapaxes(a, 0, 1), (grads, extra))
    workers = len(jax.tree.leaves(grads)[0])
    params = jax.tree.map(lambda a: np.stack([a] * workers), params)
    out = _program(tx, mode, workers)(grads, params, extra)
    return jax.tree.map(lambda a: np.swapaxes(a, 0, 1), jax.device_get(out))
