"""Planning: would compressing pay, and with what. May import everything but `testing`."""

from fftgrad.planning._candidate import Candidate as Candidate
from fftgrad.planning._candidate import candidates as candidates
from fftgrad.planning._exchange import Timing as Timing
from fftgrad.planning._exchange import time_exchange as time_exchange
from fftgrad.planning._measure import Measured as Measured
from fftgrad.planning._measure import measure as measure
from fftgrad.planning._measure_link import measure_link as measure_link
from fftgrad.planning._plan import Plan as Plan
from fftgrad.planning._plan import PlanRow as PlanRow
from fftgrad.planning._plan import plan as plan
from fftgrad.planning._predict_step import predict_step as predict_step
