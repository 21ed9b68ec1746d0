"""Votes on the signs of the largest values, summed, with noise."""

import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from fftgrad import _axes
from fftgrad._contracts import (
    AxisName,
    Channel,
    Compressed,
    Exchange,
    Like,
    Payload,
    PyTree,
    Quantizer,
    Reduced,
    State,
    Step,
)
from fftgrad._values import check_choice, check_count, value
from fftgrad.codecs._chain import chain
from fftgrad.codecs.quantizers import _scale, _ternary
from fftgrad.codecs.selectors import _top_k
from fftgrad.codecs.selectors._top_k import TopK
from fftgrad.exchanges import _digit_sum, _parts
from fftgrad.exchanges._all_gather import AllGather
from fftgrad.exchanges._all_reduce import AllReduce
from fftgrad.exchanges._parts import Vectors
from fftgrad.ops import _finite, _joined
from fftgrad.ops.packing import _digits

Noise = Literal["shared", "local"]

NOISE = 1
"""What the key of the noise is folded with."""

GRID_BITS = 10
"""The noise is a multiple of a power of two, about so much smaller than its deviation."""


@value
class TopVotes(Exchange):
    """Exchange: each worker votes on the signs of its k largest values; their mean, with noise.

    With S_i the positions of the k largest of |x_i|, worker i votes

        v_i = sign(x_i) on S_i,  0 elsewhere,      mean = (Σ_i v_i + z) / w,   z ~ N(0, sigma² I),

    or, with `clip`, by chance: P(v = 1) = 1/2 + x / 2b on S_i, with b the smaller of `clip` and the
    largest |x_i|. Whatever a worker has to say, it moves the sum by at most √(4k) = 2√k in
    length, so that noise bounds what the mean tells of it: `fftgrad.contrib.votes.epsilon` has the
    figures, `fg.contrib.votes.scale_by_datalens` the threshold that belongs to it.

    The noise protects only against those who do not know it. "shared" is drawn from `step.shared`,
    which all workers have: it covers what others learn of the mean or the trained model, if nobody
    else has the key of `compressed_pmean`, whose default, 0, everybody has. "local" is the sum of
    shares of variance sigma² / w, each drawn from `step.local`: if every worker has its own key and
    the sum is a secure one, which JAX's is not, c workers together face (w - c) / w of the
    variance. The page on privacy has the table.

    Args:
      workers: w, the number of workers: how the votes travel follows from it.
      fraction: share of the n values of a part that a worker votes on; k = ceil(fraction · n).
      k: how many of each part, instead; all n where n < k.
      sigma: the standard deviation of the noise on the sum of votes; 0 for none.
      clip: b, for votes by chance; None for plain signs.
      noise: who draws it, "shared" or "local".

    Shapes: x float32[...], or a tuple of parts -> mean, sent of the same shapes.

    Wire: where no noise has to be added before the sum, the smaller in a ring of: a gather of 8
      bytes and, for each vote, 1.6 bits and the position as in `TopK`; and a sum of digits of base
      2w + 1, as in `IntegerSum`, 4 ceil(n/d) + 4 bytes with d = floor(32 / log2(2w + 1)). At 1 % of
      2^20 values the sum is smaller from 223 workers on. With local noise 4n bytes, in float32.
      One collective.

    Claims: biased. All workers get the same bits. `sent` is the votes of the worker with its share
      of the noise, so the mean is that of `sent`; `ErrorFeedback` makes little sense for votes.
      Zeros do not vote. If anything is not finite anywhere the mean is NaN throughout, which is not
      private.

    Differs from the paper: votes travel to all workers, without a server; the threshold comes
      after the exchange; zero votes for nothing, where the paper draws; no random projection.

    Raises:
      ValueError: unless exactly one of `fraction` and `k` is given, or if an argument is out of
        range; while tracing, if the axis has not `workers` workers, or noise is to be drawn and the
        step has no key, or the gradients are sharded over other axes of the mesh.
      TypeError: if a size is traced.

    Example:
      >>> exchange = fg.contrib.votes.TopVotes(workers=2, k=2)
      >>> x = jnp.array([[4.0, -1.0, 0.5], [2.0, 0.5, -3.0]])
      >>> channel = fg.exchanges.Channel("data", fg.Step.of(0))
      >>> mean = lambda x: exchange.mean(x, exchange.init(x), channel).mean
      >>> jax.vmap(mean, axis_name="data")(x)[0]
      Array([ 1. , -0.5, -0.5], dtype=float32)

    References:
      Wang et al., CCS 2021, arXiv:2103.11109.
    """

    workers: int
    fraction: float | None = None
    k: int | None = None
    sigma: float = 0.0
    clip: float | None = None
    noise: Noise = "shared"

    def __post_init__(self) -> None:
        _top_k.check_size("TopVotes", self.fraction, self.k)
        _ternary.check_clip("TopVotes", self.clip)
        check_choice("TopVotes(noise)", self.noise, get_args(Noise))
        check_count("TopVotes(workers)", self.workers, "use that of the axis.")
        if _digit_sum.base(1, self.workers) > 1 << 16:
            raise ValueError(
                f"TopVotes(workers): must be positive and below 32768, got {self.workers}; use "
                "that of the axis."
            )
        if not 0 <= self.sigma < math.inf:
            raise ValueError(
                f"TopVotes(sigma): must be finite and not negative, got {self.sigma}; use 0 for no "
                "noise."
            )

    @property
    def takes_weight(self) -> bool:
        return False

    def init(self, like: PyTree) -> State:
        return self._gather.init(like)

    def votes(self, like: PyTree) -> int:
        """On how many values of all parts together a worker votes."""
        parts = _parts.vector_likes(like)
        return sum(_top_k.kept(self.fraction, self.k, part.shape[0]) for part in parts)

    def mean(self, x: PyTree, state: State, channel: Channel) -> Reduced:
        _axes.check_workers("TopVotes", self.workers, channel.axis_name)
        if self.sigma:
            _check_whole(x, channel.axis_name)
        if self._is_local:
            return self._with_own_noise(x, state, channel)
        way = self._gather.mean if self._is_gathered(x) else self._summed
        out = way(x, state, channel)
        if not self.sigma:
            return out
        draws = _parts.rebuild(_normal(channel.step.shared, x, self.sigma), x)

        def noisy(mean: jax.Array, noise: jax.Array) -> jax.Array:
            # Of the whole sum, or the last bits would tell what of it is noise.
            return (jnp.round(mean * self.workers) + noise) * (1.0 / self.workers)

        return out._replace(
            mean=jax.tree.map(noisy, out.mean, draws),
            sent=jax.tree.map(lambda votes, noise: votes + noise / self.workers, out.sent, draws),
        )

    def wire_bytes(self, like: PyTree) -> int:
        if self._is_local:
            return AllReduce().wire_bytes(like)
        return self._gather.wire_bytes(like) if self._is_gathered(like) else self._sum_bytes(like)

    @property
    def _is_local(self) -> bool:
        """Whether noise is added before the sum, which then has to be one of floats."""
        return self.noise == "local" and self.sigma > 0

    @property
    def _gather(self) -> AllGather:
        return AllGather(chain(TopK(self.fraction, self.k), Vote(self.clip)))

    def _is_gathered(self, like: PyTree) -> bool:
        # Over a ring: w - 1 payloads, or 2 (w - 1) / w sums.
        return self.workers * self._gather.wire_bytes(like) <= 2 * self._sum_bytes(like)

    def _sum_bytes(self, like: PyTree) -> int:
        sizes = [part.shape[0] for part in _parts.vector_likes(like)]
        return 4 * (1 + _digit_sum.words(sizes, 1, self.workers))

    def _own(self, x: PyTree, state: State, step: Step) -> tuple[Vectors, jax.Array]:
        """The votes of this worker, and whether what they come from is finite."""
        codec, likes = _parts.codec_of(self._gather.codec, x), _parts.vector_likes(x)
        vectors = _parts.vectors(x)
        payloads = codec.compress(vectors, state.own, step).payloads
        return codec.decompress(payloads, likes, step), _finite.all_finite(vectors)

    def _summed(self, x: PyTree, state: State, channel: Channel) -> Reduced:
        votes, finite = self._own(x, state, channel.step)
        sums, (bad,) = _digit_sum.add(votes, 1, channel, flags=[~finite])
        start = _finite.poison_unless(bad == 0)
        return Reduced(
            mean=_parts.rebuild([start + whole * (1.0 / self.workers) for whole in sums], x),
            sent=_parts.rebuild(votes, x),
            state=state,
        )

    def _with_own_noise(self, x: PyTree, state: State, channel: Channel) -> Reduced:
        votes, finite = self._own(x, state, channel.step)
        draws = _normal(channel.step.local, x, self.sigma / math.sqrt(self.workers))
        start = _finite.poison_unless(finite)
        noisy = [start + v + z for v, z in zip(votes, draws, strict=True)]
        whole, restore = _joined.as_one(noisy)
        # Divided after the sum, or the last bits of the terms would tell votes from noise.
        total = channel.sum(whole)
        return Reduced(
            mean=_parts.rebuild(restore(total * (1.0 / self.workers)), x),
            sent=_parts.rebuild(noisy, x),
            state=state,
        )


def _check_whole(x: PyTree, axis_name: AxisName) -> None:
    """Refuses shards of a model, which would all have the same noise, and votes of their own."""
    others = frozenset[str]().union(*(_axes.beside(leaf, axis_name) for leaf in jax.tree.leaves(x)))
    if others:
        raise ValueError(
            "TopVotes(sigma): must be 0 where gradients are sharded over other axes, or in "
            "Hierarchical, because each shard votes, with the same noise, so that a difference of "
            f"two tells the votes, got gradients that may vary over {sorted(others)}; vote on "
            "whole gradients, and under check_vma=True if they are copies."
        )


def _normal(key: jax.Array | None, like: PyTree, scale: float) -> list[jax.Array]:
    """Gaussian noise for each part, by a generator that is made to be unpredictable."""
    if key is None:
        raise ValueError(
            "TopVotes.mean(channel): noise is drawn, got a step without a key; pass "
            "Channel(axis_name, fg.Step.of(key)), with another key for each call."
        )
    # Apart from what codecs draw with the same key.
    own = jax.random.fold_in(key, NOISE)
    # On a grid on which votes are too, so that no last bit tells a vote from the noise, and what it
    # is added to rounds alike in all programs.
    grid = min(1.0, 2.0 ** (math.floor(math.log2(scale)) - GRID_BITS))
    return [
        grid * jnp.round(scale / grid * jax.random.normal(jax.random.fold_in(own, i), part.shape))
        for i, part in enumerate(_parts.vector_likes(like))
    ]


@value
class Vote(Quantizer):
    """Quantizer: -1, 0 or 1 for each value that `TopVotes` selects; zero does not vote.

    It has no place for a NaN: the header of the buffer tells. With `clip` it votes by chance.
    """

    clip: float | None = None

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        _scale.check_real("Vote", x)
        up = x > 0
        if self.clip is not None:
            bound = jnp.minimum(_finite.largest(x), self.clip)
            up = _scale.noise(self, step, x.size) < 0.5 + _scale.in_units(x, bound, 0.5)
        digits = jnp.where(x == 0, 1, jnp.where(up, 2, 0)).astype(jnp.uint32)
        return Compressed(Payload(_digits.pack(digits, 3)))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        return _digits.unpack(payload.main, 3, math.prod(like.shape)).astype(jnp.float32) - 1
