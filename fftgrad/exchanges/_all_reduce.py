"""Sums by an all-reduce: of payloads, or of small integers that are packed into words."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from fftgrad import _axes
from fftgrad._contracts import Averaged, Codec, Comm, Exchange, PyTree, Scope, Selector, State
from fftgrad._values import check, check_count, value
from fftgrad.codecs import _chain, _quantizers
from fftgrad.codecs._transforms import Identity
from fftgrad.exchanges import _parts
from fftgrad.exchanges._parts import Codecs, OfCodec, Parts, Payloads
from fftgrad.ops import _codes


@value
class AllReduce(OfCodec):
    """Exchange: sum the payloads with one all-reduce; without a codec, the dense mean.

    For w workers: mean = decompress(Σ_i compress(x_i / w)). The division comes first, so the sum
    is finite if the mean is.

    Args:
      codec: a summable codec, or a function from a part's name and shape to a summable codec.
        `Identity()` is the dense baseline: `jax.lax.pmean` in float32, for leaves of any dtype.

    Wire: the payload, 4n bytes for n values without a codec. A count of overflow adds 4 bytes. A
      ring sends 2 (w - 1) / w times as many. There is no header, because a sum propagates NaN.

    Claims: exact up to rounding.

    Raises:
      ValueError: if the codec is not summable.

    Example:
      >>> x = jnp.outer(jnp.arange(4.0), jnp.array([1.0, 2.0]))
      >>> exchange = fg.AllReduce()
      >>> mean = lambda x: exchange.mean(x, exchange.init(x), fg.exchanges.Comm("data")).mean
      >>> jax.vmap(mean, axis_name="data")(x)[0]
      Array([1.5, 3. ], dtype=float32)
    """

    codec: Codecs = Identity()

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.codec, Codec):
            _check_summable(self.codec)

    @property
    def scope(self) -> Scope | None:
        return None if self.codec == Identity() else super().scope

    def init(self, like: PyTree) -> State:
        return State(own=self._codec(like).init())

    def mean(self, x: PyTree, state: State, comm: Comm) -> Averaged:
        codec = self._codec(x)
        out = codec.compress(_parts.vectors(x), state.own, comm.step)
        leaves, structure = jax.tree.flatten(out.payloads)
        overflow = out.overflow if codec.counts_overflow else None
        means, stats = comm.mean(leaves, overflow=overflow)

        def decompress(leaves: list[jax.Array]) -> PyTree:
            payloads: Payloads = jax.tree.unflatten(structure, leaves)
            return _parts.rebuild(codec.decompress(payloads, comm.step), x)

        error = jax.tree.map(jnp.subtract, x, decompress(leaves))
        return Averaged(decompress(means), error, State(own=out.state), stats)

    def _codec(self, like: PyTree) -> Parts:
        codec = _parts.codec_of(self.codec, like)
        for part in codec.codecs:
            _check_summable(part)
        return codec


def _check_summable(codec: Codec) -> None:
    # If a codec sends all values, an all-gather soon takes more bytes than a dense all-reduce.
    selects = any(isinstance(stage, Selector) for stage in _chain.stages(codec))
    instead = f"AllGather({codec!r})" if selects else f"TwoStage({codec!r}, workers=w)"
    check(codec.summable, "AllReduce(codec)", "be summable", repr(codec), f"use {instead}.")


@value
class QuantizedAllReduce(Exchange):
    """Exchange: workers quantize with one shared scale, and an all-reduce sums packed integers.

    The scale s of a part is the largest magnitude over all workers, after clipping. Each value is
    rounded stochastically to q s / L with an integer q in -L ... L. The sum of q over w workers has
    2Lw + 1 possible values. A uint32 word holds as many digits of base 2Lw + 1 as fit, and one
    all-reduce of words adds all digits. No sum of digits reaches the base, so there is no carry.

    With few levels, the rounding noise is at least as large as the vector, and error feedback would
    accumulate the noise without bound. So use no memory, or L >= 7.

    Args:
      workers: w, the number of workers along the axis.
      levels: L; 1 is TernGrad.
      clip: largest magnitude, in root mean squares of the worker's part; None: no clipping.

    Wire: 4 ceil(n/d) bytes for a part of n values, with d = floor(32 / log2(2Lw + 1)) digits in a
      word, and 4 bytes for its scale, in two all-reduces. With L = 1, a value takes 3.2 bits for
      4 workers, 4.6 for 8, 5.3 for 16, and 8 for 64.

    Claims: unbiased without clipping.

    Differs from the paper: the authors' code sets the scale to clip · σ even if all values are
      smaller. The paper does not describe a collective for the sum.

    Example:
      >>> exchange = fg.exchanges.QuantizedAllReduce(workers=2, clip=None)
      >>> x = jnp.array([[4.0, 0.0], [4.0, 4.0]])
      >>> comm = fg.exchanges.Comm("data", fg.Step.of(0))
      >>> mean = lambda x: exchange.mean(x, exchange.init(x), comm).mean
      >>> jax.vmap(mean, axis_name="data")(x)[0]
      Array([4., 2.], dtype=float32)

    References:
      Wen et al., NeurIPS 2017, arXiv:1705.07878 (scaler sharing).
    """

    workers: int
    levels: int = 1
    clip: float | None = 2.5

    def __post_init__(self) -> None:
        _quantizers.check_clip("QuantizedAllReduce", self.clip)
        check_count("QuantizedAllReduce(workers)", self.workers, "use that of the axis.")
        check_count("QuantizedAllReduce(levels)", self.levels, "use levels=1.")
        total, argument = 2 * self.levels * self.workers, "QuantizedAllReduce(workers, levels)"
        rule = "have 2 · levels · workers below 65536"
        check(total < 1 << 16, argument, rule, f"{total}", "use levels=1.")

    def mean(self, x: PyTree, state: State, comm: Comm) -> Averaged:
        _axes.check_workers("QuantizedAllReduce", self.workers, comm.axis_name)
        step = comm.step
        steps = [step.fold(i) if i else step for i in range(len(jax.tree.leaves(x)))]
        clipped = [_quantizers.clipped(vector, self.clip) for vector in _parts.vectors(x)]
        tops = jnp.stack([top for _, top in clipped])
        # Send NaN as infinity, because XLA may drop a NaN from a maximum.
        shared = comm.max(jnp.where(jnp.isfinite(tops), tops, jnp.inf))
        scales = jnp.where(jnp.isfinite(shared), shared, jnp.nan)

        integers = [
            _quantizers.to_levels(
                vector, scale, self.levels, _quantizers.uniform_noise(self, own, vector.size)
            )
            for (vector, _), scale, own in zip(clipped, scales, steps, strict=True)
        ]
        sums = add(integers, self.levels, comm)
        means = [
            whole * (scale / (self.levels * self.workers))
            for whole, scale in zip(sums, scales, strict=True)
        ]
        sent = [part * (scale / self.levels) for part, scale in zip(integers, scales, strict=True)]
        error = jax.tree.map(jnp.subtract, x, _parts.rebuild(sent, x))
        return Averaged(_parts.rebuild(means, x), error)

    def wire_bytes(self, like: PyTree) -> int:
        many = 2 * self.levels * self.workers + 1
        return sum(4 + 4 * _codes.words_for_digits(n, many) for n in _parts.sizes(like))


def add(vectors: Sequence[jax.Array], levels: int, comm: Comm) -> list[jax.Array]:
    """Sum vectors of integers in -levels ... levels, float32[n], over the workers."""
    workers = comm.workers
    many = 2 * levels * workers + 1  # number of possible sums
    packed = [_codes.pack_digits((vector + levels).astype(jnp.uint32), many) for vector in vectors]
    total = comm.sum(jnp.concatenate(packed))
    sums: list[jax.Array] = []
    start = 0
    for vector in vectors:
        stop = start + _codes.words_for_digits(vector.size, many)
        digits = _codes.unpack_digits(total[start:stop], many, vector.size)
        sums.append(digits.astype(jnp.float32) - levels * workers)
        start = stop
    return sums
