"""Which codec each part gets."""

import abc
from collections.abc import Callable
from typing import TypeAlias

from fftgrad._contracts import Codec, Like, Scope
from fftgrad._values import value
from fftgrad.codecs.transforms._identity import Identity


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


@value
class DenseByName(CodecRule):
    """Rule: leaves with one of these words in their paths travel dense, the others by a codec."""

    words: tuple[str, ...]
    codec: Codec

    def __call__(self, name: str, like: Like) -> Codec:
        return Identity() if any(word in name for word in self.words) else self.codec


Codecs: TypeAlias = Codec | CodecRule | Callable[[str, Like], Codec]
"""One codec for all parts, or a rule."""
