"""Which codec each leaf gets."""

import dataclasses
import fnmatch
import math

from fftgrad._contracts import Codec, Like, Scope
from fftgrad._values import check_count, check_kind, value
from fftgrad.exchanges._rules import CodecRule

_GROUP = "rule "


@value
class Rule:
    """Function: a codec, and the leaves that it is for: those that meet every condition.

    Args:
      codec: what they travel through; `Identity()` sends them dense.
      path: a pattern for the leaf's path, as in a shell: "*/bias", "*embed*".
      max_ndim: most axes: 1 for biases and scales.
      max_size: most values.

    Raises:
      TypeError: if `codec` is none.

    Example:
      >>> rule = fg.Rule(fg.Identity(), path="*/bias", max_size=100)
      >>> rule.holds("dense/bias", jnp.ones(3)), rule.holds("dense/kernel", jnp.ones(3))
      (True, False)
    """

    codec: Codec
    path: str = "*"
    max_ndim: int | None = None
    max_size: int | None = None

    def __post_init__(self) -> None:
        check_kind("Rule(codec)", self.codec, Codec, "use Identity() to send these leaves dense.")
        for field in ("max_ndim", "max_size"):
            if (most := getattr(self, field)) is not None:
                check_count(f"Rule({field})", most, "leave it out for all.", least=0)

    def holds(self, path: str, leaf: Like) -> bool:
        """Whether the leaf meets every condition."""
        return (
            fnmatch.fnmatchcase(path, self.path)
            and (self.max_ndim is None or len(leaf.shape) <= self.max_ndim)
            and (self.max_size is None or math.prod(leaf.shape) <= self.max_size)
        )


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Policy(CodecRule):
    """Function: the codec of each leaf by the first rule that holds for it, or a default.

    The leaves of one rule form one part, so that a selector chooses over all of them, and all
    parts travel in the same collective: what is to go dense does not need another. No leaf goes
    without: what no rule is for gets the default.

        policy = fg.Policy(
            fg.Rule(fg.Identity(), max_ndim=1), default=fg.chain(fg.TopK(0.01), fg.LogLevels(8))
        )
        fg.compressed_pmean(fg.AllGather(policy), axis_name="data")

    Args:
      *rules: in order of precedence.
      default: the codec of all other leaves.

    Raises:
      TypeError: if a rule is no `Rule`, or the default no codec.
      ValueError: while tracing, if the parts are not those of its own `scope`.

    Example:
      >>> policy = fg.Policy(fg.Rule(fg.Identity(), max_ndim=1), default=fg.TopK(fraction=0.01))
      >>> params = {"bias": jnp.ones(10), "kernel": jnp.ones((100, 10))}
      >>> fg.wire_bytes(fg.AllGather(policy), params)
      96
    """

    rules: tuple[Rule, ...]
    default: Codec

    def __init__(self, *rules: Rule, default: Codec) -> None:
        for position, rule in enumerate(rules):
            if not isinstance(rule, Rule):
                raise TypeError(
                    f"Policy(rules[{position}]): must be a Rule, got {rule!r}; use "
                    "Rule(codec, path='*/bias')."
                )
        check_kind(
            "Policy(default)", default, Codec, "use Identity() to send all other leaves dense."
        )
        object.__setattr__(self, "rules", rules)
        object.__setattr__(self, "default", default)

    def __repr__(self) -> str:
        rules = "".join(f"{rule!r}, " for rule in self.rules)
        return f"Policy({rules}default={self.default!r})"

    @property
    def scope(self) -> Scope:
        return _PartOf(self)

    @property
    def of_rules(self) -> dict[str, Codec]:
        """The codec of each rule, by the name of the part that its leaves form."""
        return {f"{_GROUP}{number}": rule.codec for number, rule in enumerate(self.rules)}

    def part_of(self, path: str, leaf: Like) -> str:
        """The name of the part that a leaf belongs to."""
        return f"{_GROUP}{self._number(path, leaf)}"

    def __call__(self, name: str, like: Like) -> Codec:
        """The codec of one of its parts."""
        by_name = self.of_rules | {f"{_GROUP}{len(self.rules)}": self.default}
        if name not in by_name:
            raise ValueError(
                f"Policy(name): must be a part of its own scope, got {name!r}, because another "
                "scope mixes leaves that different rules are for; leave the layout's scope out."
            )
        return by_name[name]

    def _number(self, path: str, leaf: Like) -> int:
        held = (i for i, rule in enumerate(self.rules) if rule.holds(path, leaf))
        return next(held, len(self.rules))


@dataclasses.dataclass(frozen=True)
class _PartOf:
    """The scope of a policy: a value, so that those of equal policies are equal."""

    policy: Policy

    def __call__(self, path: str, leaf: Like) -> str:
        return self.policy.part_of(path, leaf)
