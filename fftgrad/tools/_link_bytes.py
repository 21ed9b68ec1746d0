"""Bytes over a link, from shapes alone."""

from fftgrad._contracts import Codec, Exchange, PyTree
from fftgrad.exchanges import _layout
from fftgrad.exchanges._layout import Layout
from fftgrad.exchanges._recipe import Recipe
from fftgrad.tools._wire_bytes import asked_about


def link_bytes(
    part: Codec | Exchange | Recipe, like: PyTree, workers: int, layout: Layout | None = None
) -> float:
    """Function: the bytes that each of so many workers sends over its link per step.

    `fg.wire_bytes` counts what a worker hands to the collectives; this counts how often each byte
    leaves it where the workers form a ring: an all-gather sends a buffer w - 1 times, an all-reduce
    2 (w - 1) / w times, an all-to-all (w - 1) / w times. Found by tracing, without devices, for any
    number of workers, and equal to what `fg.audit` reads off the compiled program.

    Args:
      part: a codec, an exchange, or a method.
      like: an array, a `jax.ShapeDtypeStruct`, or a pytree of them: the gradient.
      workers: how many there are, w. Of `Hierarchical` all, and its slow links are counted alone.
      layout: the one that `compressed_pmean` is given, if any.

    Returns:
      Bytes that leave a worker; as many arrive.

    Wire: nothing is sent.

    Raises:
      TypeError: if `part` is neither, or a leaf is not what `compressed_pmean` takes.
      ValueError: if there is no worker, the exchange is made for another number of them, or the
        bytes change by step (`Scheduled`): ask one of its exchanges, `.at(step)`.

    Example:
      >>> import fftgrad as fg
      >>> import jax
      >>> x = jax.ShapeDtypeStruct((1_000_000,), "float32")
      >>> [fg.tools.link_bytes(part, x, workers=4) for part in (fg.AllReduce(), fg.Sign())]
      [6000000.0, 375036.0]
    """
    if workers < 1:
        raise ValueError(f"link_bytes(workers): must be at least 1, got {workers}; count all.")
    recipe = asked_about("link_bytes", part, like, layout)
    return _layout.link_bytes(recipe.exchange, like, workers, recipe.layout)
