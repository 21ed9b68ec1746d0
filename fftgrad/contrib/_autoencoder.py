"""A small convolutional autoencoder for the values at a leader's positions."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import PyTree, Step
from fftgrad._values import check, missing_extra, value
from fftgrad.codecs import _quantizers
from fftgrad.codecs._top_k import TopK
from fftgrad.ops import _finite
from fftgrad.ops._random import check_key

try:
    from flax import linen as nn
except ImportError as error:
    raise missing_extra("fftgrad.contrib.learned", "Flax", "learned") from error


class Encoder(nn.Module):
    """Encodes values [..., L, 1] as [..., L / 2^layers, code]."""

    channels: tuple[int, ...]
    code: int

    @nn.compact
    def __call__(self, values: jax.Array) -> jax.Array:
        x = values
        for channels in self.channels:
            x = nn.leaky_relu(nn.Conv(channels, (3,), (2,))(x))
        return nn.Conv(self.code, (1,))(x)


class Decoder(nn.Module):
    """Decodes a code and a sparse innovation [..., L, 1] to values [..., L, 1]."""

    channels: tuple[int, ...]

    @nn.compact
    def __call__(self, code: jax.Array, innovation: jax.Array) -> jax.Array:
        x = code
        for channels in self.channels:
            x = nn.leaky_relu(nn.ConvTranspose(channels, (3,), (2,))(x))
        return nn.Conv(1, (1,), name="out")(jnp.concatenate([x, innovation], axis=-1))


@value
class Autoencoder:
    """Value: layers of the convolutional autoencoder of `LearnedCodes`.

    Each layer of the encoder is a convolution of width 3 and stride 2 with a leaky ReLU. At the
    end, a convolution of width 1 has `code` output channels. So four layers encode 16 values as
    `code` numbers. The decoder has a transposed convolution for each layer of the encoder. Then it
    appends the innovation as a channel, and ends with a convolution of width 1.

    Args:
      encoder: output channels of the encoder's layers.
      code: output channels of the encoder's last convolution.
      decoder: output channels of the decoder's layers, as many layers as in `encoder`.
      seed: seed of the initial parameters, which are equal on all workers.

    Example:
      >>> from fftgrad.contrib import learned
      >>> net = learned.Autoencoder(encoder=(8, 8), decoder=(8, 8))
      >>> net.encode(net.init(), jnp.ones(10)).shape
      (3, 4)

    References:
      Abrahamyan et al., TNNLS 2021, arXiv:2103.08870.
    """

    encoder: tuple[int, ...] = (64, 128, 256, 64)
    code: int = 4
    decoder: tuple[int, ...] = (32, 64, 128, 32)
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = (*self.encoder, self.code, *self.decoder)
        fine = min(sizes) >= 1 and 0 < len(self.encoder) == len(self.decoder)
        rule = "be positive channels in as many layers"
        found = f"{self.encoder}, {self.code}, {self.decoder}"
        remedy = "use (8, 8), 4, (8, 8)."
        check(fine, "Autoencoder(encoder, code, decoder)", rule, found, remedy)
        check_key("Autoencoder(seed)", self.seed)

    @property
    def stride(self) -> int:
        """Number of values that `code` numbers encode."""
        return int(2 ** len(self.encoder))

    def code_shape(self, k: int) -> tuple[int, int]:
        """Return the shape of the code for k values."""
        return max(1, math.ceil(k / self.stride)), self.code

    def init(self) -> PyTree:
        """Draw the initial parameters."""
        first, second = jax.random.split(jax.random.key(self.seed))
        values, code = jnp.zeros((self.stride, 1)), jnp.zeros((1, self.code))
        return {
            "encoder": Encoder(self.encoder, self.code).init(first, values)["params"],
            "decoder": Decoder(self.decoder).init(second, code, values)["params"],
        }

    def encode(self, params: PyTree, values: jax.Array) -> jax.Array:
        """Encode values [..., k], padded with zeros to a multiple of `stride`."""
        length = self.code_shape(values.shape[-1])[0] * self.stride
        fill = [(0, 0)] * (values.ndim - 1) + [(0, length - values.shape[-1])]
        filled = jnp.pad(values, fill)[..., None]
        out: Any = Encoder(self.encoder, self.code).apply(
            _varying(params["encoder"], values), filled
        )
        return out

    def decode(self, params: PyTree, code: jax.Array, k: int) -> jax.Array:
        """Decode the k values of a code, without an innovation."""
        nothing = jnp.zeros((*code.shape[:-2], code.shape[-2] * self.stride, 1))
        nothing = _axes.vary_like(nothing, code)
        variables = _varying(params["decoder"], code)
        out: Any = Decoder(self.decoder).apply(variables, code, nothing)
        return out[..., :k, 0]

    def weight(self, params: PyTree) -> jax.Array:
        """Return b: the decoder's output for an innovation J is that without J, plus b J.

        This holds because the last convolution has width 1 and is linear.
        """
        return params["decoder"]["out"]["kernel"][0, -1, 0]


def _varying(params: PyTree, x: jax.Array) -> dict[str, PyTree]:
    """Give the variables of a module the varying axes of its input, as convolutions require."""
    return {"params": jax.tree.map(lambda p: _axes.vary_like(p, x), params)}


def scaled(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the root mean square of each row [..., k], and the rows divided by it."""
    flat = rows.reshape(-1, rows.shape[-1])
    _, length = _quantizers.row_norms(flat)
    size = length * rows.shape[-1] ** -0.5
    units = _quantizers.in_units(flat, size[:, None], 1.0)
    return size.reshape(rows.shape[:-1]), units.reshape(rows.shape)


def loss(
    net: Autoencoder, params: PyTree, rows: jax.Array, lead: jax.Array | int, pick: TopK | None
) -> tuple[jax.Array, jax.Array]:
    """Return the loss: half the mean squared decoding error plus half the variance of the codes.

    If `pick` selects innovations, the leader's code and each row's innovation must decode to the
    row. If `pick` is None, the mean code must decode to the mean row. Rows of zeros have weight 0.
    The second result is the relative decoding error.
    """
    k, (size, units) = rows.shape[-1], scaled(rows)
    share = size / _quantizers.divisor(_finite.largest(size))
    if pick is not None:
        share = (share > 0).astype(jnp.float32)
    share = (share / _quantizers.divisor(jnp.sum(share)))[:, None]
    codes = net.encode(params, units)
    center = jnp.tensordot(share[:, 0], codes, 1)
    apart = jnp.sum(share[:, 0] * jnp.mean(jnp.square(codes - center[None]), (1, 2)))
    if pick is None:
        wanted = jnp.sum(share * units, 0, keepdims=True)
        found, share = net.decode(params, center, k)[None], jnp.ones((1, 1))
    else:
        wanted = units
        base = net.decode(params, codes[lead], k)[None]

        def picked(row: jax.Array) -> jax.Array:
            return pick.decompress(pick.compress(row, (), Step()).payload, row, Step())

        lacks = lax.stop_gradient(jax.vmap(picked)(wanted - base))
        found = base + net.weight(params) * lacks
    wrong = jnp.sum(share * jnp.square(found - wanted)) / k
    energy = jnp.sum(share * jnp.square(wanted)) / k
    return 0.5 * wrong + 0.5 * apart, jnp.sqrt(wrong / _quantizers.divisor(energy))


def learn(
    net: Autoencoder,
    params: PyTree,
    values: jax.Array,
    lead: jax.Array | int,
    pick: TopK | None,
    rate: float,
) -> tuple[PyTree, jax.Array]:
    """Take one step of gradient descent on the values of all workers, float32[w, k].

    `lead` is the number of the leader, and `pick` is as in `loss`. The gradient is clipped to norm
    1. If the result is not finite, the parameters stay. Return the next parameters, and the
    relative error of the current parameters.
    """
    # For replicated parameters, JAX would sum the gradient over other axes of the mesh.
    params = jax.tree.map(lambda p: _axes.vary_like(p, values), params)
    of = jax.value_and_grad(loss, 1, has_aux=True)
    (_, error), gradient = of(net, params, values, lead, pick)
    length = optax.tree.norm(gradient)
    factor = rate / jnp.maximum(length, 1.0)
    moved = jax.tree.map(lambda p, g: p - factor * g, params, gradient)
    fine = _finite.all_finite(moved) & jnp.isfinite(error)
    return optax.tree.where(fine, moved, params), error
