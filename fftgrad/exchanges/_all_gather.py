"""A mean of payloads that cannot be summed as they are."""

import dataclasses

import jax
import jax.numpy as jnp

from fftgrad import _axes
from fftgrad._contracts import AxisName, Exchange, PyTree, Reduced, Scope, Step
from fftgrad._values import check_kind, constructor_call
from fftgrad.exchanges import _alike, _counts, _parts, _wire
from fftgrad.exchanges._averages import Average
from fftgrad.exchanges._parts import Likes, Parts, Vectors
from fftgrad.exchanges._per_worker import PerWorker, add_worker_axis, drop_worker_axis
from fftgrad.exchanges._rules import Codecs
from fftgrad.ops import _finite


@dataclasses.dataclass(frozen=True, repr=False)
class AllGather(Exchange):
    """Exchange: every worker sends its payload to all, and all decode and average all of them.

    Each payload travels as one uint32 buffer in one collective. The codec's summable prefix (a
    linear transform) is undone once, after the sum: w payloads cost one inverse FFT. Payloads are
    added in the order of the workers, so that all replicas get the same bits.

    With 4 workers that send the buffers b_0 ... b_3, each of words uint32[s], every worker
    receives uint32[4, s] = [b_0, b_1, b_2, b_3].

    If anything that any worker had to send is not finite, or a buffer is not what a worker of the
    same codec made in this step, the mean is NaN throughout, on all workers: the headers of the
    buffers tell, without a further collective.

    Args:
      codec: a codec, usually a chain such as `chain(Fft(), TopK(fraction=0.1), LogLevels(8))`;
        or a rule, a function from the name and the shape of a part to its codec.
      average: what takes the place of the mean where a worker may be off, as
        `MedianNormClip()` or `TrimmedMean(trim=1)`; every payload is then decoded on its own.

    Shapes: x float32[...], or a tuple of parts -> mean, sent of the same shapes.

    Wire: 8 bytes + main and side of every part, `fg.wire_bytes(exchange, x)`. A ring sends it
      w - 1 times, so the traffic grows with w.

    Claims: unbiased if the codec is and no other average is taken; all workers get the same bits.

    Raises:
      ValueError: while tracing, if the codec does not fit the shape.

    Example:
      >>> import fftgrad as fg
      >>> import jax, jax.numpy as jnp
      >>> exchange = fg.AllGather(fg.TopK(k=1))
      >>> x = jnp.array([[4.0, 1.0], [1.0, 2.0]])
      >>> mean = lambda x: exchange.mean(x, exchange.init(x), fg.Step(), "data").mean
      >>> jax.vmap(mean, axis_name="data")(x)[0]
      Array([2., 1.], dtype=float32)
    """

    codec: Codecs
    average: Average | None = None

    __repr__ = constructor_call

    def __post_init__(self) -> None:
        _parts.check_codec("AllGather", self.codec)
        if self.average is not None:
            check_kind("AllGather(average)", self.average, Average, "use MedianNormClip().")

    @property
    def scope(self) -> Scope:
        return _parts.scope_of(self.codec)

    def init(self, like: PyTree) -> PerWorker:
        codec = _parts.codec_of(self.codec, like)
        return add_worker_axis(codec.init(_parts.vector_likes(like)))

    def mean(self, x: PyTree, state: PerWorker, step: Step, axis_name: AxisName) -> Reduced:
        codec = _parts.codec_of(self.codec, x)
        vectors, likes = _parts.vectors(x), _parts.vector_likes(x)
        before = drop_worker_axis(state)
        out = codec.compress(vectors, before, step)
        sent = codec.decompress(out.payloads, likes, step)
        overflow = _counts.zero_unless(step.counts, out.overflow)
        header = _wire.Header(_alike.all_finite(vectors), _counts.marked(overflow, step))
        seed = _wire.seed(codec.codecs, likes, step)
        buffers = _axes.all_gather(_wire.pack(header, out.payloads, seed), axis_name)
        headers, means = decode_mean(codec, buffers, likes, step, self.average)
        overflow, workers = _counts.read(headers.overflow, step)
        return Reduced(
            mean=_parts.rebuild(means, x),
            sent=_counts.zero_unless(step.counts, _parts.rebuild(sent, x)),
            finite=jnp.all(headers.finite) & _alike.all_finite(means),
            overflow=overflow,
            state=add_worker_axis(_counts.kept_unless(step.counts, out.state, before)),
            workers=workers,
            invalid=_wire.count_invalid(headers),
        )

    def wire_bytes(self, like: PyTree) -> int:
        codec = _parts.codec_of(self.codec, like)
        return _wire.nbytes(codec.payload_spec(_parts.vector_likes(like)))


def decode_mean(
    codec: Parts, buffers: jax.Array, likes: Likes, step: Step, average: Average | None = None
) -> tuple[_wire.Header, Vectors]:
    """The headers of buffers uint32[w, s], stacked, and the means of what the buffers stand for.

    They are means over all workers, of whom those that do not count have zeros, whatever they sent:
    a codec may make something of zeros. Summed after the codecs' summable prefix, so that w
    payloads cost one inverse transform.
    """
    like, seed = codec.payload_spec(likes), _wire.seed(codec.codecs, likes, step)
    headers, payloads = jax.vmap(lambda words: _wire.unpack(words, like, seed))(buffers)
    start = _finite.poison_unless(jnp.all(headers.finite))
    counts = _counts.which(headers.overflow, step)
    if average is None:
        some = None if step.counts is None else counts
        return headers, codec.mean(payloads, likes, start, step, some)
    vectors = average.of(lambda p: codec.decompress(p, likes, step), payloads, counts)
    share = jnp.mean(counts.astype(jnp.float32))
    return headers, tuple(start + share * vector for vector in vectors)
