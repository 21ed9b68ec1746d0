"""Votes on the signs of the largest coefficients, with noise: DataLens.

The accountant takes an extra: `pip install -e ".[privacy]"`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fftgrad import _axes
from fftgrad._contracts import (
    Averaged,
    AxisName,
    Comm,
    Compressed,
    Exchange,
    Like,
    Payload,
    PyTree,
    Quantizer,
    State,
    Step,
)
from fftgrad._values import check_count, check_kind, check_within, value
from fftgrad.codecs import _quantizers, _top_k
from fftgrad.codecs._chain import chain
from fftgrad.codecs._top_k import TopK
from fftgrad.exchanges import _bucketing, _parts, _quantized_all_reduce
from fftgrad.exchanges._all_gather import AllGather
from fftgrad.exchanges._bucketing import Bucketing
from fftgrad.ops import _codes, _finite
from fftgrad.ops._random import check_key
from fftgrad.training._gradients import ONE_VOTE, refuse_weight, widened
from fftgrad.training._pmean import compressed_pmean

__all__ = ["TopVotes", "epsilon", "scale_by_datalens", "sensitivity"]

NOISE = 1
"""What the key of the noise is folded with."""

GRID_BITS = 10
"""The noise is a multiple of a power of two, about so much smaller than its deviation."""

TIE = 1e-6
"""A mean of votes this near the threshold is at it: 3 · float32(1/10) is above 0.3."""


@value
class TopVotes(Exchange):
    """Exchange: each worker votes on the signs of its k largest values; their mean, with noise.

    With S_i the positions of the k largest of |x_i|, worker i votes

        v_i = sign(x_i) on S_i,  0 elsewhere,      mean = (Σ_i v_i + z) / w,   z ~ N(0, sigma² I),

    or, with `clip`, by chance: P(v = 1) = 1/2 + x / 2b on S_i, with b the smaller of `clip` and the
    largest |x_i|. Any other gradient of a worker moves the sum by at most √(4k) = 2√k in length, so
    that noise bounds what the mean tells of it: `fg.contrib.votes.epsilon` has the figures,
    `fg.contrib.votes.scale_by_datalens` the threshold.

    All workers draw the same noise, from `step.shared`. It covers the mean and the trained model if
    the key of `compressed_pmean` is secret; its default, 0, is not. It protects no worker from
    another.

    Args:
      workers: w, the number of workers.
      fraction: share of the n values of a part that a worker votes on; k = ceil(fraction · n).
      k: how many of each part, instead; all n where n < k.
      sigma: the standard deviation of the noise on the sum of votes; 0 for none.
      clip: b, for votes by chance; None for plain signs.

    Wire: the smaller in a ring of: a gather of 4 bytes and, for each vote, 1.6 bits and the
      position as in `TopK`; and a sum of digits of base 2w + 1, as in `QuantizedAllReduce`,
      4 ceil(n/d) + 4 bytes with d = floor(32 / log2(2w + 1)). At 1 % of 2^20 values the sum is
      smaller from 223 workers on. One collective.

    Claims: biased. All workers get the same bits. The votes of the worker and the noise count as
      sent, so the mean is that of what was sent. Zeros do not vote. If anything is not finite
      anywhere the mean is NaN throughout, which is not private.

    Differs from the paper: votes travel to all workers, without a server; the threshold comes
      after the exchange; zero votes for nothing, where the paper draws; no random projection.

    Raises:
      ValueError: while tracing, if the axis has not `workers` workers, or noise is to be drawn and
        the step has no key, or the gradients are sharded over other axes of the mesh.

    Example:
      >>> exchange = fg.contrib.votes.TopVotes(workers=2, k=2)
      >>> x = jnp.array([[4.0, -1.0, 0.5], [2.0, 0.5, -3.0]])
      >>> comm = fg.exchanges.Comm("data", fg.Step.of(0))
      >>> mean = lambda x: exchange.mean(x, exchange.init(x), comm).mean
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

    def __post_init__(self) -> None:
        _top_k.check_size("TopVotes", self.fraction, self.k)
        _quantizers.check_clip("TopVotes", self.clip)
        # So that a digit of a sum of votes has at most 16 bits.
        check_count("TopVotes(workers)", self.workers, "use that of the axis.", most=(1 << 15) - 1)
        check_within("TopVotes(sigma)", self.sigma, "[0, inf)", "use 0 for no noise.")

    def init(self, like: PyTree) -> State:
        return self._gather.init(like)

    def votes(self, like: PyTree) -> int:
        """Number of values of all parts together on which a worker votes."""
        parts = _parts.vector_likes(like)
        return sum(_top_k.kept(self.fraction, self.k, part.shape[0]) for part in parts)

    def mean(self, x: PyTree, state: State, comm: Comm) -> Averaged:
        _axes.check_workers("TopVotes", self.workers, comm.axis_name)
        if self.sigma:
            _check_whole(x, comm.axis_name)
        way = self._gather.mean if self._is_gathered(x) else self._summed
        out = way(x, state, comm)
        if not self.sigma:
            return out
        draws = _parts.rebuild(_normal(comm.step.shared, x, self.sigma), x)

        def noisy(mean: jax.Array, noise: jax.Array) -> jax.Array:
            # Of the whole sum, or the last bits would tell what of it is noise.
            return (jnp.round(mean * self.workers) + noise) * (1.0 / self.workers)

        return out._replace(
            mean=jax.tree.map(noisy, out.mean, draws),
            error=jax.tree.map(lambda error, noise: error - noise / self.workers, out.error, draws),
        )

    def wire_bytes(self, like: PyTree) -> int:
        return self._gather.wire_bytes(like) if self._is_gathered(like) else self._sum_bytes(like)

    @property
    def _gather(self) -> AllGather:
        return AllGather(chain(TopK(self.fraction, self.k), Vote(self.clip)))

    def _is_gathered(self, like: PyTree) -> bool:
        # Over a ring: w - 1 payloads, or 2 (w - 1) / w sums.
        return self.workers * self._gather.wire_bytes(like) <= 2 * self._sum_bytes(like)

    def _sum_bytes(self, like: PyTree) -> int:
        sizes = [part.shape[0] for part in _parts.vector_likes(like)]
        return 4 * (1 + _quantized_all_reduce.words(sizes, 1, self.workers))

    def _summed(self, x: PyTree, state: State, comm: Comm) -> Averaged:
        codec, likes = _parts.codec_of(self._gather.codec, x), _parts.vector_likes(x)
        vectors = _parts.vectors(x)
        payloads = codec.compress(vectors, state.own, comm.step).payloads
        votes = codec.decompress(payloads, likes, comm.step)
        sums, (bad,) = _quantized_all_reduce.add(
            votes, 1, comm, flags=[~_finite.all_finite(vectors)]
        )
        start = _finite.poison_unless(bad == 0)
        return Averaged(
            mean=_parts.rebuild([start + whole * (1.0 / self.workers) for whole in sums], x),
            error=jax.tree.map(jnp.subtract, x, _parts.rebuild(votes, x)),
            state=state,
        )


def _check_whole(x: PyTree, axis_name: AxisName) -> None:
    others = frozenset[str]().union(*(_axes.beside(leaf, axis_name) for leaf in jax.tree.leaves(x)))
    if others:
        raise ValueError(
            "TopVotes(sigma): must be 0 where gradients are sharded over other axes, because all "
            "shards have the same noise, and the difference of two tells their votes, got "
            f"gradients that may vary over {sorted(others)}; vote on whole gradients, and under "
            "check_vma=True if they are copies."
        )


def _normal(key: jax.Array | None, like: PyTree, scale: float) -> list[jax.Array]:
    """Draw Gaussian noise for each part, by threefry."""
    if key is None:
        raise ValueError(
            "TopVotes.mean(comm): noise is drawn, got a step without a key; pass "
            "Comm(axis_name, fg.Step.of(key)), with another key for each call."
        )
    # Folded, because codecs draw with the same key.
    own = jax.random.fold_in(key, NOISE)
    # On a grid on which votes are too, so that no last bit tells a vote from the noise, and sums
    # round alike in all programs.
    grid = min(1.0, 2.0 ** (math.floor(math.log2(scale)) - GRID_BITS))
    return [
        grid * jnp.round(scale / grid * jax.random.normal(jax.random.fold_in(own, i), part.shape))
        for i, part in enumerate(_parts.vector_likes(like))
    ]


@value
class Vote(Quantizer):
    """Quantizer: -1, 0 or 1 for each value that `TopVotes` selects; the header tells of a NaN."""

    clip: float | None = None

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        _quantizers.check_real("Vote", x)
        up = x > 0
        if self.clip is not None:
            bound = jnp.minimum(_finite.largest(x), self.clip)
            up = _quantizers.uniform_noise(self, step, x.size) < 0.5 + _quantizers.in_units(
                x, bound, 0.5
            )
        digits = jnp.where(x == 0, 1, jnp.where(up, 2, 0)).astype(jnp.uint32)
        return Compressed(Payload(_codes.pack_digits(digits, 3)))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        return _codes.unpack_digits(payload.main, 3, math.prod(like.shape)).astype(jnp.float32) - 1


def scale_by_datalens(
    votes: TopVotes,
    beta: float = 0.1,
    alpha: float = 1.0,
    *,
    key: jax.Array | int | None = None,
    bucketing: Bucketing = Bucketing(),
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    """Method: votes on the signs of each worker's largest values, with noise, above a threshold.

        f = Σ_i v_i + N(0, sigma²),    update = alpha · (1 if f > beta w, -1 if f < -beta w, else 0)

    This is the paper's TopAgg. `fg.contrib.votes.epsilon(votes, params, ...)` bounds what the
    updates, or a model trained with them, tell of one worker's gradients; docs/privacy.md says
    against whom.

    Args:
      votes: how the workers vote, and the noise.
      beta: the share of the votes that has to be left of either sign.
      alpha: the size of an update that is not zero.
      key: a secret key, equal on all workers; needed for noise. All 2^32 seeds can be tried, so
        take 64 bits from the operating system:
        `jax.random.wrap_key_data(np.frombuffer(os.urandom(8), np.uint32))`.
      bucketing: which leaves are voted on together; see `Bucketing`.
      axis_name: the axis of the workers.

    Returns:
      An optax transformation whose updates are -alpha, 0 and alpha: to be chained before
      `optax.scale` or `optax.sgd`.

    Wire: that of `votes`.

    Claims: biased; no memory. All workers get the same updates. A step in which a gradient is not
      finite gives updates that are not, which is not private.

    Differs from the paper: there teachers vote on the gradients of generated data, and nothing else
      of them is released; here workers vote on their own gradients. Otherwise as `TopVotes` does.

    Raises:
      ValueError: if there is noise and no key.

    Example:
      >>> import optax
      >>> votes = fg.contrib.votes.TopVotes(workers=8, fraction=0.01)
      >>> tx = optax.chain(fg.contrib.votes.scale_by_datalens(votes, beta=0.1), optax.sgd(1e-3))

    References:
      Wang et al., CCS 2021, arXiv:2103.11109.
    """
    check_kind(
        "scale_by_datalens(votes)", votes, TopVotes, "use TopVotes(workers=8, fraction=0.01)."
    )
    check_within("scale_by_datalens(beta)", beta, "[0, inf)", "use beta=0.1.")
    check_within("scale_by_datalens(alpha)", alpha, "(0, inf)", "use alpha=1.")
    if votes.sigma and key is None:
        raise ValueError(
            "scale_by_datalens(key): must be a secret key, which draws the noise, got none with "
            f"sigma={votes.sigma}; pass jax.random.wrap_key_data(np.frombuffer(os.urandom(8), "
            "np.uint32)), the same on all workers."
        )
    if key is not None:
        check_key("scale_by_datalens(key)", key)
    pmean = compressed_pmean(
        votes, axis_name=axis_name, bucketing=bucketing, key=0 if key is None else key
    )

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, Any]:
        refuse_weight("scale_by_datalens", extra.get("weight"), *ONE_VOTE)
        # Wide, because a mean rounded to a leaf's dtype may pass the threshold.
        mean, state = pmean.update(widened(updates), state, params, **extra)

        def counted(share: jax.Array, own: jax.Array) -> jax.Array:
            # The sign of a NaN is NaN.
            sign = jnp.where(jnp.abs(share) <= beta + TIE, 0.0, jnp.sign(share))
            return (alpha * sign).astype(own.dtype)

        return jax.tree.map(counted, mean, updates), state

    return optax.GradientTransformationExtraArgs(pmean.init, update)


def sensitivity(votes: TopVotes, like: PyTree, *, bucketing: Bucketing = Bucketing()) -> float:
    """Function: the L2 sensitivity of a step's sum of votes to one worker's gradient.

    A worker has at most K = Σ_j k_j votes of size one, over the parts j of all buckets. Another
    gradient moves the sum by at most √(4K): by 2 on the same K coordinates.

    Args:
      votes: the exchange.
      like: gradients or parameters, or their shapes.
      bucketing: that of the training.

    Example:
      >>> from fftgrad.contrib import votes
      >>> noisy = votes.TopVotes(workers=8, k=25)
      >>> votes.sensitivity(noisy, {"w": jnp.zeros((10, 10)), "b": jnp.zeros(10)})
      10.0

    References:
      Wang et al., CCS 2021, arXiv:2103.11109.
    """
    check_kind("sensitivity(votes)", votes, TopVotes, "pass the TopVotes of the training.")
    buckets = _bucketing.bucket_likes(like, bucketing.for_exchange(votes))
    return math.sqrt(4 * sum(map(votes.votes, buckets)))


def epsilon(
    votes: TopVotes, like: PyTree, *, steps: int, delta: float, bucketing: Bucketing = Bucketing()
) -> float:
    """Function: the ε for which all steps together are (ε, δ)-differentially private.

    Neighbors differ in all votes of one worker, in every step. So a record is covered too, as long
    as no two workers have it in the same step. Google's dp-accounting composes one Gaussian
    mechanism for each step, without a gain by sampling, because a worker votes in every step.
    docs/privacy.md says what else leaves the workers, and is not counted.

    Args:
      votes: the exchange.
      like: gradients or parameters, or their shapes.
      steps: number of steps of training.
      delta: δ, well below one over the number of workers or records.
      bucketing: that of the training.

    Returns:
      ε, by the best of the accountant's Rényi orders; infinite without noise.

    Example:
      >>> from fftgrad.contrib import votes
      >>> noisy = votes.TopVotes(workers=1000, k=25, sigma=100.0)
      >>> round(votes.epsilon(noisy, jnp.zeros(1000), steps=100, delta=1e-5), 2)
      4.73

    References:
      Mironov, CSF 2017, arXiv:1702.07476. Wang et al., CCS 2021, arXiv:2103.11109.
    """
    steps = check_count("epsilon(steps)", steps, "count all steps.")
    check_within("epsilon(delta)", delta, "(0, 1)", "use delta=1e-5.")
    try:
        import dp_accounting
        from dp_accounting import rdp
    except ImportError as error:
        raise ImportError(
            "epsilon(): needs dp-accounting, got none; run pip install -e '.[privacy]' in the "
            "folder of the repository"
        ) from error
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    accountant: Any = rdp.RdpAccountant(neighboring_relation=relation)
    noise = votes.sigma / sensitivity(votes, like, bucketing=bucketing)
    accountant.compose(dp_accounting.GaussianDpEvent(noise), steps)
    return float(accountant.get_epsilon(delta))
