"""Bytes on the wire and over a link, from shapes alone."""

import optax

from fftgrad._contracts import Codec, Exchange, PyTree
from fftgrad._values import check_count, check_kind
from fftgrad.exchanges import _layout
from fftgrad.exchanges._all_gather import AllGather
from fftgrad.exchanges._layout import Layout
from fftgrad.exchanges._recipe import Recipe, recipe_of


def wire_bytes(part: Codec | Exchange | Recipe, like: PyTree, layout: Layout | None = None) -> int:
    """Function: the exact number of bytes that one worker hands to the collective per step.

    Found from shapes alone: a header of 4 bytes, main and side, each rounded up to 4 bytes. They
    are those of the collective in the compiled program, where `fg.audit` reads them. How often a
    byte crosses a link is the collective's business: `fg.link_bytes` counts that.

    Args:
      part: a codec, an exchange, or a method, such as `fg.methods.top_k(0.01)`.
      like: an array, a `jax.ShapeDtypeStruct`, or a pytree of them: the gradient.
      layout: the one that `compressed_pmean` is given, if any.

    Raises:
      TypeError: if `part` is none of them, or a leaf is not what `compressed_pmean` takes, such as
        a complex array.
      ValueError: if the bytes change by step (`Scheduled`): ask for those of `exchange.at(step)`.

    Example:
      >>> x = jax.ShapeDtypeStruct((1_000_000,), "float32")
      >>> fg.wire_bytes(fg.AllReduce(), x)
      4000000
      >>> fg.wire_bytes(fg.chain(fg.TopK(fraction=0.01), fg.LogLevels(bits=6)), x)
      18216
    """
    recipe = asked_about("wire_bytes", part, like, layout)
    return _layout.wire_bytes(recipe.exchange, like, recipe.layout)


def asked_about(
    owner: str, part: Codec | Exchange | Recipe, like: PyTree, layout: Layout | None
) -> Recipe:
    """What would exchange it; `AllGather`, for a codec."""
    if isinstance(like, Codec | Exchange | Recipe):
        raise TypeError(
            f"{owner}(like): must be a gradient, or its shapes, got {like!r}; give the part first, "
            f"and then what it is for: {owner}(part, like)."
        )
    what = AllGather(part) if isinstance(part, Codec) else part
    remedy = "pass a codec, an exchange or a method, such as PowerSgd(4)."
    if isinstance(part, optax.GradientTransformation):
        remedy = "pass the exchange it is made with; of a compiled step fg.audit reads the bytes."
    if not isinstance(what, Recipe):
        check_kind(f"{owner}(part)", what, Exchange, remedy)
    _layout.check_tree(owner, "like", like)
    return recipe_of(owner, what, layout=layout)


def link_bytes(
    part: Codec | Exchange | Recipe, like: PyTree, workers: int, layout: Layout | None = None
) -> float:
    """Function: the bytes that each of so many workers sends over its link per step.

    This counts how often each byte of `fg.wire_bytes` leaves a worker where the workers form a
    ring: an all-gather sends a buffer w - 1 times, an all-reduce 2 (w - 1) / w times, an all-to-all
    (w - 1) / w times. Found by tracing, without devices, for any number of workers, and equal to
    what `fg.audit` reads off the compiled program.

    Args:
      part: as for `fg.wire_bytes`, and so are `like` and `layout`.
      like: the gradient.
      workers: how many there are, w. Of `Hierarchical` all, and its slow links are counted alone.
      layout: the one that `compressed_pmean` is given, if any.

    Raises:
      ValueError: as `fg.wire_bytes`; or if the exchange is made for another number of workers.

    Example:
      >>> x = jax.ShapeDtypeStruct((1_000_000,), "float32")
      >>> [fg.link_bytes(part, x, workers=4) for part in (fg.AllReduce(), fg.Sign())]
      [6000000.0, 375024.0]
    """
    check_count("link_bytes(workers)", workers, "count all.")
    recipe = asked_about("link_bytes", part, like, layout)
    return _layout.link_bytes(recipe.exchange, like, workers, recipe.layout)
