"""What a method is made of."""

import inspect

from fftgrad._contracts import Exchange, Memory
from fftgrad._values import check_kind, value
from fftgrad.exchanges._bucketing import Bucketing
from fftgrad.memories import NoMemory


@value
class Recipe:
    """Value: what a published method is made of; `fg.methods` has one function for each.

    `compressed_pmean` makes a transformation of it; `diloco` exchanges by it; `fg.wire_bytes` and
    `fg.link_bytes` tell its bytes, and nothing is compiled for that.

    Args:
      exchange: what travels, and how it is averaged.
      memory: what becomes of what was not sent.
      bucketing: which leaves are compressed together.

    Raises:
      TypeError: if one of them is not of its kind.

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
    """The recipe of a method or an exchange; what is given beside it takes the place of its own."""
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
    """Refuses what is none of these."""
    remedy = WRAP
    if isinstance(exchange, Memory):
        remedy = f"the exchange comes first: {owner}(exchange, {exchange!r}, ...)."
    check_exchange(f"{owner}(exchange)", exchange, remedy)
    check_kind(f"{owner}(memory)", memory, Memory, "use ErrorFeedback().")
    check_kind(f"{owner}(bucketing)", bucketing, Bucketing, "use Bucketing('leaf').")


def check_exchange(argument: str, exchange: object, remedy: str = WRAP) -> None:
    """Refuses what is no exchange, such as a method, which has one."""
    if inspect.isfunction(exchange):
        remedy = f"pass what a method returns: call it, as {exchange.__name__}(...)."
    elif isinstance(exchange, Recipe):
        remedy = (
            "it is a method: take its .exchange here, and give compressed_pmean its .memory and "
            ".bucketing beside it."
        )
    check_kind(argument, exchange, Exchange, remedy)
