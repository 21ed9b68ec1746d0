"""What islands write, read and ask for in a day, before there are any."""

from typing import NamedTuple

import jax

from fftgrad._contracts import PyTree
from fftgrad._values import check_count, check_within
from fftgrad.islands._model import Model
from fftgrad.islands._programs import Programs
from fftgrad.islands._settings import Settings

DAY = 86_400.0
HEADER = 450
"""Bytes of a contribution besides its payloads, about."""


class Sizing(NamedTuple):
    """A day of one island, and of the store; bytes and requests by their kinds.

    Attributes:
      rounds: in the day.
      contribution: bytes of one.
      written: bytes that an island writes, its share of the anchors with it.
      read: bytes that an island reads.
      puts: requests that make objects, of an island. Listings cost as much, and are in `lists`.
      gets: requests that read objects, of an island.
      lists: requests that list objects, of an island.
      stored: bytes in the store at most, without those of manifests.
    """

    rounds: float
    contribution: int
    written: float
    read: float
    puts: float
    gets: float
    lists: float
    stored: float

    def cost(
        self, islands: int, *, per_put: float, per_get: float, per_byte_out: float = 0.0
    ) -> float:
        """What a day of all islands costs, at prices for a request and for a byte that is read."""
        own = (self.puts + self.lists) * per_put + self.gets * per_get
        return islands * (own + self.read * per_byte_out)


def sizing(params: PyTree, settings: Settings, islands: int, seconds: float) -> Sizing:
    """Function: bytes and requests in a day, for a number of islands that all keep pace.

    Args:
      params: parameters, or their shapes.
      settings: of the run.
      islands: how many there are.
      seconds: from one round to the next; an island waits in a round for up to a fifth of the
        deadline, in about 8 listings.

    Returns:
      A `Sizing`.

    Example:
      >>> like = jax.ShapeDtypeStruct((1_000_000,), jnp.float32)
      >>> day = fg.islands.sizing(like, fg.islands.Settings(), islands=4, seconds=300.0)
      >>> day.rounds, day.contribution, round(day.read / 1e6)
      (288.0, 41894, 40)
      >>> round(day.cost(4, per_put=5e-6, per_get=4e-7), 3)
      0.178
    """
    islands = check_count("sizing(islands)", islands, "use 4.")
    check_within("sizing(seconds)", seconds, "(0, inf)", "use 300.0.")
    model = Model.of(params)
    programs = Programs.of(model, settings.exchange)
    contribution = sum(programs.sizes) + HEADER
    rounds = DAY / float(seconds)
    anchor = 2 * 4 * sum(leaf.size for leaf in jax.tree.leaves(model.likes))  # with a momentum
    anchors = rounds / settings.anchors / islands  # each by one of them
    manifest = 400 * islands
    asks = DAY / (settings.deadline / 4)  # whether anybody else claims the name
    return Sizing(
        rounds=rounds,
        contribution=contribution,
        written=rounds * (contribution + manifest / islands) + anchors * anchor,
        read=rounds * ((islands - 1 + 1 / islands) * contribution + manifest),
        puts=rounds * (1 + 1 / islands) + anchors,
        gets=rounds * (islands - 1 + 4 + 2 / islands),
        lists=rounds * (1 + POLLS) + asks + 2 * anchors,
        stored=2 * anchor + 3 * settings.anchors * islands * contribution,
    )


POLLS = 8
"""Listings in which an island waits for the others, in the mean of a round."""
