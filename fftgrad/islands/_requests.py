"""The requests of the protocol, and the loop that sends them to a store.

The protocol yields requests as data. So it runs over any store, in any order of its steps, and can
be stopped at any of them: a test simulates a crash at each.
"""

import random
import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeAlias, TypeVar

from fftgrad.islands._store import Store

T = TypeVar("T")


class Create(NamedTuple):
    """Create an object if there is none of its key; the answer is whether there was none."""

    key: str
    data: bytes


class Read(NamedTuple):
    """Read an object; the answer is its bytes, or None if there is none."""

    key: str


class List(NamedTuple):
    """List the keys under a folder, which ends in a slash. New objects may be missing.

    Only keys that sort after `after` are wanted. The answer may have others.
    """

    folder: str
    after: str = ""


class Delete(NamedTuple):
    """Remove objects. They need not exist."""

    keys: tuple[str, ...]


class Wait(NamedTuple):
    """Let time pass."""

    seconds: float


class Clock(NamedTuple):
    """Read the clock, in seconds. The clocks of islands need not agree."""


Request: TypeAlias = Create | Read | List | Delete | Wait | Clock
Steps: TypeAlias = Generator[Request, Any, T]


def settle(key: str, data: bytes) -> Steps[bytes]:
    """Create an object; return its bytes, or those of an earlier writer.

    It can be repeated after a crash, and after an answer that was lost.
    """
    while not (yield Create(key, data)):
        if (found := (yield Read(key))) is not None:
            return found
        yield Wait(0.1)  # not visible yet, or removed since
    return data


RETRIES = 5
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0

COUNTED: tuple[str, ...] = ("creates", "reads", "lists", "deletes", "written", "read")
"""Requests by kind, and bytes in both directions."""


class StoreError(ConnectionError):
    """A request that a store refused, or failed to answer several times."""


class Performer:
    """Runs steps of the protocol against a store, with retries.

    Attributes:
      traffic: number of requests by kind, and bytes in both directions.
    """

    def __init__(
        self,
        store: Store,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], Any] = time.sleep,
        retries: int = RETRIES,
    ) -> None:
        self._store, self._clock, self._wait, self._retries = store, clock, wait, retries
        self.traffic: dict[str, int] = dict.fromkeys(COUNTED, 0)

    def run(self, steps: Steps[T]) -> T:
        """Run steps to their end, and return their result."""
        try:
            request = next(steps)
            while True:
                request = steps.send(self._answer(request))
        except StopIteration as end:
            return end.value
        finally:
            steps.close()

    def _answer(self, request: Request) -> Any:
        if isinstance(request, Clock):
            return self._clock()
        if isinstance(request, Wait):
            return self._wait(request.seconds)
        pause = FIRST_PAUSE
        for last in range(self._retries, -1, -1):
            try:
                return self._ask(request)
            except (TypeError, ValueError):
                raise
            except Exception as error:
                if _is_refusal(error) or not last:
                    name = type(request).__name__.lower()
                    raise StoreError(
                        f"store: must {name} {request[0]!r}, got {type(error).__name__}: "
                        f"{str(error).splitlines()[0] if str(error) else ''}; see whether it is "
                        "there, has room, and whether the credentials may read, write, list and "
                        "remove."
                    ) from error
            # random, so that islands that were cut off together do not retry together
            self._wait(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE)
        raise AssertionError

    def _ask(self, request: Request) -> Any:
        store, traffic = self._store, self.traffic
        if isinstance(request, Create):
            traffic["creates"] += 1
            traffic["written"] += len(request.data)
            return store.create(request.key, request.data)
        if isinstance(request, Read):
            traffic["reads"] += 1
            data = store.read(request.key)
            traffic["read"] += len(data or b"")
            return data
        if isinstance(request, List):
            traffic["lists"] += 1
            return store.list(request.folder, request.after)
        if isinstance(request, Delete):
            traffic["deletes"] += len(request.keys)
            return store.delete(request.keys)
        raise TypeError(f"no request: {request!r}")


def _is_refusal(error: Exception) -> bool:
    """Whether a retry would be refused too."""
    return isinstance(error, PermissionError) or type(error).__name__ in (
        "PermissionDeniedError",
        "UnauthenticatedError",
        "NotSupportedError",
        "InvalidPathError",
    )
