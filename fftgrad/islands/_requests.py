"""What the protocol asks of the world, as data: it waits, reads and writes by yielding a request.

So it runs over any store, in any order of its steps, and ends at any of them: what a crash leaves
is seen in tests that crash at each.
"""

from collections.abc import Generator
from typing import Any, NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")


class Create(NamedTuple):
    """Write an object if there is none of this key; answered by whether there was none."""

    key: str
    data: bytes


class Read(NamedTuple):
    """Read an object; answered by its bytes, or None if there is none.

    One that has more bytes than `most` is a `TooLargeError` in place of an answer.
    """

    key: str
    most: int


class List(NamedTuple):
    """The keys under a folder, which ends in a slash; answered by those that can be seen yet.

    Only those that come after `after` in the order of the text are wanted; others may be there.
    """

    folder: str
    after: str = ""


class Delete(NamedTuple):
    """Remove objects, which need not be there."""

    keys: tuple[str, ...]


class Wait(NamedTuple):
    """Let time pass."""

    seconds: float


class Clock(NamedTuple):
    """Answered by seconds since any moment: clocks of islands need not agree."""


Request: TypeAlias = Create | Read | List | Delete | Wait | Clock
Steps: TypeAlias = Generator[Request, Any, T]


def settle(key: str, data: bytes, most: int) -> Steps[bytes]:
    """The bytes that the object of a key has for all: these, or those of who came first.

    It may be run again after any crash, and after an answer that was lost. `most` is as in `Read`.
    """
    while not (yield Create(key, data)):
        if (found := (yield Read(key, most))) is not None:
            return found
        yield Wait(0.1)  # there, and not to be seen yet; or removed since
    return data
