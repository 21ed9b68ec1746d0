"""A numerical probe of the inner optimizer of `sharded`."""

import concurrent.futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fftgrad._contracts import PyTree

SCALES = 1.0, 300.0, 30.0, 3.0
"""Sizes of the gradients in four updates, so that a clip acts in some of them."""


def check_inner(inner: optax.GradientTransformation, like: PyTree) -> None:
    """Refuse an optimizer that updates two shards otherwise than it updates the whole leaves."""
    random, step = np.random.default_rng(0), optax.with_extra_args_support(inner).update

    def draw(leaf: Any) -> np.ndarray:
        shape = (4, *[2] * (leaf.ndim - 1)) if leaf.ndim and leaf.size else leaf.shape
        return random.standard_normal(shape, np.float32)

    def cut(leaf: Any, half: int) -> Any:
        if not leaf.ndim or not leaf.size:
            return leaf
        return np.split(np.ravel(leaf), 2)[half].reshape(-1, *[1] * (leaf.ndim - 1))

    def moves(whole: list[PyTree], half: int | None) -> list[Any]:
        params, *grads = (
            jax.tree.map(lambda a: jnp.asarray(a if half is None else cut(a, half)), tree)
            for tree in whole
        )
        # The state of shards is made where no worker knows its shard yet.
        state = inner.init(params if half is None else optax.tree.zeros_like(params))
        found: list[Any] = []
        for grad in grads:
            move, state = step(grad, state, params, value=jnp.ones(()))
            params = optax.apply_updates(params, move)
            found += jax.tree.leaves(move)
        return found

    def probe() -> None:
        drawn = [jax.tree.map(lambda leaf, s=s: s * draw(leaf), like) for s in (1.0, *SCALES)]
        whole = moves(drawn, None)
        for half in (0, 1):
            for one, own in zip(whole, moves(drawn, half), strict=True):
                near = 1e-3 * np.max(np.abs(one), initial=0.0)
                if not np.all(np.abs(cut(one, half) - own) <= near):
                    raise ValueError(
                        "sharded(inner): must update each value by itself, because it sees "
                        "shards, got one that updates shards otherwise than whole leaves, as "
                        "optax.clip_by_global_norm, Adafactor, Muon, noise and schedule-free do; "
                        "clip before it, by fg.training.clip_by_local_norm, and use optax.adamw."
                    )

    # In a thread of its own, because `init` may be traced, on a mesh with axes of which JAX has no
    # arrays with values.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(probe).result()
