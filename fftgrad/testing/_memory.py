"""Laws of memories."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fftgrad._contracts import Memory, PyTree
from fftgrad.exchanges import _bucketing
from fftgrad.ops import _rounding
from fftgrad.testing import _laws
from fftgrad.testing._laws import Laws


def check_memory(memory: Memory, like: PyTree = None, *, telescopes: bool = False) -> None:
    """Function: check that your own memory obeys the laws of the contract.

    The laws are: "value" (the memory compares, hashes and is frozen), "shapes" (the exchanged tree
    and the state keep their shapes), "jit", "vmap", "leaf by leaf" (leaves are independent),
    "finite" (the exchanged tree is finite for finite gradients), "not hidden" (it is not finite for
    a NaN in the gradient, in the first and in a later step), "fidelity" (it has a positive inner
    product with the gradient), and "telescopes" on request.

    Args:
      memory: a memory.
      like: the shapes of a gradient, a pytree; by default a matrix and a vector.
      telescopes: True to check that no unsent value or rounding error is lost: after a last step
        that sends the whole residual, the sum of all means is the sum of the gradients.

    Raises:
      AssertionError: if a law does not hold. The error names the law, the input and the remedy.

    Example:
      >>> fg.testing.check_memory(fg.ErrorFeedback(), telescopes=True)
      >>> fg.testing.check_memory(fg.ErrorFeedback(decay=0.9))
    """
    laws = Laws("check_memory", memory)
    laws.value(Memory)
    like = _laws.TREE if like is None else _bucketing.like(like)
    with laws.running("shapes", "it must trace", "use jax.numpy, and no Python `if` on values."):
        made: Any = jax.eval_shape(lambda: memory.init(like))
        exchanged, state = jax.eval_shape(lambda g: _steps(memory, g, g), like)
    laws.same_state(state, made)
    for x in exchanged:
        laws.same_spec("the exchanged tree", x, like, "work leaf by leaf, in float32.")
    grads = [_laws.tree_of(like, seed) for seed in range(3)]
    run = lambda grad: _steps(memory, grads[0], grad)  # noqa: E731
    laws.programs(run, grads, "", "use only the arguments.")
    together, _ = run(grads[1])
    for i, (a, b) in enumerate(zip(*map(jax.tree.leaves, grads[:2]), strict=True)):
        alone, _ = _steps(memory, a, b)
        here = [jax.tree.leaves(x)[i] for x in together]
        rule, remedy = "leaves must be independent", "use jax.tree.map, and no sum over leaves."
        laws.near("leaf by leaf", rule, here, alone, f"for leaf {i}", remedy)
    _values(laws, memory, like)
    if telescopes:
        _telescopes(laws, memory, like)


def _largest(x: PyTree) -> PyTree:
    """Keep the larger half of the values in each leaf, and set the others to zero."""
    return jax.tree.map(lambda a: jnp.where(jnp.abs(a) >= jnp.median(jnp.abs(a)), a, 0.0), x)


def _steps(memory: Memory, first: PyTree, second: PyTree) -> tuple[list[PyTree], PyTree]:
    """Return the trees that a few steps exchange, and the state after them."""
    state = memory.init(jax.eval_shape(lambda: first))
    exchanged: list[PyTree] = []
    for grad in (first, second, second, first):
        x, state = memory.add(grad, state)
        sent = _largest(x)
        mean = jax.tree.map(lambda a: 0.5 * a, sent)  # as if a second worker sent zeros
        state = memory.update(x, jax.tree.map(jnp.subtract, x, sent), mean, state)
        state = memory.restore(jax.tree.map(lambda a: 2.0**-9 * a, mean), state)
        exchanged.append(x)
    return exchanged, state


def _values(laws: Laws, memory: Memory, like: PyTree) -> None:
    run = jax.jit(lambda g: _steps(memory, g, g))
    good = _laws.tree_of(like)
    for scale in (0.0, 1.0, 1e36, 1e-30, 1e-42):
        found = run(jax.tree.map(lambda a, s=scale: a / 10 * s, good))
        laws.finite(found, f"for gradients of size {scale}", "divide by nothing that may be zero.")
    add = jax.jit(lambda g, state: memory.add(g, state)[0])
    for when, state in {"first": memory.init(like), "fifth": run(good)[1]}.items():
        laws.along("the exchanged tree", good, add(good, state), f"in the {when} step")
        for number, leaf in enumerate(jax.tree.leaves(good)):
            for bad in _laws.BAD:
                x = add(_laws.spoiled(good, number, leaf.size // 2, bad), state)
                where = f"for {bad} in leaf {number}, in the {when} step"
                remedy = "clip nothing, and replace no NaN: compressed_pmean skips the step."
                laws.not_hidden(x, "the exchanged tree", where, remedy)


def _telescopes(laws: Laws, memory: Memory, like: PyTree) -> None:
    grads = [_laws.tree_of(like, seed) for seed in range(8)]
    grads.append(jax.tree.map(jnp.zeros_like, grads[0]))
    state, applied = memory.init(like), list[PyTree]()
    for number, grad in enumerate(grads):
        x, state = memory.add(grad, state)
        last = number == len(grads) - 1
        sent = x if last else _largest(x)
        state = memory.update(x, jax.tree.map(jnp.subtract, x, sent), sent, state)
        # Round the mean to bfloat16, as `compressed_pmean` does for bfloat16 leaves.
        mean = sent if last else jax.tree.map(lambda a: _rounding.rounded(a, jnp.bfloat16), sent)
        state = memory.restore(jax.tree.map(jnp.subtract, sent, mean), state)
        applied.append(mean)
    total, wanted = (np.sum([_laws.flat(tree) for tree in trees], 0) for trees in (applied, grads))
    rule = "the sum of all means must be the sum of the gradients"
    where = "after eight steps and one that sends all"
    remedy = "keep x - sent, and what restore is given, or leave telescopes=True out."
    laws.near("telescopes", rule, total, wanted, where, remedy, most=1e-5)
