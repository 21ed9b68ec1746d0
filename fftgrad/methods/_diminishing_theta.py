"""How much to drop, step by step."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np


def diminishing_theta(
    learning_rate: float | Callable[[jax.Array], jax.Array],
    smoothness: float,
    steps: int,
    thetas: Sequence[float] = (0.95, 0.9, 0.85, 0.7, 0.5, 0.0),
) -> dict[int, float]:
    """Function: a schedule of theta that falls with the learning rate, θ_t² = L η_t.

    That is the condition under which the FFT paper proves that training converges: what a step
    drops has to become less as its length does. At each step the largest of a few static thetas
    with θ² <= L η_t is taken, so that one program holds all of them.

    Args:
      learning_rate: η, a number or an optax schedule. It is evaluated for all steps at once.
      smoothness: L, the Lipschitz constant of the gradient, positive; in practice a factor that
        makes √(L η) the theta to start with: θ_0² / η_0.
      steps: how many steps the schedule covers.
      thetas: those to choose from; 0, a dense all-reduce, is always among them.

    Returns:
      {first step: theta}, for `methods.fft_sparsification(theta_schedule=...)`.

    Differs from the paper: its θ there is a relative error, but its experiments use the share of
      frequencies dropped, as this does.

    Example:
      >>> import optax
      >>> eta = optax.piecewise_constant_schedule(0.01, {30: 0.1, 60: 0.1})
      >>> fg.methods.diminishing_theta(eta, smoothness=81.0, steps=90, thetas=(0.9, 0.25))
      {0: 0.9, 30: 0.25, 60: 0.0}

    References:
      Wang et al., HPDC 2020, arXiv:1811.08596, section 3.3.
    """
    if not smoothness > 0 or steps < 1:
        raise ValueError(
            f"diminishing_theta(smoothness, steps): must be positive, got {smoothness} and "
            f"{steps}; use smoothness = theta_0**2 / learning_rate_0."
        )
    if not all(0 <= theta < 1 for theta in thetas):
        raise ValueError(
            f"diminishing_theta(thetas): shares dropped must be in [0, 1), got {tuple(thetas)}; "
            "the paper uses 0.85."
        )
    if callable(learning_rate):
        rates = np.asarray(jax.vmap(learning_rate)(jnp.arange(steps)))
    else:
        rates = np.full(steps, learning_rate)
    ladder = sorted({0.0, *map(float, thetas)}, reverse=True)
    schedule: dict[int, float] = {}
    for step, rate in enumerate(rates):
        # A hair more, because rates are float32 and a theta meant to fit should.
        bound = math.sqrt(smoothness * max(float(rate), 0.0)) * (1 + 1e-6)
        theta = next(theta for theta in ladder if theta <= bound)
        if not schedule or theta != schedule[max(schedule)]:
            schedule[step] = theta
    return schedule
