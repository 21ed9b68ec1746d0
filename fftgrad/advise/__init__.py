"""Advice: would compressing pay, with what, and what is in a gradient.

The core imports nothing of it; `fg.advise` loads it. May import everything but `testing`.
"""

from fftgrad.advise._candidates import Candidate, candidates
from fftgrad.advise._exchange import Timing, predict_step, time_exchange
from fftgrad.advise._gradients import (
    Analysis,
    GradientLog,
    LeafFigures,
    Rate,
    analyze,
    load_gradients,
    save_gradients,
)
from fftgrad.advise._link import Link, measure_link
from fftgrad.advise._measure import Measured, measure
from fftgrad.advise._plan import Plan, PlanRow, plan

__all__ = [
    "Analysis",
    "Candidate",
    "GradientLog",
    "LeafFigures",
    "Link",
    "Measured",
    "Plan",
    "PlanRow",
    "Rate",
    "Timing",
    "analyze",
    "candidates",
    "load_gradients",
    "measure",
    "measure_link",
    "plan",
    "predict_step",
    "save_gradients",
    "time_exchange",
]
