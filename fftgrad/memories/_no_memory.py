"""The memory that forgets."""

from fftgrad._contracts import Memory, PyTree
from fftgrad._values import value


@value
class NoMemory(Memory):
    """Memory: none; what a step does not send is lost, as in the FFT paper.

    Example:
      >>> import fftgrad as fg
      >>> fg.NoMemory().init(None)
      ()

    References:
      Wang et al., HPDC 2020, arXiv:1811.08596.
    """

    def update(self, x: PyTree, sent: PyTree, mean: PyTree, state: PyTree) -> PyTree:
        return state
