"""Requests against a store, with retries, and counted: requests cost money."""

import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

from fftgrad.islands._frame import DamagedError, TooLargeError
from fftgrad.islands._requests import Clock, Create, Delete, List, Read, Request, Steps, Wait
from fftgrad.islands._store import Store

T = TypeVar("T")

RETRIES = 5
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0

COUNTED: tuple[str, ...] = ("creates", "reads", "lists", "deletes", "written", "read")
"""Requests by kind, and bytes both ways."""


class StoreError(ConnectionError):
    """A store that did not do what it was asked, after several tries."""


class Performer:
    """Runs the steps of the protocol against a store.

    Attributes:
      traffic: how many requests there were, and bytes both ways.
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
        """What comes of steps, each of which is tried several times."""
        try:
            request = next(steps)
            while True:
                try:
                    answer = self._answer(request)
                except DamagedError as error:  # the protocol knows what to do without the object
                    request = steps.throw(error)
                else:
                    request = steps.send(answer)
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
            # By chance, so that islands that were cut off together do not come back together.
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
            data = store.read(request.key, request.most)
            traffic["read"] += len(data or b"")
            if data is not None and len(data) > request.most:
                raise TooLargeError(len(data), request.most)
            return data
        if isinstance(request, List):
            traffic["lists"] += 1
            return store.list(request.folder, request.after)
        if isinstance(request, Delete):
            traffic["deletes"] += len(request.keys)
            return store.delete(request.keys)
        raise TypeError(f"no request: {request!r}")


def _is_refusal(error: Exception) -> bool:
    """Whether another try would be refused as well."""
    return isinstance(error, PermissionError) or type(error).__name__ in (
        "PermissionDeniedError",
        "UnauthenticatedError",
        "NotSupportedError",
        "InvalidPathError",
    )
