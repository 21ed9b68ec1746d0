"""A mean of gathered payloads, for codecs that are not summable."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad._contracts import Averaged, Comm, PyTree, State, Step
from fftgrad._values import check_kind, value
from fftgrad.codecs import _quantizers
from fftgrad.exchanges import _parts
from fftgrad.exchanges._parts import OfCodec, Parts, Payloads, Vectors
from fftgrad.ops import _shapes, _wire


@value
class AllGather(OfCodec):
    """Exchange: every worker sends its payload to all, and each worker decodes and averages them.

    Each payload travels as one uint32 buffer in one collective. If the codec begins with a linear
    transform, such as `Fft`, the decoded coefficients of all workers are added before one inverse
    transform. They are added in the order of the workers, so that all replicas get the same bits.

    Args:
      codec: a codec, usually a chain such as `chain(Fft(), TopK(fraction=0.1), LogQuantizer(8))`;
        or a rule, a function from the name and the shape of a part to its codec.
      clip_to_median: True to clip the norm of each worker's vector to the median norm, part by
        part: mean of v_i · min(1, median_j ||v_j|| / ||v_i||), with the median over the non-zero
        vectors. This protects against workers with bad data or a high learning rate: the norm of
        the mean is at most the median, and a minority of the workers with non-zero vectors cannot
        raise the median above the norms of all other workers. Every payload is decoded twice.

    Wire: 4 bytes for the header, and main and side of every part: `fg.wire_bytes(exchange, x)`. A
      ring sends these bytes w - 1 times, so the traffic grows with w.

    Claims: unbiased if the codec is unbiased and no vector is clipped.

    Differs from the paper: the median of an even number of norms is the mean of the middle two; the
      authors' code takes the smaller of these.

    Example:
      >>> exchange = fg.AllGather(fg.TopK(k=1))
      >>> x = jnp.array([[4.0, 1.0], [1.0, 2.0]])
      >>> mean = lambda x: exchange.mean(x, exchange.init(x), fg.exchanges.Comm("data")).mean
      >>> jax.vmap(mean, axis_name="data")(x)[0]
      Array([2., 1.], dtype=float32)

    References:
      The clip: "Covenant-72B", 2026, arXiv:2603.08163.
    """

    clip_to_median: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kind("AllGather(clip_to_median)", self.clip_to_median, bool, "use True or False.")

    def init(self, like: PyTree) -> State:
        return State(own=_parts.codec_of(self.codec, like).init())

    def mean(self, x: PyTree, state: State, comm: Comm) -> Averaged:
        codec, step = _parts.codec_of(self.codec, x), comm.step
        vectors = _parts.vectors(x)
        out = codec.compress(vectors, state.own, step)
        error = codec.error(vectors, out, step)
        got, stats = comm.gather(out.payloads, of=vectors, overflow=out.overflow)
        if self.clip_to_median:
            shares = jnp.full((comm.workers,), 1 / comm.workers, jnp.float32)
            every = clipped_mean(codec, got, shares, step)
            mean = tuple(stats.poison + vector for vector in every)
        else:
            mean = codec.mean(got, stats.poison, step)
        return Averaged(
            mean=_parts.rebuild(mean, x),
            error=_parts.rebuild(error, x),
            state=State(own=out.state),
            stats=stats,
        )

    def wire_bytes(self, like: PyTree) -> int:
        return _wire.nbytes(_parts.codec_of(self.codec, like).payload_spec)


def clipped_mean(codec: Parts, sent: Payloads, shares: jax.Array, step: Step) -> Vectors:
    """Average the vectors of workers, after clipping their norms to the median norm.

    The median is over the workers with a positive share of the mean and a non-zero vector. `sent`
    holds the stacked payloads of all workers.
    """

    def decode(payloads: Payloads) -> Vectors:
        return codec.decompress_groups(payloads, step)

    def lengths(payloads: Payloads) -> jax.Array:
        rows = [vectors.reshape(-1, vectors.shape[-1]) for vectors in decode(payloads)]
        return jnp.concatenate([_quantizers.row_norms(group)[1] for group in rows])

    norms = lax.map(lengths, sent)  # [workers, parts]; a loop holds one decoded payload at a time
    counts = (shares > 0)[:, None]
    speaks = counts & (norms != 0)
    ordered, number = jnp.sort(jnp.where(speaks, norms, jnp.inf), axis=0), jnp.sum(speaks, axis=0)
    middle = jnp.stack([jnp.maximum(number - 1, 0) // 2, number // 2])
    median = jnp.mean(jnp.take_along_axis(ordered, middle, axis=0), axis=0)
    clip = jnp.minimum(1.0, median[None] / _quantizers.divisor(norms))
    weights = shares[:, None] * jnp.where(counts, clip, 0.0)

    def add(totals: Vectors, row: Any) -> tuple[Vectors, None]:
        payloads, own = row
        own = _shapes.cut(own, list(map(len, codec.groups)))
        each = zip(totals, own, decode(payloads), strict=True)
        return tuple(t + w.reshape(*v.shape[:-1], 1) * v for t, w, v in each), None

    like = jax.eval_shape(decode, jax.tree.map(lambda leaf: leaf[0], sent))
    zeros = tuple(jnp.zeros(v.shape, v.dtype) for v in like)
    return codec.apart(lax.scan(add, zeros, (sent, weights))[0])  # in the order of the workers
