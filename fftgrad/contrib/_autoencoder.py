"""A small convolutional autoencoder of the values at a support."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from fftgrad import _axes
from fftgrad._contracts import PyTree
from fftgrad._values import constructor_call

try:
    from flax import linen as nn
except ImportError as error:
    raise ImportError(
        "fftgrad.contrib.learned: needs Flax, got none; install it by pip install "
        "'fftgrad[learned]'"
    ) from error


class Encoder(nn.Module):
    """Values [..., L, 1] to a code [..., L / 2^layers, code]."""

    channels: tuple[int, ...]
    code: int

    @nn.compact
    def __call__(self, values: jax.Array) -> jax.Array:
        """The code."""
        x = values
        for channels in self.channels:
            x = nn.leaky_relu(nn.Conv(channels, (3,), (2,))(x))
        return nn.Conv(self.code, (1,))(x)


class Decoder(nn.Module):
    """A code, and an innovation [..., L, 1] of which most is zero, to values [..., L, 1]."""

    channels: tuple[int, ...]

    @nn.compact
    def __call__(self, code: jax.Array, innovation: jax.Array) -> jax.Array:
        """The values."""
        x = code
        for channels in self.channels:
            x = nn.leaky_relu(nn.ConvTranspose(channels, (3,), (2,))(x))
        return nn.Conv(1, (1,), name="out")(jnp.concatenate([x, innovation], axis=-1))


@dataclasses.dataclass(frozen=True, repr=False)
class Autoencoder:
    """Value: the shape of the convolutional autoencoder that learns the values at a support.

    The encoder has a convolution of width 3 and stride 2 and a leaky ReLU for each number of
    channels, and one of width 1 down to the channels of the code; the decoder undoes each stride by
    a transposed convolution, joins the innovation as one more channel, and makes values of all of
    them by a convolution of width 1. So four layers turn 16 values into `code` numbers.

    Args:
      encoder: channels of the encoder's layers.
      code: channels of the code.
      decoder: channels of the decoder's layers, as many.
      seed: of the first parameters, which are equal on all workers.

    Raises:
      ValueError: if a number of channels is not positive, or the two have not as many layers.

    Example:
      >>> from fftgrad.contrib import learned
      >>> import jax.numpy as jnp
      >>> net = learned.Autoencoder(encoder=(8, 8), decoder=(8, 8))
      >>> net.encode(net.init(), jnp.ones(10)).shape
      (3, 4)

    References:
      Abrahamyan et al., "Learned Gradient Compression for Distributed Deep Learning", TNNLS 2021,
      arXiv:2103.08870.
    """

    encoder: tuple[int, ...] = (64, 128, 256, 64)
    code: int = 4
    decoder: tuple[int, ...] = (32, 64, 128, 32)
    seed: int = 0

    __repr__ = constructor_call

    def __post_init__(self) -> None:
        sizes = (*self.encoder, self.code, *self.decoder)
        if min(sizes) < 1 or len(self.encoder) != len(self.decoder) or not self.encoder:
            raise ValueError(
                "Autoencoder(encoder, code, decoder): must be positive numbers of channels, in as "
                f"many layers of both, got {self.encoder}, {self.code} and {self.decoder}; use "
                "(64, 128, 256, 64), 4 and (32, 64, 128, 32)."
            )

    @property
    def stride(self) -> int:
        """How many values a place of the code stands for."""
        return int(2 ** len(self.encoder))

    def code_shape(self, k: int) -> tuple[int, int]:
        """The shape of the code of k values."""
        return max(1, math.ceil(k / self.stride)), self.code

    def init(self) -> PyTree:
        """The first parameters."""
        first, second = jax.random.split(jax.random.key(self.seed))
        values, code = jnp.zeros((self.stride, 1)), jnp.zeros((1, self.code))
        return {
            "encoder": self._encoder.init(first, values)["params"],
            "decoder": self._decoder.init(second, code, values)["params"],
        }

    def encode(self, params: PyTree, values: jax.Array) -> jax.Array:
        """The code of values [..., k], filled up with zeros to whole strides."""
        length = self.code_shape(values.shape[-1])[0] * self.stride
        fill = [(0, 0)] * (values.ndim - 1) + [(0, length - values.shape[-1])]
        filled = jnp.pad(values, fill)[..., None]
        out: Any = self._encoder.apply(_varying(params["encoder"], values), filled)
        return out

    def decode(self, params: PyTree, code: jax.Array, k: int) -> jax.Array:
        """The k values of a code, without an innovation."""
        nothing = jnp.zeros((*code.shape[:-2], code.shape[-2] * self.stride, 1))
        nothing = _axes.vary_like(nothing, code)
        out: Any = self._decoder.apply(_varying(params["decoder"], code), code, nothing)
        return out[..., :k, 0]

    def weight(self, params: PyTree) -> jax.Array:
        """What the decoder adds to a value for each unit of innovation there.

        Its last convolution has width 1 and nothing after it. So the layers before need to run once
        for all innovations.
        """
        return params["decoder"]["out"]["kernel"][0, -1, 0]

    @property
    def _encoder(self) -> Encoder:
        return Encoder(self.encoder, self.code)

    @property
    def _decoder(self) -> Decoder:
        return Decoder(self.decoder)


def _varying(params: PyTree, x: jax.Array) -> dict[str, PyTree]:
    """The variables of a module, typed as varying as its input does, which convolutions want."""
    return {"params": jax.tree.map(lambda p: _axes.vary_like(p, x), params)}
