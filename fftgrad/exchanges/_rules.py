"""Which codec each part gets."""

import abc
from collections.abc import Callable
from typing import TypeAlias

from fftgrad._contracts import Codec, Like, Scope


class CodecRule(abc.ABC):
    """Which codec each part of a gradient gets, by the name and the shape of the part.

    Where a codec is asked for, a plain function does as well; its parts are the leaves.
    """

    @property
    def scope(self) -> Scope:
        """The parts that it is made for."""
        return "leaf"

    @abc.abstractmethod
    def __call__(self, name: str, like: Like) -> Codec:
        """The codec of one part."""


Codecs: TypeAlias = Codec | CodecRule | Callable[[str, Like], Codec]
"""One codec for all parts, or a rule."""
