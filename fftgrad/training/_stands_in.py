"""What optax passes in place of parameters."""

from typing import Any

import jax
import optax


def stands_in(params: optax.Params) -> bool:
    """Whether it is what `optax.tree_utils.tree_map_params` passes in place of parameters."""
    kind: Any = type(params)
    return not jax.tree.leaves(params) and kind.__module__.startswith("optax.tree_utils")
