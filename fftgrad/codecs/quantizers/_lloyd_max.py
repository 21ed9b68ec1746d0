"""The best few values for a normal distribution."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from fftgrad._contracts import Compressed, Like, Payload, PyTree, Quantizer, Step
from fftgrad._values import check_count, value
from fftgrad.codecs.quantizers import _scale
from fftgrad.ops import _rows
from fftgrad.ops.packing import _codes


@value
class LloydMax(Quantizer):
    """Quantizer: round to the 2^bits values that serve a normal distribution best, and rescale.

    For each block x of d values, y = √d x / ||x|| is rounded to the nearest Lloyd-Max centroid q
    of N(0, 1), and decoded as S q with S = ||x|| √d / <y, q>, so that the result has the right
    projection on x. After a random rotation, `chain(Hadamard(), LloydMax())`, every block is close
    to normal, whatever it was, and the mean of many is close to unbiased.

    Args:
      bits: width of a code, 1 <= bits <= 6. One bit is DRIVE, more are EDEN.
      block: values per scale; that of the rotation before it.

    Wire: x float32[n] -> main uint32[ceil(n · bits / 32)], side float32[ceil(n/block)].

    Claims: not summable. Not claimed to be unbiased: the proof takes a uniform rotation, of which
      the Hadamard transform with random signs is an approximation. A block with a NaN or an
      infinity decodes to NaN, and so does one whose length is more than float32 holds.

    Differs from the paper: whole bits only.

    Example:
      >>> x, codec = jnp.array([1.0, -1.0, 1.0, 1.0]), fg.codecs.LloydMax(bits=1)
      >>> fg.decompress(codec, fg.compress(codec, x), like=x)
      Array([ 1., -1.,  1.,  1.], dtype=float32)

    References:
      Vargaftik et al., NeurIPS 2021, arXiv:2105.08339 (DRIVE); ICML 2022, arXiv:2108.08842 (EDEN).
    """

    bits: int = 1
    block: int = 4096

    def __post_init__(self) -> None:
        check_count("LloydMax(bits)", self.bits, "for more bits use RangeFloat.", 1, 6)
        check_count("LloydMax(block)", self.block, "use block=4096.")

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        _scale.check_real("LloydMax", x)
        block = min(self.block, x.size)
        centroids = _centroids(self.bits)
        bounds = (centroids[1:] + centroids[:-1]) / 2

        def encode(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            rows = _rows.rows(x, block)
            _, norms = _scale.norms(rows)
            y = _scale.in_units(rows, norms[:, None], math.sqrt(block))
            above = [(y > bound).astype(jnp.uint32) for bound in bounds]
            codes = functools.reduce(jnp.add, above)
            projection = jnp.sum(y * _look_up(codes, centroids), axis=1)
            scales = norms * (math.sqrt(block) / jnp.where(projection > 0, projection, 1.0))
            return _codes.pack(codes.ravel()[: x.size], self.bits), scales

        group = math.lcm(block, _codes.period(self.bits))
        return Compressed(Payload(*_rows.whole_then_rest(encode, group, x)))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        (n,) = like.shape
        codes = _codes.unpack(payload.main, self.bits, n)
        scales = jnp.where(jnp.isfinite(payload.side), payload.side, jnp.nan)
        scales = jnp.repeat(scales, min(self.block, n))[:n]
        return scales * _look_up(codes, _centroids(self.bits))


def _look_up(codes: jax.Array, centroids: np.ndarray) -> jax.Array:
    # A choice among few is vectorized, where a gather is not.
    values = centroids.astype(np.float32)
    out = jnp.full(codes.shape, values[0])
    for code in range(1, len(values)):
        out = jnp.where(codes >= code, values[code], out)
    return out


@functools.cache
def _centroids(bits: int) -> np.ndarray:
    """Each the mean between bounds half-way to its neighbors, by Newton's method."""
    centroids = np.linspace(-2.0, 2.0, 2**bits) if bits > 1 else np.array([-1.0, 1.0])
    for _ in range(12):
        bounds = np.array([-math.inf, *(centroids[1:] + centroids[:-1]) / 2, math.inf])
        density = np.array([math.exp(-b * b / 2) / math.sqrt(2 * math.pi) for b in bounds])
        below = np.array([0.5 * (1 + math.erf(b / math.sqrt(2))) for b in bounds])
        mass = np.diff(below)
        means = -np.diff(density) / mass
        # How far a mean follows a centroid, through the bound that the two share.
        ends = np.where(np.isfinite(bounds), bounds, 0.0)
        up = density[1:] * (ends[1:] - means) / (2 * mass)
        down = density[:-1] * (means - ends[:-1]) / (2 * mass)
        slope = np.diag(up + down) + np.diag(up[:-1], 1) + np.diag(down[1:], -1)
        centroids += np.linalg.solve(np.eye(len(centroids)) - slope, means - centroids)
    return centroids
