"""The thread of an island that talks to the store while the program trains."""

import queue
import threading
import warnings
from typing import Any

from fftgrad.islands._ledger import Change
from fftgrad.islands._member import Member
from fftgrad.islands._perform import Performer, StoreError
from fftgrad.islands._requests import Steps
from fftgrad.islands._store import Store

PAUSE = 5.0
"""Seconds between tries while the store does not answer; those of one request come before."""


class _Closed(Exception):  # noqa: N818 (no error: it ends a wait)
    """The island was closed meanwhile."""


class Courier:
    """Hands changes in, one at a time.

    The member belongs to the thread while a change is under way, and to the program else. No lock
    is held while either computes.
    """

    def __init__(self, member: Member, store: Store) -> None:
        self.member = member
        self.performer = Performer(store, wait=self._wait)
        self._told = ""  # trouble that the program was warned of
        self._unreached = ""  # of the last try, while the store does not answer
        self._error: BaseException | None = None
        self._jobs: queue.SimpleQueue[Change | None] = queue.SimpleQueue()
        self._idle, self._closing = threading.Event(), threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._work, name="fftgrad-island", daemon=True)

    @property
    def trouble(self) -> str:
        """Why the store was not reached in the last try, or why nothing of the island counts."""
        return self._unreached or self.member.trouble

    def start(self, steps: Steps[Any]) -> None:
        """Runs the first steps here, where errors belong, and the thread from then on."""
        self.performer.run(steps)
        self._thread.start()

    def send(self, change: Change) -> None:
        """Has a change handed in."""
        self.member.sent = change
        self._idle.clear()
        self._jobs.put(change)

    def wait(self, seconds: float) -> bool:
        """Whether nothing is under way, after so many seconds at most."""
        done = self._idle.wait(seconds)
        if self._error is not None:
            raise self._error
        if (trouble := self.member.trouble) and trouble != self._told:
            self._told = trouble
            warnings.warn(f"Island: {trouble}.", UserWarning, stacklevel=6)
        return done

    def close(self) -> None:
        """Ends the thread, where it waits if it does, and says that the name is free."""
        self._closing.set()
        self._jobs.put(None)
        self._thread.join()
        try:
            Performer(self.performer._store, retries=0).run(self.member.leave())
        except StoreError:  # then those who come later ask and wait
            return

    def _work(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # for the program, which would wait for ever
            self._fail(error)

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                change = self._jobs.get(timeout=self.member.settings.deadline / 4)
            except queue.Empty:
                self._try(self.member.answer)
                continue
            if change is not None:
                while not self._try(self.member.hand_in, change) and not self._closing.is_set():
                    self._closing.wait(PAUSE)
            self._idle.set()

    def _try(self, steps: Any, *args: Any) -> bool:
        """Whether it is over, be it with an error that another try would have as well."""
        try:
            self.performer.run(steps(*args))
            self._unreached = ""
        except StoreError as error:
            self._unreached = str(error)
            return False
        except _Closed:
            return True
        except BaseException as error:  # for the program, at its next step
            self._fail(error)
        return True

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._closing.set()
        self._idle.set()

    def _wait(self, seconds: float) -> None:
        if self._closing.wait(seconds):
            raise _Closed
