"""FFT sparsification, its schedule of theta, and its recovery."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from fftgrad import _axes, codecs, exchanges
from fftgrad._contracts import AxisName, Exchange
from fftgrad._values import check, check_type, check_within
from fftgrad.training._gradients import weighted
from fftgrad.training._pmean import CompressedPmeanState


def fft_sparsification(
    theta: float = 0.85,
    bits: int = 10,
    block: int | None = None,
    theta_schedule: Mapping[int, float] | None = None,
    recover: Sequence[float] = (),
) -> exchanges.Recipe:
    """Method: send the largest frequencies of the gradient, in few bits each.

    Steps of the paper, and the codecs and exchanges that do them:

        cast to fp16            rounded before the transform          Fft(half=True)
        FFT of g                one real transform of the vector      Fft(block=None)
        θ, dropped share        the smallest θ of the moduli          TopK(fraction=1 - theta)
        N, m, eps, min, max     range-based N-bit float               RangeFloat(bits)
        status, bitmap, pack    indices in Elias-Fano or bitmap       TopK
        allgather, average      one collective, one inverse FFT       AllGather

    Args:
      theta: θ, the share of the frequencies dropped, 0 <= θ < 1; the paper's runs use 0.85.
      bits: N, the bits of the range-based float; the paper's runs use 10.
      block: length of the transformed blocks; with None, the whole gradient is one block, as in the
        paper. Blocks of 64 to 256 give a smaller error for most gradients.
      theta_schedule: {first step: theta}, which replaces `theta` from each of these steps on, for
        example {0: 0.9, 20_000: 0.0}. Theta 0 is a dense all-reduce. See `diminishing_theta`.
      recover: lower thetas for training that fails, to use in this order: for example (0.5, 0.0).
        `recover_by_loss` moves to the next one, or call `fg.exchanges.next_level` yourself.

    Returns:
      A `Recipe` without memory, as in the paper. Pass one, such as `ErrorFeedback()`, to
      `compressed_pmean`.

    Wire: for n parameters, k = (1 - θ) n/2 complex coefficients of 2N bits each, and about
      2 + log2(1/(1 - θ)) bits per position: 1.85 bits per parameter at θ = 0.85, N = 10.

    Claims: biased; convergence is not proven. The paper's proof assumes that θ is the relative L2
      error of the mean, and that θ² <= 1/4.

    Differs from the paper: rounds to nearest in a range fitted to each payload (the paper truncates
      in [-1, 1]); positions in Elias-Fano code if it is smaller than a bitmap; exact selection; no
      broadcast of the parameters every 10 steps, because all workers have the same bits.

    Example:
      >>> tx = fg.compressed_pmean(fg.methods.fft_sparsification(theta=0.85), axis_name="data")

    References:
      Wang et al., HPDC 2020, arXiv:1811.08596.
    """

    def exchange(theta: float) -> Exchange:
        if theta == 0:
            return exchanges.AllReduce()
        fft = codecs.Fft(block=block, half=True)
        return exchanges.AllGather(
            codecs.chain(fft, codecs.TopK(fraction=1.0 - theta), codecs.RangeFloat(bits=bits))
        )

    argument, given = "fft_sparsification(theta_schedule, recover)", (theta_schedule, recover)
    one = theta_schedule is None or not recover
    check(one, argument, "not both be given", given, "leave one out.")
    if recover:
        chosen = exchanges.Ladder(tuple(map(exchange, (theta, *recover))))
    elif theta_schedule is not None:
        thetas = {0: theta, **theta_schedule}
        chosen = exchanges.Scheduled({step: exchange(value) for step, value in thetas.items()})
    else:
        chosen = exchange(theta)
    return exchanges.Recipe(chosen)


def diminishing_theta(
    learning_rate: float | Callable[[jax.Array], jax.Array],
    smoothness: float,
    steps: int,
    thetas: Sequence[float] = (0.95, 0.9, 0.85, 0.7, 0.5, 0.0),
) -> dict[int, float]:
    """Function: compute a schedule of theta that falls with the learning rate, θ_t² = L η_t.

    The FFT paper proves convergence under this condition. Each step uses the largest θ of `thetas`
    with θ² <= L η_t. A few static thetas fit into one compiled program.

    Args:
      learning_rate: η, a number or an optax schedule, which is evaluated under `jax.vmap`.
      smoothness: L, the Lipschitz constant of the gradient; in practice θ_0² / η_0.
      steps: number of steps of the schedule.
      thetas: values to choose from, in [0, 1). 0, a dense all-reduce, is always added.

    Returns:
      {first step: theta}, for `methods.fft_sparsification(theta_schedule=...)`.

    Differs from the paper: in the paper's proof, θ is a relative error. Here and in the paper's
      experiments, θ is the share of frequencies dropped.

    Example:
      >>> import optax
      >>> eta = optax.piecewise_constant_schedule(0.01, {30: 0.1, 60: 0.1})
      >>> fg.methods.diminishing_theta(eta, smoothness=81.0, steps=90, thetas=(0.9, 0.25))
      {0: 0.9, 30: 0.25, 60: 0.0}

    References:
      Wang et al., HPDC 2020, arXiv:1811.08596, section 3.3.
    """
    remedy = "use theta_0**2 / learning_rate_0."
    check_within("diminishing_theta(smoothness)", smoothness, "(0, inf)", remedy)
    if callable(learning_rate):
        rates = np.asarray(jax.vmap(learning_rate)(jnp.arange(steps)))
    else:
        rates = np.full(steps, learning_rate)
    ladder = sorted({0.0, *map(float, thetas)}, reverse=True)
    schedule: dict[int, float] = {}
    for step, rate in enumerate(rates):
        # Add a margin for the rounding of float32 rates.
        bound = math.sqrt(smoothness * max(float(rate), 0.0)) * (1 + 1e-6)
        theta = next(theta for theta in ladder if theta <= bound)
        if not schedule or theta != schedule[max(schedule)]:
            schedule[step] = theta
    return schedule


NONE = float(jnp.finfo(jnp.float32).max)
"""Loss before the first step. It is finite, because `jax_debug_infs` raises for infinities."""


class RecoverByLossState(NamedTuple):
    """State of `recover_by_loss`."""

    inner: CompressedPmeanState  # with the level of each `Ladder`
    loss: jax.Array  # smoothed loss; `NONE` before the first step of a level
    best: jax.Array  # least smoothed loss at this level


def recover_by_loss(
    tx: optax.GradientTransformationExtraArgs,
    tolerance: float = 0.1,
    smoothing: float = 0.9,
    *,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    """Transformation: move to the next level of a `Ladder` if the loss rises, and never back.

    The level rises by one after a step if the smoothed mean loss exceeds (1 + tolerance) times its
    least value at this level, or if the loss is not finite. Bad steps are ignored.

    Args:
      tx: `compressed_pmean` with a `Ladder`, such as
        `fg.methods.fft_sparsification(recover=(0.5, 0.0))`.
      tolerance: relative rise of the loss that is tolerated: 0.1 means 10 %.
      smoothing: decay of the exponential average of the loss.
      axis_name: the axis, or axes, of the workers.

    Returns:
      A transformation whose `update(grads, state, params, value=loss)` takes the loss of the
      worker, or the mean over the workers.

    Wire: bytes of `tx`, and 4 bytes for the mean loss.

    Differs from the paper: the paper lowers theta if a run fails, but gives no rule for when.

    Example:
      >>> method = fg.methods.fft_sparsification(theta=0.9, recover=(0.5, 0.0))
      >>> tx = fg.compressed_pmean(method, axis_name="data")
      >>> tx = fg.methods.recover_by_loss(tx, tolerance=0.1, axis_name="data")

    References:
      Wang et al., HPDC 2020, arXiv:1811.08596.
    """
    check_within("recover_by_loss(tolerance)", tolerance, "(0, inf)", "use 0.1.")
    check_within("recover_by_loss(smoothing)", smoothing, "[0, 1)", "use 0.9.")

    def init(params: optax.Params) -> RecoverByLossState:
        inner: Any = tx.init(params)
        rule, is_pmean = "be fg.compressed_pmean(...)", isinstance(inner, CompressedPmeanState)
        remedy = "chain the others after recover_by_loss."
        check_type(is_pmean, "recover_by_loss(tx)", rule, type(inner), remedy)
        none = jnp.full((), NONE, jnp.float32)
        return RecoverByLossState(inner, none, none)

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        value: jax.Array | None = None,
        weight: jax.Array | float | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, Any]:
        given = value is not None
        check(given, "recover_by_loss.update(value)", "be the loss", value, "pass value=loss.")
        out: Any = tx.update(updates, state.inner, params, weight=weight, **extra)
        updates, inner = out
        loss = jnp.asarray(value, jnp.float32)
        if _axes.varies(loss, axis_name):
            loss = lax.pmean(weighted(loss, weight, axis_name), axis_name)
        smoothed = smoothing * state.loss + (1 - smoothing) * loss
        smoothed = jnp.where(state.loss < NONE, smoothed, loss)
        best = jnp.fmin(state.best, smoothed)
        worse = ~(smoothed <= state.best + tolerance * jnp.abs(state.best))
        worse = (state.best < NONE) & worse | ~jnp.isfinite(loss)
        seen = RecoverByLossState(
            inner=exchanges.next_level(inner, worse),
            loss=jnp.where(worse, NONE, smoothed),
            best=jnp.where(worse, NONE, best),
        )
        counts = inner.skipped == state.inner.skipped
        return updates, optax.tree.where(counts, seen, state._replace(inner=inner))

    return optax.GradientTransformationExtraArgs(init, update)
