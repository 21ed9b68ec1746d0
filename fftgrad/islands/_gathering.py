"""What has come to the open round, and for how long the others are waited for."""

import dataclasses
import math
from collections.abc import Callable, Collection

from fftgrad.islands import _keys
from fftgrad.islands._anchor import Anchor
from fftgrad.islands._frame import DamagedError
from fftgrad.islands._keys import Who
from fftgrad.islands._requests import Clock, List, Read, Steps
from fftgrad.islands._settings import Settings


@dataclasses.dataclass(eq=False)
class Gathering:
    """The contributions to a round, as one island sees them come."""

    anchor: Anchor
    settings: Settings
    most: int  # bytes that a contribution may have
    named: Collection[Who] | None = None  # in the manifest of the round before, if it was obeyed
    found: dict[Who, bytes | DamagedError] = dataclasses.field(default_factory=dict)
    left: set[str] = dataclasses.field(default_factory=set)  # who counted, and left since
    handed: float = 0.0  # when this island handed in
    trained: float = 0.0  # seconds for which it had taken inner steps
    begun: float | None = None  # when it saw that one of those expected had come

    def hand_in(self, now: float, trained: float) -> None:
        """From now on the island waits for the others."""
        self.handed, self.trained, self.begun = now, trained, None

    @property
    def end(self) -> float:
        """When the island closes the round with those that came.

        A deadline after one of those expected: inner steps may take longer than any deadline. Where
        none of them comes it gives them as long as its own inner steps took, and no more, because
        they may all be dead.
        """
        begun = self.handed + self.trained if self.begun is None else self.begun
        return begun + self.settings.deadline

    def look(
        self, keys: Collection[str], own: Who, meanwhile: Callable[[], Steps[None]]
    ) -> Steps[bool]:
        """Reads what has come by the keys of the round; whether nobody need be waited for."""
        for who in sorted(_keys.contributors(keys) - {own}):
            yield from meanwhile()
            yield from self.read(who)
        leavers = {_keys.leaver(key) for key in keys} & set(self.named or ())
        self.left = {who.island for who in leavers if who}
        here, now = {who.island for who in (own, *self.found)}, (yield Clock())
        expected = self.anchor.expected or None
        if self.begun is None and (expected is None or here.intersection(expected)):
            self.begun = now
        return now >= self.end or self._is_complete(here)

    def _is_complete(self, here: set[str]) -> bool:
        settings, expected = self.settings, self.anchor.expected
        if expected is None:
            return len(here) >= math.ceil(settings.quorum * settings.islands)
        awaited = set(expected) - self.left
        return len(here & awaited) >= math.ceil(settings.quorum * len(awaited))

    def read(self, who: Who) -> Steps[None]:
        """Reads a contribution, once; of one that cannot be read, keeps why."""
        if who in self.found:
            return
        try:
            data = yield Read(_keys.contribution(self.anchor.round, who), self.most)
        except DamagedError as error:
            data = error
        if data is not None:
            self.found[who] = data

    def late(self) -> Steps[list[str]]:
        """Who came to the round before when it was closed, and has not left since.

        Nobody where it is not known who came in time.
        """
        if self.named is None:
            return []
        keys = yield List(_keys.round_folder(self.anchor.round - 1))
        came = _keys.contributors(keys) - set(self.named)
        if came:
            came -= {
                _keys.leaver(key) for key in (yield List(_keys.round_folder(self.anchor.round)))
            }
        return [who.island for who in came]
