"""Methods: what papers publish, as combinations of parts. Each returns an optax transformation."""

from fftgrad.methods._fft_sparsification import fft_sparsification as fft_sparsification
