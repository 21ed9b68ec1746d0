"""DataLens: votes on the largest coordinates, with noise and a threshold."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fftgrad._contracts import AxisName
from fftgrad._values import check_kind
from fftgrad.contrib._top_votes import TopVotes
from fftgrad.exchanges._layout import Layout
from fftgrad.ops._keys import check_key
from fftgrad.training._check_gradients import widened
from fftgrad.training._pmean import compressed_pmean

TIE = 1e-6
"""A mean of votes this near the threshold is at it: 3 · float32(1/10) is above 0.3."""


def scale_by_datalens(
    votes: TopVotes,
    beta: float = 0.1,
    alpha: float = 1.0,
    *,
    key: jax.Array | int | None = None,
    layout: Layout = Layout(),
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    """Method: votes on the signs of each worker's largest values, with noise, above a threshold.

        f = Σ_i v_i + N(0, sigma²),    update = alpha · (1 if f > beta w, -1 if f < -beta w, else 0)

    This is the paper's TopAgg. What others learn from the updates of one worker's gradients, or
    from a model trained with them, is bounded: `fg.contrib.votes.epsilon(votes, params, ...)` has
    the figure, and docs/privacy.md says against whom.

    Args:
      votes: how the workers vote, and the noise: a `TopVotes`, which the accountant takes, too.
      beta: the share of the votes that has to be left of either sign.
      alpha: the size of an update that is not zero.
      key: a secret key, equal on all workers unless the noise is "local"; needed where there is
        noise. A seed has 32 bits, which can be tried one after the other: take 64 from the
        operating system, `jax.random.wrap_key_data(np.frombuffer(os.urandom(8), np.uint32))`.
      layout: what is voted on together; see `Layout`.
      axis_name: the axis of the workers.

    Returns:
      An optax transformation whose updates are -alpha, 0 and alpha: to be chained before
      `optax.scale` or `optax.sgd`.

    Wire: that of `votes`.

    Claims: biased; no memory. All workers get the same updates. A step in which a gradient is not
      finite gives updates that are not, which tells that there was one.

    Differs from the paper: there the votes are those of teachers, about the gradient of what a
      generator of data made, and nothing else of the teachers is released; here they are workers'
      own gradients. No random projection. Differences of the votes themselves are `TopVotes`'s.

    Raises:
      ValueError: if `beta` is negative, `alpha` not positive, or there is noise and no key.
      TypeError: if `votes` is no `TopVotes`.

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
    if not 0 <= beta < math.inf:
        raise ValueError(
            f"scale_by_datalens(beta): must not be negative, got {beta}; use beta=0.1."
        )
    if not 0 < alpha < math.inf:
        raise ValueError(
            f"scale_by_datalens(alpha): must be positive and finite, got {alpha}; use alpha=1."
        )
    if votes.sigma and key is None:
        raise ValueError(
            "scale_by_datalens(key): must be a secret key, because whoever knows it can take the "
            f"noise off again, got none with sigma={votes.sigma}; pass jax.random.wrap_key_data("
            "np.frombuffer(os.urandom(8), np.uint32)), the same on all workers."
        )
    if key is not None:
        check_key("scale_by_datalens(key)", key)
    pmean = compressed_pmean(
        votes, axis_name=axis_name, layout=layout, key=0 if key is None else key
    )

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, Any]:
        # Wide, because a mean that is rounded to a leaf's dtype may pass the threshold.
        mean, state = pmean.update(widened(updates), state, params, **extra)

        def counted(share: jax.Array, own: jax.Array) -> jax.Array:
            # Of a NaN the sign is one.
            sign = jnp.where(jnp.abs(share) <= beta + TIE, 0.0, jnp.sign(share))
            return (alpha * sign).astype(own.dtype)

        return jax.tree.map(counted, mean, updates), state

    return optax.GradientTransformationExtraArgs(pmean.init, update)
