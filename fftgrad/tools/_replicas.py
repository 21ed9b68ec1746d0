"""Whether all workers hold the same bits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import AxisName, PyTree
from fftgrad.ops import _random


class Replicas(NamedTuple):
    """What `replica_checksum` found.

    Attributes:
      checksum: uint32[], of this worker's bits.
      equal: bool[], whether it is the same on all workers.
    """

    checksum: jax.Array
    equal: jax.Array


def replica_checksum(tree: PyTree, axis_name: AxisName) -> Replicas:
    """Function: whether all workers of an axis hold the same bits, by a hash of them.

    A difference of one bit between replicas grows without an error. This finds it for one pass over
    the data and 8 bytes on the wire. The state of one worker repairs it:

        first = jax.lax.axis_index("data") == 0
        params = jax.tree.map(
            lambda p: jax.lax.psum(jnp.where(first, p, jnp.zeros_like(p)), "data"), params
        )

    Two different trees have the same checksum with a chance of 2^-32. It sees the bits: 0.0 and
    -0.0 differ, and a NaN is equal to itself.

    Args:
      tree: arrays of 8, 16 or 32 bits a value, such as parameters or an optimizer's state.
      axis_name: the axis, or axes, of the workers.

    Example:
      >>> check = lambda x: fg.tools.replica_checksum({"w": x}, "data").equal
      >>> jax.vmap(check, axis_name="data")(jnp.array([[1.0, 2.0], [1.0, 2.0]])).tolist()
      [True, True]
      >>> jax.vmap(check, axis_name="data")(jnp.array([[0.0], [-0.0]])).tolist()
      [False, False]
    """
    checksum = jnp.uint32(0)
    for number, (path, leaf) in enumerate(jax.tree.leaves_with_path(tree)):
        words = _words(jnp.asarray(leaf), jax.tree_util.keystr(path))
        seed = jnp.uint32(2 * number + 1)
        checksum = checksum + jnp.sum(_random.bits(seed, words, words.size), dtype=jnp.uint32)
    # Typed as different even where JAX believes that it is equal: that is the question.
    own = _axes.vary_like(checksum, _axes.index(axis_name))
    most = lax.pmax(jnp.stack([own, ~own]), axis_name)
    return Replicas(own, most[0] == ~most[1])


def _words(leaf: jax.Array, name: str) -> jax.Array:
    """The bits of each value, as a uint32."""
    if leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.uint8)
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}.get(leaf.dtype.itemsize)
    if bits is None or jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        raise TypeError(
            f"replica_checksum(tree{name}): must have 8, 16 or 32 bits a value, got {leaf.dtype}; "
            "leave it out, or cast it."
        )
    return lax.bitcast_convert_type(leaf.ravel(), bits).astype(jnp.uint32)
