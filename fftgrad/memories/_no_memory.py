"""The memory that forgets."""

import dataclasses

from fftgrad._base import PyTree


@dataclasses.dataclass(frozen=True)
class NoMemory:
    """Memory: none; what a step does not send is lost, as in the FFT paper.

    Example:
      >>> import fftgrad as fg
      >>> fg.NoMemory().init(None)
      ()

    References:
      Wang et al., HPDC 2020, arXiv:1811.08596.
    """

    def init(self, like: PyTree) -> PyTree:
        return ()

    def compensate(self, grad: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        return grad, state

    def update(self, x: PyTree, sent: PyTree, mean: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        return mean, state
