"""Recipes: the parts of a published method."""

import inspect

from fftgrad._contracts import Exchange, Memory
from fftgrad._values import check_kind, value
from fftgrad.exchanges._bucketing import Bucketing
from fftgrad.memories import NoMemory


@value
class Recipe:
    """Value: the parts of a published method; `fg.methods` has a function for each method.

    `compressed_pmean` and `diloco` take a recipe as their exchange. A `memory` that you pass to
    them replaces the memory of the recipe. `fg.wire_bytes` and `fg.link_bytes` return the bytes of
    a recipe without compiling.

    Args:
      exchange: compression, collective and average.
      memory: memory of the unsent values.
      bucketing: rule for leaves that are compressed together.

    Example:
      >>> method = fg.methods.top_k(fraction=0.01)
      >>> method == fg.Recipe(fg.AllGather(fg.TopK(fraction=0.01)), fg.ErrorFeedback())
      True
      >>> fg.wire_bytes(method, jnp.zeros(10_000))
      516
      >>> tx = fg.compressed_pmean(method, axis_name="data")
    """

    exchange: Exchange
    memory: Memory = NoMemory()
    bucketing: Bucketing = Bucketing()

    def __post_init__(self) -> None:
        check_parts("Recipe", self.exchange, self.memory, self.bucketing)


def recipe_of(
    owner: str,
    what: Exchange | Recipe,
    memory: Memory | None = None,
    bucketing: Bucketing | None = None,
) -> Recipe:
    """Make a recipe of a recipe or an exchange; a given memory or bucketing replaces its own."""
    if isinstance(what, Recipe):
        memory = what.memory if memory is None else memory
        bucketing = what.bucketing if bucketing is None else bucketing
        what = what.exchange
    memory = NoMemory() if memory is None else memory
    bucketing = Bucketing() if bucketing is None else bucketing
    check_parts(owner, what, memory, bucketing)
    return Recipe(what, memory, bucketing)


WRAP = "wrap a codec as TwoStage(codec, workers), or as AllGather(codec)."


def check_parts(owner: str, exchange: object, memory: object, bucketing: object) -> None:
    swapped = f"the exchange comes first: {owner}(exchange, {exchange!r}, ...)."
    remedy = swapped if isinstance(exchange, Memory) else WRAP
    check_exchange(f"{owner}(exchange)", exchange, remedy)
    check_kind(f"{owner}(memory)", memory, Memory, "use ErrorFeedback().")
    check_kind(f"{owner}(bucketing)", bucketing, Bucketing, "use Bucketing('leaf').")


def check_exchange(argument: str, exchange: object, remedy: str = WRAP) -> None:
    if inspect.isfunction(exchange):
        remedy = f"pass the result of a method: call it, as {exchange.__name__}(...)."
    elif isinstance(exchange, Recipe):
        remedy = "take its .exchange here, and pass .memory and .bucketing beside it."
    check_kind(argument, exchange, Exchange, remedy)
