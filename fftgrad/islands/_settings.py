"""The settings of a run, as a value and as text."""

import dataclasses
from typing import Any

from fftgrad._values import check_count, check_kind, check_within, value
from fftgrad.exchanges import AllGather
from fftgrad.optimizers._diloco import SPARSE


@value
class Settings:
    """Value: what all islands of a run agree on. The first of them writes it into the store.

    A run keeps its settings. With others, begin a run in another folder, from `island.params`.

    Args:
      exchange: the codec, or a rule, and whether vectors are cut to the median length, as in
        `fg.AllGather(codec, clip_to_median=True)`. The store has its `repr`.
      every: H, the inner steps between two contributions of an island.
      rate: of the outer optimizer.
      islands: number of islands for which the first round waits.
      deadline: seconds for which an island that has handed in waits for the others, from when it
        sees that an expected island has come. Inner steps may take longer.
      stale: greatest age, in rounds, of the parameters from which a contribution starts.
      limit: greatest norm, and greatest weight, of a contribution, in medians of those that came.
      anchors: rounds between two anchors.

    Example:
      >>> fg.islands.Settings(every=30, islands=3)
      Settings(every=30, islands=3)
    """

    exchange: AllGather = SPARSE
    every: int = 50
    rate: float = 0.7
    islands: int = 1
    deadline: float = 60.0
    stale: int = 2
    limit: float = 10.0
    anchors: int = 10

    def __post_init__(self) -> None:
        check_kind(
            "Settings(exchange)",
            self.exchange,
            AllGather,
            "use fg.AllGather(codec), which gathers.",
        )
        for name in ("every", "islands", "anchors"):
            check_count(f"Settings({name})", getattr(self, name), "use 10.")
        check_count("Settings(stale)", self.stale, "use 1.", least=0)
        check_within("Settings(rate)", self.rate, "(0, inf)", "use 0.7.")
        check_within("Settings(deadline)", self.deadline, "(0, 604800]", "use 60.0.")
        check_within("Settings(limit)", self.limit, "[1, inf)", "use 10.0.")

    def as_dict(self) -> dict[str, Any]:
        """The settings for JSON, with the exchange as text."""
        names = (field.name for field in dataclasses.fields(self))
        return {name: getattr(self, name) for name in names} | {"exchange": repr(self.exchange)}
