"""What all islands of a run have to agree on, as a value and as text."""

import ast
import contextlib
import dataclasses
import hashlib
import json
from typing import Any

from fftgrad import codecs
from fftgrad._values import check_count, check_kind, check_within, value
from fftgrad.exchanges import AllGather
from fftgrad.islands._frame import DamagedError
from fftgrad.optimizers._diloco import SPARSE

MOST_STEPS = 1_000_000
LONGEST_DEADLINE = 7 * 86_400.0
LONGEST_EXCHANGE = 1 << 14  # characters of its text


@value
class Settings:
    """Value: what all islands of a run agree on; the store has it, and a manifest may change it.

    An island that brings other settings with a higher `version` proposes them: they are in force
    for all from the round after the next manifest. Of several proposals the highest version wins.

    Args:
      exchange: the codec of what travels, or a rule, and what takes the place of the mean, as
        `fg.AllGather(codec, clip_to_median=True)`. It is written to the store as text,
        and read without running any code: codecs of `fg.codecs` are known everywhere, those of
        one's own only to islands whose settings have the same.
      every: H, the inner steps between two contributions of an island.
      rate: of the outer optimizer, to whose function it is given.
      islands: how many the first round waits for.
      quorum: share of the islands expected that closes a round at once.
      deadline: seconds after which a round is closed with those that came, from when an island that
        has handed in sees that one of those expected has, and after which a name that nobody
        answers for is free. Inner steps may take longer.
      stale: how many rounds old the parameters may be from which a contribution starts.
      limit: how many times the median of their norms, and of their weights, one may have.
      anchors: rounds between two anchors.
      version: of the settings; of two, the higher is in force.

    Example:
      >>> fg.islands.Settings(every=30, islands=3)
      Settings(every=30, islands=3)
    """

    exchange: AllGather = SPARSE
    every: int = 50
    rate: float = 0.7
    islands: int = 1
    quorum: float = 1.0
    deadline: float = 60.0
    stale: int = 2
    limit: float = 10.0
    anchors: int = 10
    version: int = 0

    def __post_init__(self) -> None:
        check_kind(
            "Settings(exchange)",
            self.exchange,
            AllGather,
            "use fg.AllGather(codec), which gathers.",
        )
        for name in ("every", "islands", "anchors"):
            check_count(f"Settings({name})", getattr(self, name), "use 10.")
        for name in ("stale", "version"):
            check_count(f"Settings({name})", getattr(self, name), "use 1.", least=0)
        for name in ("every", "islands", "anchors"):
            if getattr(self, name) > MOST_STEPS:
                raise ValueError(
                    f"Settings({name}): must be at most {MOST_STEPS}, got {getattr(self, name)}; "
                    "use 50."
                )
        check_within("Settings(rate)", self.rate, "(0, inf)", "use 0.7.")
        check_within("Settings(quorum)", self.quorum, "(0, 1]", "use 1.0, to wait for all.")
        deadlines = f"(0, {LONGEST_DEADLINE:g}]"
        check_within("Settings(deadline)", self.deadline, deadlines, "use 60.0.")
        check_within("Settings(limit)", self.limit, "[1, inf)", "use 10.0.")

    def as_dict(self) -> dict[str, Any]:
        """The settings as JSON has them, the exchange as text."""
        names = (field.name for field in dataclasses.fields(self))
        return {name: getattr(self, name) for name in names} | {"exchange": repr(self.exchange)}

    @property
    def digest(self) -> str:
        """By which two settings are told apart."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()[:16]


def read_settings(found: object, known: tuple[AllGather, ...] = ()) -> Settings:
    """The settings that JSON has; `known` are exchanges that the reader's program has itself."""
    names = {field.name for field in dataclasses.fields(Settings)}
    if not isinstance(found, dict) or set(found) != names:
        raise DamagedError(f"settings must have {sorted(names)}")
    told: dict[str, Any] = dict(found)
    text = told.pop("exchange")
    exchange = next((one for one in known if repr(one) == text), None)
    try:
        return Settings(exchange or _exchange_of(text), **told)
    except Exception as error:  # whatever a part makes of arguments that others wrote
        raise DamagedError(f"settings that this program cannot have: {error}") from None


KNOWN = {name: getattr(codecs, name) for name in codecs.__all__} | {"AllGather": AllGather}


def _exchange_of(text: object) -> AllGather:
    """The exchange that a `repr` is the call of: calls of known names on literals, and no more."""
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
