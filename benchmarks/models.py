"""Models that more than one benchmark trains."""

import flax.linen as nn
import jax


class Block(nn.Module):
    """Two convolutions around which the input goes.

    Attributes:
      pre: whether the nonlinearity comes before the convolutions, instead of after the sum.
    """

    channels: int
    stride: int = 1
    pre: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # (B, H, W, C)
        # PyTorch pads both sides by one; where the stride is 2, "SAME" pads one side only.
        padding = "SAME" if self.pre else 1
        y = nn.relu(x) if self.pre else x
        y = nn.Conv(self.channels, (3, 3), self.stride, padding=padding, use_bias=False)(y)
        y = nn.relu(nn.GroupNorm(num_groups=4)(y))
        y = nn.Conv(self.channels, (3, 3), padding=padding, use_bias=False)(y)
        y = nn.GroupNorm(num_groups=4)(y)
        if x.shape != y.shape:
            x = nn.Conv(self.channels, (1, 1), self.stride, padding=0, use_bias=False)(x)
        return x + y if self.pre else nn.relu(x + y)


class ResNet(nn.Module):
    """The residual network of 6 `depth` + 2 layers for images of 8 × 8: ResNet-32 for a depth of 5.

    Attributes:
      depth: blocks of each of the three stages.
      width: channels of the first stage.
      pre: whether blocks begin with their nonlinearity.
    """

    depth: int
    width: int = 16
    pre: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # (B, 8, 8, 1) -> (B, 10)
        x = nn.Conv(self.width, (3, 3), padding=1, use_bias=False)(x)
        if not self.pre:
            x = nn.relu(nn.GroupNorm(num_groups=4)(x))
        for stage in range(3):
            for block in range(self.depth):
                stride = 2 if stage > 0 and block == 0 else 1
                x = Block(self.width * 2**stage, stride, self.pre)(x)
        return nn.Dense(10)(nn.relu(x).mean((1, 2)))
