"""Planning: predict whether compression pays, choose an exchange, and analyze gradients.

The core does not import it; `fg.planning` loads it lazily. May import everything but `testing`.
"""

from fftgrad.planning._candidates import Candidate, candidates
from fftgrad.planning._gradients import (
    Analysis,
    GradientLog,
    Rate,
    analyze,
    load_gradients,
    save_gradients,
)
from fftgrad.planning._plan import Plan, PlanRow, plan, predict_step
from fftgrad.planning._predict import Link
from fftgrad.planning._timing import Timing, measure_link, time_exchange

__all__ = [
    "Analysis",
    "Candidate",
    "GradientLog",
    "Link",
    "Plan",
    "PlanRow",
    "Rate",
    "Timing",
    "analyze",
    "candidates",
    "load_gradients",
    "measure_link",
    "plan",
    "predict_step",
    "save_gradients",
    "time_exchange",
]
