"""What the results of a traced function are made of: of one leaf, value by value, or of more.

A result is followed through the equations of a jaxpr. What is not known to go value by value counts
as mixing values: a primitive that JAX adds is refused before it is understood.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.core import Tracer
from jax.extend import core

from fftgrad import _axes
from fftgrad._contracts import PyTree

BY_VALUE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
bitcast_convert_type cbrt ceil clamp clz convert_element_type copy cos cosh digamma div eq erf
erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac integer_pow is_finite le lgamma log log1p
logistic lt max min mul ne neg nextafter not or polygamma population_count pow
reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left
shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor zeta
"""
EACH_VALUE = frozenset(BY_VALUE.split())
"""Primitives that make each value of the values at its place."""

MOVES = "broadcast_in_dim device_put expand_dims pvary reshape reshard sharding_constraint squeeze"
SAME_ORDER = frozenset(MOVES.split())
"""Primitives that leave the values and their order, where they leave their number."""

IDEMPOTENT = frozenset(["reduce_and", "reduce_max", "reduce_min", "reduce_or"])
"""Reductions that make of equal values that value."""

NO, YES = hash("no"), hash("yes")
"""How what is known to be False or 0, and True, is made."""

CALLED = "checkpoint closed_call core_call custom_jvp_call custom_vjp_call jit pjit remat remat2"
CALLS = frozenset(CALLED.split())
"""Primitives whose program is a parameter, of the same arguments."""

SHAPES = frozenset(["out_sharding", "sharding"])
"""Parameters of the primitives of `EACH_VALUE` that go by shapes."""


class Value(NamedTuple):
    """What is known of an array.

    Attributes:
      size: how many values it has.
      leaf: the leaf of which each value is made, from the value at its place; None if of none.
      even: whether that is done alike at each place: of no leaf, all its values are equal.
      mixed: by what values of different places, or leaves, came together; "" if by nothing.
      finite: whether it is known to be so, as it is.
      made: how it was computed, in a number that is the same for other shapes.
    """

    size: int
    leaf: int | None = None
    even: bool = True
    mixed: str = ""
    finite: bool = False
    made: int = 0

    def kind(self) -> tuple[int | None, bool, bool]:
        """What it may be used for."""
        return self.leaf, self.even, bool(self.mixed)


def leaves(like: PyTree) -> list[Value]:
    """The leaves of a tree, each made of itself."""
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(like)]
    return [Value(size, i, made=hash(("leaf", i))) for i, size in enumerate(sizes)]


def trace(function: Callable[..., PyTree], *args: PyTree) -> tuple[core.ClosedJaxpr, PyTree]:
    """The program of a function, and the shapes of its results."""
    made: Any = jax.make_jaxpr(function, return_shape=True)(*args)
    return made


def trace_update(
    owner: str, inner: optax.GradientTransformation, like: PyTree, state: PyTree
) -> tuple[core.ClosedJaxpr, PyTree]:
    """The program of an update, of (gradients, state, parameters, loss)."""
    update: Any = optax.with_extra_args_support(inner).update
    loss = jax.ShapeDtypeStruct((), np.float32)
    try:
        return trace(lambda g, s, p, loss: update(g, s, p, value=loss), like, state, like, loss)
    except TypeError as error:
        if "required keyword-only" not in str(error):
            raise
        raise ValueError(
            f"{owner}(inner): must need gradients, parameters and value= alone, got one that asks "
            f"for more: {error}; use optax.adamw."
        ) from error


def follow(program: core.ClosedJaxpr, args: Sequence[Value]) -> list[Value]:
    """What the results are made of, for arguments that are made of these."""
    known = dict(zip(program.jaxpr.invars, args, strict=True))
    known |= dict(zip(program.jaxpr.constvars, map(_constant, program.consts), strict=True))

    def read(atom: Any) -> Value:
        return _constant(atom.val) if isinstance(atom, core.Literal) else known[atom]

    for eqn in program.jaxpr.eqns:
        outs = _equation(eqn, [read(atom) for atom in eqn.invars])
        known.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in program.jaxpr.outvars]


def joined(values: Sequence[Value], size: int, made: int = 0) -> Value:
    """What is made of these, value by value."""
    leaves = {value.leaf for value in values if value.leaf is not None}
    sizes = {value.size for value in values if value.leaf is not None}
    even = all(value.even for value in values)
    reasons = [value.mixed for value in values if value.mixed]
    if len(leaves) > 1:
        reasons.append("several leaves")
    elif leaves and sizes != {size}:
        reasons.append("one value for many")
    elif leaves and not even:
        reasons.append("what differs by place")
    leaf = min(leaves, default=None)
    return Value(size, leaf, even, next(iter(reasons), ""), made=made)


def _constant(value: Any) -> Value:
    size = math.prod(np.shape(value))
    if isinstance(value, Tracer) or size != 1:
        seen = np.shape(value) if isinstance(value, Tracer) else repr(value)
        return Value(size, even=size <= 1, made=hash(seen))
    number = value.item() if isinstance(value, np.ndarray | np.generic | jax.Array) else value
    finite = isinstance(number, int | float) and math.isfinite(number)
    return Value(1, finite=finite, made=hash((type(value), repr(number))))


def _equation(eqn: core.JaxprEqn, ins: list[Value]) -> list[Value]:
    name, sizes = eqn.primitive.name, [_size(var) for var in eqn.outvars]
    if name in CALLS:
        names = "jaxpr", "call_jaxpr", "fun_jaxpr"
        return follow(_closed(next(eqn.params[n] for n in names if n in eqn.params)), ins)
    if name == "while":
        return _while(eqn, ins)
    if name in ("cond", "scan"):
        return (_cond if name == "cond" else _scan)(eqn, ins, sizes)
    if name == "optimization_barrier":
        return ins
    permutes = name == "reshape" and eqn.params["dimensions"] is not None
    if name in SAME_ORDER and len(ins) == 1 and not permutes:
        (value,) = ins
        if value.size == sizes[0] or (value.leaf is None and value.even):
            return [value._replace(size=sizes[0])]
        return [joined(ins, sizes[0], value.made)]
    if known := _known(name, ins):
        return [known._replace(size=sizes[0])]
    params = {k: v for k, v in eqn.params.items() if k not in SHAPES}
    made = [name, repr(sorted(params.items(), key=str)), *(value.made for value in ins)]
    if name in EACH_VALUE:
        return [joined(ins, sizes[0], hash(tuple(made)))]
    shapes = [str(var.aval) for var in (*eqn.invars, *eqn.outvars)]
    reasons = [value.mixed or name for value in ins if value.mixed or value.leaf is not None]
    mixed = next(iter(reasons), "")
    return [
        Value(size, even=size <= 1, mixed=mixed, made=hash((*made, *shapes, i)))
        for i, size in enumerate(sizes)
    ]


def _known(name: str, ins: list[Value]) -> Value | None:
    """What comes of equal values, or of the question whether values are finite that are so."""
    if not ins:
        return None
    value = ins[0]
    if value.finite and name == "is_finite":
        return Value(1, made=YES)
    if value.finite and name == "ne" and value.made == ins[1].made:  # isnan
        return Value(1, made=NO)
    if value.leaf is not None or value.mixed or not value.even:
        return None
    if name in IDEMPOTENT or (value.made == NO and name in ("convert_element_type", "reduce_sum")):
        return value
    if name == "not" and value.made in (NO, YES):
        return value._replace(made=NO + YES - value.made)
    return None


def _cond(eqn: core.JaxprEqn, ins: list[Value], sizes: list[int]) -> list[Value]:
    index, *operands = ins
    branches = [follow(_closed(branch), operands) for branch in eqn.params["branches"]]
    return [
        joined([index, *each], size, hash(("cond", index.made, *(value.made for value in each))))
        for size, *each in zip(sizes, *branches, strict=True)
    ]


def _while(eqn: core.JaxprEqn, ins: list[Value]) -> list[Value]:
    first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    of_cond, of_body, carry = ins[:first], ins[first : first + second], ins[first + second :]

    def turn(carry: list[Value]) -> list[Value]:
        (going,) = follow(_closed(eqn.params["cond_jaxpr"]), [*of_cond, *carry])
        after = follow(_closed(eqn.params["body_jaxpr"]), [*of_body, *carry])
        return [joined([going, v], v.size, hash((going.made, v.made))) for v in after]

    return settled(turn, carry)


def _scan(eqn: core.JaxprEqn, ins: list[Value], sizes: list[int]) -> list[Value]:
    first, count = _axes.scan_counts(eqn.params)
    consts, carry, stacked = ins[:first], ins[first : first + count], ins[first + count :]
    length, body = eqn.params["length"], _closed(eqn.params["jaxpr"])
    rows = [
        _apart(v, v.size // max(1, length), v.even or v.size == length, v.made) for v in stacked
    ]
    after = settled(lambda carry: follow(body, [*consts, *carry, *rows])[:count], carry)
    out = [*after, *follow(body, [*consts, *after, *rows])[count:]]
    made = hash(("scan", length, *(v.made for v in out)))
    return [
        v._replace(made=hash((made, i))) if i < count else _apart(v, size, False, hash((made, i)))
        for i, (v, size) in enumerate(zip(out, sizes, strict=True))
    ]


def _apart(value: Value, size: int, even: bool, made: int) -> Value:
    """Rows that a loop takes from an array, or makes one of: of a leaf, they mix its places."""
    mixed = value.mixed or ("" if value.leaf is None else "scan")
    return Value(size, even=even, mixed=mixed, made=made)


def settled(turn: Callable[[list[Value]], list[Value]], start: list[Value]) -> list[Value]:
    """What is carried, once another turn makes no more of it."""
    carry, made = [value._replace(finite=False) for value in start], None
    while True:
        after = turn(carry)
        made = made or [hash((old.made, new.made)) for old, new in zip(carry, after, strict=True)]
        pairs = zip(carry, after, strict=True)
        both = [joined([old, new], old.size, old.made) for old, new in pairs]
        if [value.kind() for value in both] == [value.kind() for value in carry]:
            return [v._replace(made=m) for v, m in zip(both, made, strict=True)]
        carry = both


def _closed(jaxpr: Any) -> core.ClosedJaxpr:
    return jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else core.ClosedJaxpr(jaxpr, ())


def _size(var: Any) -> int:
    return math.prod(getattr(var.aval, "shape", ()))
