"""Methods: what papers publish, as combinations of parts. Each returns an optax transformation."""

from fftgrad.methods._adacomp import adacomp as adacomp
from fftgrad.methods._demo import demo as demo
from fftgrad.methods._dgc import dgc as dgc
from fftgrad.methods._diloco import diloco as diloco
from fftgrad.methods._eden import eden as eden
from fftgrad.methods._feedback_adam import feedback_adam as feedback_adam
from fftgrad.methods._feedback_sgd import feedback_sgd as feedback_sgd
from fftgrad.methods._fft_sparsification import fft_sparsification as fft_sparsification
from fftgrad.methods._majority_vote import majority_vote as majority_vote
from fftgrad.methods._one_bit_adam import one_bit_adam as one_bit_adam
from fftgrad.methods._power_sgd import power_sgd as power_sgd
from fftgrad.methods._qsgd import qsgd as qsgd
from fftgrad.methods._random_k import random_k as random_k
from fftgrad.methods._redsync import redsync as redsync
from fftgrad.methods._scalecom import scalecom as scalecom
from fftgrad.methods._sign_sgd import sign_sgd as sign_sgd
from fftgrad.methods._terngrad import terngrad as terngrad
from fftgrad.methods._top_k import top_k as top_k
