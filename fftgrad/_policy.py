"""Which codec each leaf gets, and what that costs."""

import dataclasses
import fnmatch
import math
from typing import NamedTuple

from fftgrad import _parts, _tree, _wire
from fftgrad._base import Codec, CodecRule, Like, PyTree, constructor_call, payload_spec

_GROUP = "rule "


@dataclasses.dataclass(frozen=True, repr=False)
class Rule:
    """Function: a codec, and the leaves that it is for: those that meet every condition.

    Args:
      codec: what they travel through; `Identity()` sends them dense.
      path: a pattern for the leaf's path, as in a shell: "*/bias", "*embed*".
      max_ndim: most axes: 1 for biases and scales.
      max_size: most values.

    Example:
      >>> import fftgrad as fg
      >>> import jax.numpy as jnp
      >>> rule = fg.Rule(fg.Identity(), path="*/bias", max_size=100)
      >>> rule.holds("dense/bias", jnp.ones(3)), rule.holds("dense/kernel", jnp.ones(3))
      (True, False)
    """

    codec: Codec
    path: str = "*"
    max_ndim: int | None = None
    max_size: int | None = None

    __repr__ = constructor_call

    def holds(self, path: str, leaf: Like) -> bool:
        """Whether the leaf meets every condition."""
        return (
            fnmatch.fnmatchcase(path, self.path)
            and (self.max_ndim is None or len(leaf.shape) <= self.max_ndim)
            and (self.max_size is None or math.prod(leaf.shape) <= self.max_size)
        )


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Policy:
    """Function: the codec of each leaf by the first rule that holds for it, or a default.

    The leaves of one rule form one part, so that a selector chooses over all of them, and all
    parts travel in the same collective: what is to go dense does not need another. No leaf goes
    without: what no rule is for gets the default.

        policy = fg.Policy(
            fg.Rule(fg.Identity(), max_ndim=1), default=fg.chain(fg.TopK(0.01), fg.RangeFloat(8))
        )
        fg.compressed_pmean(fg.AllGather(policy), scope=policy.scope, axis_name="data")

    Args:
      *rules: in order of precedence.
      default: the codec of all other leaves.

    Raises:
      TypeError: if a rule is no `Rule`, or the default no codec.
      ValueError: while tracing, if the parts are not those of its own `scope`.

    Example:
      >>> import fftgrad as fg
      >>> import jax.numpy as jnp
      >>> policy = fg.Policy(fg.Rule(fg.Identity(), max_ndim=1), default=fg.TopK(fraction=0.01))
      >>> params = {"bias": jnp.ones(10), "kernel": jnp.ones((100, 10))}
      >>> for row in fg.preview(policy, params, policy.scope):
      ...     print(row.leaf, row.codec, row.bytes)
      bias Identity() 40.0
      kernel TopK(fraction=0.01) 52.0
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
        if not isinstance(default, Codec):
            raise TypeError(
                f"Policy(default): must be a codec, got {default!r}; use Identity() to send all "
                "other leaves dense."
            )
        object.__setattr__(self, "rules", rules)
        object.__setattr__(self, "default", default)

    def __repr__(self) -> str:
        rules = "".join(f"{rule!r}, " for rule in self.rules)
        return f"Policy({rules}default={self.default!r})"

    def scope(self, path: str, leaf: Like) -> str:
        """The name of the part that a leaf belongs to."""
        return f"{_GROUP}{self._number(path, leaf)}"

    def __call__(self, name: str, like: Like) -> Codec:
        """The codec of one of its parts."""
        codecs = [*(rule.codec for rule in self.rules), self.default]
        by_name = {f"{_GROUP}{number}": codec for number, codec in enumerate(codecs)}
        part = name.partition(_tree.CUT)[0]
        if part not in by_name:
            raise ValueError(
                f"Policy(name): must be a part of its own scope, got {part!r}, because another "
                "scope mixes leaves that different rules are for; pass scope=policy.scope."
            )
        return by_name[part]

    def _number(self, path: str, leaf: Like) -> int:
        held = (i for i, rule in enumerate(self.rules) if rule.holds(path, leaf))
        return next(held, len(self.rules))


class PreviewRow(NamedTuple):
    """What becomes of one leaf.

    Attributes:
      leaf: its path.
      shape: its shape.
      part: the name of the part that it belongs to.
      codec: what the part travels through.
      bytes: its share, by its values, of the part's payload.
    """

    leaf: str
    shape: tuple[int, ...]
    part: str
    codec: Codec
    bytes: float


def preview(
    codec: Codec | CodecRule, params: PyTree, scope: _tree.Scope = "model"
) -> list[PreviewRow]:
    """Function: what each leaf of a gradient would travel through, and in how many bytes.

    Nothing is computed. The bytes add up to those of the payloads; the header of a buffer takes
    8 more.

    Args:
      codec: a codec, or a rule such as a `Policy`.
      params: a tree like the gradient, or its shapes.
      scope: as for `compressed_pmean`.

    Returns:
      A row for each leaf, in order.

    Example:
      >>> import fftgrad as fg
      >>> import jax.numpy as jnp
      >>> fg.preview(fg.Sign(), {"w": jnp.ones((8, 8))})[0].bytes
      12.0
    """
    layout = _tree.layout("preview", scope)
    codecs: dict[str, Codec] = {}
    payloads: dict[str, int] = {}
    for bucket in _tree.buckets(params, layout):
        for own, (piece, part) in zip(_parts.codecs(codec, bucket), bucket.items(), strict=True):
            (flat,) = _parts.vector_likes(part)
            name = piece.partition(_tree.CUT)[0]
            codecs[name] = own
            payload = _wire.nbytes(payload_spec(own, flat)) - _wire.nbytes()
            payloads[name] = payloads.get(name, 0) + payload
    rows: dict[int, PreviewRow] = {}
    for name, members in _tree.groups(params, layout).items():
        total = sum(math.prod(member.leaf.shape) for member in members)
        for number, path, leaf in members:
            if math.prod(leaf.shape):
                share = payloads[name] * math.prod(leaf.shape) / total
                rows[number] = PreviewRow(path, leaf.shape, name, codecs[name], share)
    return [rows[number] for number in sorted(rows)]
