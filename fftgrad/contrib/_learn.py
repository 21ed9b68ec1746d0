"""How the autoencoder learns: one step of descent on values that all workers have."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import PyTree, Step
from fftgrad.codecs.quantizers import _scale
from fftgrad.codecs.selectors._top_k import TopK
from fftgrad.contrib._autoencoder import Autoencoder
from fftgrad.ops import _finite


class Scaled(NamedTuple):
    """Rows of values as their root mean squares and what is left, of which that is 1, or zero."""

    size: jax.Array
    units: jax.Array


class Learned(NamedTuple):
    """The next parameters, and the relative error of what those before decode."""

    params: PyTree
    error: jax.Array


def scaled(rows: jax.Array) -> Scaled:
    """Each row [..., k] in units of its root mean square, because a net expects values around 1."""
    flat = rows.reshape(-1, rows.shape[-1])
    _, length = _scale.norms(flat)
    size = length * rows.shape[-1] ** -0.5
    units = _scale.in_units(flat, size[:, None], 1.0)
    return Scaled(size.reshape(rows.shape[:-1]), units.reshape(rows.shape))


def innovation(units: jax.Array, base: jax.Array, pick: TopK) -> jax.Array:
    """The largest of what a decoded code lacks of a worker's values, at their places."""

    def of(row: jax.Array) -> jax.Array:
        payload = pick.compress(row, (), Step()).payload
        return pick.decompress(payload, row, Step())

    return jax.vmap(of)(units - base)


def loss(
    net: Autoencoder, params: PyTree, rows: Scaled, lead: jax.Array | int, pick: TopK | None
) -> tuple[jax.Array, jax.Array]:
    """Half of the squared error of what is decoded, and half of that of the codes to their mean.

    With `pick`, each row is decoded from the code of the leading one and its own innovation; else
    the mean of the rows is, from the mean of their codes. Rows of zeros count for nothing. Returns
    the loss, and the error of what is decoded over that of zeros.
    """
    k = rows.units.shape[-1]
    share = rows.size / _scale.divisor(_finite.largest(rows.size))
    if pick is not None:
        share = (share > 0).astype(jnp.float32)
    share = (share / _scale.divisor(jnp.sum(share)))[:, None]
    codes = net.encode(params, rows.units)
    center = jnp.tensordot(share[:, 0], codes, 1)
    apart = jnp.sum(share[:, 0] * jnp.mean(jnp.square(codes - center[None]), (1, 2)))
    if pick is None:
        wanted = jnp.sum(share * rows.units, 0, keepdims=True)
        found, share = net.decode(params, center, k)[None], jnp.ones((1, 1))
    else:
        wanted = rows.units
        base = net.decode(params, codes[lead], k)[None]
        lacks = lax.stop_gradient(innovation(wanted, base, pick))
        found = base + net.weight(params) * lacks
    wrong = jnp.sum(share * jnp.square(found - wanted)) / k
    energy = jnp.sum(share * jnp.square(wanted)) / k
    return 0.5 * wrong + 0.5 * apart, jnp.sqrt(wrong / _scale.divisor(energy))


def learn(
    net: Autoencoder,
    params: PyTree,
    values: jax.Array,
    lead: jax.Array | int,
    pick: TopK | None,
    rate: float,
) -> Learned:
    """Function: one step of an autoencoder's descent on the values of all workers.

    It is what every worker does in a step in which codes are learned, the same on all of them. The
    gradient is clipped to length 1, so that no step is long; what is not finite moves nothing.

    Args:
      net: the autoencoder.
      params: its parameters, by `net.init()`.
      values: float32[w, k], those of each worker at the shared positions.
      lead: the number of the worker whose code all decode.
      pick: what each worker adds to that code, as `TopK(k=1)`; None to decode the mean code.
      rate: of the descent; 0 to know the error alone.

    Returns:
      The next parameters, and the relative error of what the old ones decode.

    Example:
      >>> import fftgrad as fg
      >>> import jax.numpy as jnp
      >>> from fftgrad.contrib import learned
      >>> net = learned.Autoencoder(encoder=(8, 8), decoder=(8, 8))
      >>> values = jnp.ones((2, 16))
      >>> params, first = learned.learn(net, net.init(), values, 0, None, rate=0.1)
      >>> bool(learned.learn(net, params, values, 0, None, rate=0.0).error < first)
      True
    """
    # Without this a gradient along another axis of the mesh would be summed over it.
    params = jax.tree.map(lambda p: _axes.vary_like(p, values), params)
    rows = scaled(values)

    def of(params: PyTree) -> tuple[jax.Array, jax.Array]:
        return loss(net, params, rows, lead, pick)

    (_, error), gradient = jax.value_and_grad(of, has_aux=True)(params)
    length = optax.tree.norm(gradient)
    factor = rate / jnp.maximum(length, 1.0)
    moved = jax.tree.map(lambda p, g: p - factor * g, params, gradient)
    fine = _finite.all_finite(moved) & jnp.isfinite(error)
    params = jax.tree.map(lambda new, old: jnp.where(fine, new, old), moved, params)
    return Learned(params, error)
