"""Which codec each part gets: a function of its name and shape."""

import math
from collections.abc import Callable
from typing import TypeAlias

from fftgrad._contracts import Codec, Like, Scope
from fftgrad._values import check_count, check_kind, value
from fftgrad.codecs._transforms import Identity

Codecs: TypeAlias = Codec | Callable[[str, Like], Codec]
"""One codec for all parts, or a rule: a function from the name and the shape of a part to its own.

The parts of a rule are the leaves, unless it has another `scope`.
"""

_DENSE, _OTHERS = "dense leaves", "other leaves"


@value
class _PartOf:
    """The name of the part of a leaf, as a value: equal rules have equal parts."""

    max_ndim: int
    max_size: int | None

    def __call__(self, path: str, leaf: Like) -> str:
        few = self.max_size is None or math.prod(leaf.shape) <= self.max_size
        return _DENSE if few and len(leaf.shape) <= self.max_ndim else _OTHERS


@value
class SmallDense:
    """Function: small leaves travel dense, and all others through one codec.

    The dense leaves form one part and the others another, so that a selector chooses over all of
    them. Both travel in the same collective.

        rule = fg.SmallDense(fg.chain(fg.TopK(0.01), fg.LogLevels(8)))
        fg.compressed_pmean(fg.AllGather(rule), axis_name="data")

    Args:
      codec: of the leaves that are not small.
      max_ndim: most axes of a small leaf: 1 for biases and scales.
      max_size: most values of a small leaf.

    Raises:
      TypeError: if `codec` is none.
      ValueError: while tracing, if the parts are not those of its own `scope`.

    Example:
      >>> rule = fg.SmallDense(fg.TopK(fraction=0.01))
      >>> params = {"bias": jnp.ones(10), "kernel": jnp.ones((100, 10))}
      >>> fg.wire_bytes(fg.AllGather(rule), params)
      96
    """

    codec: Codec
    max_ndim: int = 1
    max_size: int | None = None

    def __post_init__(self) -> None:
        check_kind("SmallDense(codec)", self.codec, Codec, "pass one, as TopK(fraction=0.01).")
        check_count("SmallDense(max_ndim)", self.max_ndim, "leave it out.", least=0)
        if self.max_size is not None:
            check_count("SmallDense(max_size)", self.max_size, "leave it out for all.", least=0)

    @property
    def scope(self) -> Scope:
        """The two parts that it is made for."""
        return _PartOf(self.max_ndim, self.max_size)

    def __call__(self, name: str, like: Like) -> Codec:
        """The codec of one of its parts."""
        if name not in (_DENSE, _OTHERS):
            raise ValueError(
                f"SmallDense(name): must be a part of its own scope, got {name!r}, because another "
                "scope mixes small leaves with others; leave the layout's scope out."
            )
        return Identity() if name == _DENSE else self.codec


@value
class DenseByName:
    """Function: leaves with one of these words in their paths travel dense."""

    words: tuple[str, ...]
    codec: Codec

    def __call__(self, name: str, like: Like) -> Codec:
        return Identity() if any(word in name for word in self.words) else self.codec
