"""The settings of a run, as a value and as text."""

import ast
import contextlib
import dataclasses
from typing import Any

from fftgrad import codecs
from fftgrad._values import check_count, check_kind, check_within, value
from fftgrad.exchanges import AllGather
from fftgrad.islands._objects import DamagedError
from fftgrad.optimizers._diloco import SPARSE

LONGEST_EXCHANGE = 1 << 14
"""Most characters of its text."""


@value
class Settings:
    """Value: what all islands of a run agree on. The first of them writes it into the store.

    A run keeps its settings. With others, begin a run in another folder, from `island.params`.

    Args:
      exchange: the codec, or a rule, and whether vectors are cut to the median length, as in
        `fg.AllGather(codec, clip_to_median=True)`. The store has it as text, which is read without
        running code. An island knows the codecs of `fg.codecs`; pass it settings with your own.
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


def read_settings(found: object, known: AllGather | None = None) -> Settings:
    """The settings of JSON. `known` is an exchange that the program of the reader has."""
    names = {field.name for field in dataclasses.fields(Settings)}
    if not isinstance(found, dict) or set(found) != names:
        raise DamagedError(f"settings must have {sorted(names)}")
    told: dict[str, Any] = dict(found)
    text = told.pop("exchange")
    try:
        exchange = known if known and repr(known) == text else _exchange_of(text)
        return Settings(exchange, **told)
    except Exception as error:  # a part may raise any for arguments of others
        raise DamagedError(f"settings that this program cannot have: {error}") from None


KNOWN = {name: getattr(codecs, name) for name in codecs.__all__} | {"AllGather": AllGather}


def _exchange_of(text: object) -> AllGather:
    """The exchange of a `repr`: calls of known names on literals, and nothing else."""
    told, found = str(text), None
    with contextlib.suppress(SyntaxError, RecursionError, MemoryError):
        if len(told) <= LONGEST_EXCHANGE:
            found = _value_of(ast.parse(told, mode="eval").body)
    if isinstance(found, AllGather):
        return found
    raise ValueError(f"an exchange of its own, {told[:300]}; give it to Island(settings).")


def _value_of(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KNOWN:
        keywords = {word.arg: _value_of(word.value) for word in node.keywords if word.arg}
        return KNOWN[node.func.id](*map(_value_of, node.args), **keywords)
    if isinstance(node, ast.Tuple):
        return tuple(map(_value_of, node.elts))
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"what is no codec of fftgrad, {ast.unparse(node)[:300]}") from None
