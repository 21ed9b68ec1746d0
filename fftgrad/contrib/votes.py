"""DataLens: noisy votes on the signs of the largest coefficients.

The privacy accountant needs the extra `pip install -e ".[privacy]"`.
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
from fftgrad._values import check, check_count, check_kind, check_within, missing_extra, value
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
"""Number to fold into the shared key, so that noise and codecs have different draws."""

GRID_BITS = 10
"""The noise is a multiple of a power of two, about sigma / 2^GRID_BITS."""

TIE = 1e-6
"""Tolerance at the threshold for rounding errors: 3 · float32(1/10) is above 0.3."""


@value
class TopVotes(Exchange):
    """Exchange: the noisy mean of the workers' votes on the signs of their k largest values.

    With S_i the positions of the k largest of |x_i|, worker i votes

        v_i = sign(x_i) on S_i,  0 elsewhere,      mean = (Σ_i v_i + z) / w,   z ~ N(0, sigma² I).

    With `clip`, votes on S_i are random: for a value x, 1 with probability 1/2 + x / 2b, else -1,
    where b is the smaller of `clip` and the largest |x_i|. If the gradient of one worker changes,
    the L2 norm of the change of Σ_i v_i is at most 2√k. So the noise bounds the information about
    one worker: see `epsilon`. `scale_by_datalens` applies the paper's threshold.

    All workers draw the same noise from `step.shared`. The noise protects the mean and the trained
    model only if the key of `compressed_pmean` is secret, unlike the default key 0. Workers are not
    protected from each other.

    Args:
      workers: w, the number of workers.
      fraction: share of the n values of a part on which a worker votes; k = ceil(fraction · n).
      k: number of votes for each part instead of `fraction`; n votes if n < k.
      sigma: standard deviation of the noise on the sum of votes; 0 for no noise.
      clip: bound of the values for random votes; None for plain signs.

    Wire: one collective, the one with fewer link bytes. A gather has 4 bytes for the header and,
      for each vote, 1.6 bits and the position as in `TopK`. A sum of digits of base 2w + 1, as in
      `QuantizedAllReduce`, has 4 ceil(n/d) + 4 bytes with d = floor(32 / log2(2w + 1)). With 1 %
      votes on 2^20 values, the sum has fewer link bytes from 223 workers on. d is the number of
      digits in a 32-bit word.

    Claims: biased. All workers get the same bits. A worker's error is x_i - v_i - z / w, so the
      mean equals the mean of the sent values. The vote on a value 0 is 0. If a value of any worker
      is not finite, the whole mean is NaN, which is not private.

    Differs from the paper: votes travel to all workers, without a server. The threshold follows the
      exchange. The vote on 0 is 0, not a random sign. There is no random projection.

    Raises:
      ValueError: while tracing, if the axis does not have `workers` workers. With noise, also if
        the step has no key, or if gradients are sharded over other axes of the mesh.

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
        # A digit of a sum of votes has at most 16 bits.
        check_count("TopVotes(workers)", self.workers, "use that of the axis.", most=(1 << 15) - 1)
        check_within("TopVotes(sigma)", self.sigma, "[0, inf)", "use 0 for no noise.")

    def init(self, like: PyTree) -> State:
        return self._gather.init(like)

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
            # Round to the exact sum first, because rounding errors would reveal the noise.
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
        # In a ring, w - 1 payloads or 2 (w - 1) / w sums travel over a link.
        return self.workers * self._gather.wire_bytes(like) <= 2 * self._sum_bytes(like)

    def _sum_bytes(self, like: PyTree) -> int:
        return 4 * (1 + _quantized_all_reduce.words(_parts.sizes(like), 1, self.workers))

    def _summed(self, x: PyTree, state: State, comm: Comm) -> Averaged:
        codec, vectors = _parts.codec_of(self._gather.codec, x), _parts.vectors(x)
        payloads = codec.compress(vectors, state.own, comm.step).payloads
        votes = codec.decompress(payloads, comm.step)
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
    rule = "be 0 for gradients that are sharded over other axes, because shards have the same noise"
    got = f"gradients that may vary over {sorted(others)}"
    remedy = "vote on whole gradients, and use check_vma=True for copies."
    check(not others, "TopVotes(sigma)", rule, got, remedy)


def _normal(key: jax.Array | None, like: PyTree, scale: float) -> list[jax.Array]:
    """Draw Gaussian noise for each part."""
    remedy = "pass Comm(axis_name, fg.Step.of(key))."
    check(key is not None, "TopVotes.mean(comm)", "have a key for the noise", "none", remedy)
    assert key is not None
    own = jax.random.fold_in(key, NOISE)
    # Noise is rounded to multiples of `grid`, and votes are multiples too. So the last bits of the
    # sum do not reveal a vote, and the sum has the same rounding in all programs.
    grid = min(1.0, 2.0 ** (math.floor(math.log2(scale)) - GRID_BITS))
    return [
        grid * jnp.round(scale / grid * jax.random.normal(jax.random.fold_in(own, i), (size,)))
        for i, size in enumerate(_parts.sizes(like))
    ]


@value
class Vote(Quantizer):
    """Quantizer: -1, 0 or 1 for each selected value. Only the header shows a NaN."""

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
    """Method: update by the sign of the noisy sum of votes, where the sum exceeds a threshold.

        f = Σ_i v_i + N(0, sigma²),    update = alpha · (1 if f > beta w, -1 if f < -beta w, else 0)

    The v_i are the votes of `TopVotes`, from w workers. This is the paper's TopAgg.
    `fg.contrib.votes.epsilon` bounds the information about one worker's gradients in the updates
    and the trained model. See docs/privacy.md for the parties that are protected.

    Args:
      votes: the exchange, with the number of votes and the noise.
      beta: threshold on |f|, as a share of w.
      alpha: magnitude of the nonzero updates.
      key: a secret key, equal on all workers; needed for noise. An attacker can try all 2^32 seeds,
        so make a key of 64 bits from the operating system:
        `jax.random.wrap_key_data(np.frombuffer(os.urandom(8), np.uint32))`.
      bucketing: groups of leaves that are voted on together; see `Bucketing`.
      axis_name: the axis of the workers.

    Returns:
      An optax transformation with updates -alpha, 0 and alpha. Chain `optax.sgd(rate)` after
      it, which subtracts them.

    Wire: as for `votes`.

    Claims: biased; no memory. All workers get the same updates. If a gradient is not finite, the
      updates are not finite either, which is not private.

    Differs from the paper: the paper's teachers vote on the gradients of generated data, and
      release only these votes. Here, workers vote on their own gradients. `TopVotes` lists the
      other differences.

    Raises:
      ValueError: if there is noise and no key.

    Example:
      >>> import optax
      >>> votes = fg.contrib.votes.TopVotes(workers=8, fraction=0.01)
      >>> tx = optax.chain(fg.contrib.votes.scale_by_datalens(votes, beta=0.1), optax.sgd(1e-3))

    References:
      Wang et al., CCS 2021, arXiv:2103.11109.
    """
    check_kind("scale_by_datalens(votes)", votes, TopVotes, "use TopVotes(workers=8, k=100).")
    check_within("scale_by_datalens(beta)", beta, "[0, inf)", "use beta=0.1.")
    check_within("scale_by_datalens(alpha)", alpha, "(0, inf)", "use alpha=1.")
    fine, rule = key is not None or not votes.sigma, "be a secret key for the noise"
    remedy = "pass jax.random.wrap_key_data(np.frombuffer(os.urandom(8), np.uint32))."
    check(fine, "scale_by_datalens(key)", rule, "none", remedy)
    if key is not None:
        check_key("scale_by_datalens(key)", key)
    pmean = compressed_pmean(
        votes, axis_name=axis_name, bucketing=bucketing, key=0 if key is None else key
    )

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, Any]:
        refuse_weight("scale_by_datalens", extra.get("weight"), *ONE_VOTE)
        # Keep the mean in float32. Rounding to a leaf's dtype may move it over the threshold.
        mean, state = pmean.update(widened(updates), state, params, **extra)

        def counted(share: jax.Array, own: jax.Array) -> jax.Array:
            # The sign of a NaN is NaN.
            sign = jnp.where(jnp.abs(share) <= beta + TIE, 0.0, jnp.sign(share))
            return (alpha * sign).astype(own.dtype)

        return jax.tree.map(counted, mean, updates), state

    return optax.GradientTransformationExtraArgs(pmean.init, update)


def sensitivity(votes: TopVotes, like: PyTree, *, bucketing: Bucketing = Bucketing()) -> float:
    """Function: compute the L2 sensitivity of the sum of votes to one worker's gradient.

    Worker i sends at most K = Σ_j k_j votes of magnitude 1, with k_j votes on part j. The sum
    changes most if all these votes change their sign. Then its change has L2 norm √(4K).

    Args:
      votes: the exchange.
      like: gradients or parameters, or their shapes.
      bucketing: the layout of the training.

    Example:
      >>> from fftgrad.contrib import votes
      >>> noisy = votes.TopVotes(workers=8, k=25)
      >>> votes.sensitivity(noisy, {"w": jnp.zeros((10, 10)), "b": jnp.zeros(10)})
      10.0

    References:
      Wang et al., CCS 2021, arXiv:2103.11109.
    """
    buckets = _bucketing.bucket_likes(like, bucketing.for_exchange(votes))
    sizes = (size for bucket in buckets for size in _parts.sizes(bucket))
    return math.sqrt(4 * sum(_top_k.kept(votes.fraction, votes.k, size) for size in sizes))


def epsilon(
    votes: TopVotes, like: PyTree, *, steps: int, delta: float, bucketing: Bucketing = Bucketing()
) -> float:
    """Function: compute the ε for which all steps together are (ε, δ)-differentially private.

    Neighboring data sets differ in all data of one worker. So ε also holds for a single record,
    unless two workers use the record in the same step. Google's dp-accounting composes a Gaussian
    mechanism for each step. As a worker votes in every step, there is no gain from subsampling.
    docs/privacy.md lists other data that leave the workers, which ε does not cover.

    Args:
      votes: the exchange.
      like: gradients or parameters, or their shapes.
      steps: number of training steps.
      delta: δ, well below one over the number of workers or records.
      bucketing: the layout of the training.

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
        raise missing_extra("epsilon()", "dp-accounting", "privacy") from error
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    accountant: Any = rdp.RdpAccountant(neighboring_relation=relation)
    noise = votes.sigma / sensitivity(votes, like, bucketing=bucketing)
    accountant.compose(dp_accounting.GaussianDpEvent(noise), steps)
    return float(accountant.get_epsilon(delta))
