"""List the collectives of a compiled program."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax

from fftgrad._values import check
from fftgrad.ops._collectives import RING, Collective

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{\s*$")
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>.+?) (?P<opcode>[\w\-]+)\((?P<rest>.*)$"
)
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:to_apply|calls|body|condition|called_computations)=\{?%?([\w.\-]+)")
_GROUPS = re.compile(r"replica_groups=(?:\{\{(?P<first>[\d,]+)\}|\[\d+,(?P<size>\d+)\])")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[(?P<mesh>[^\]]*)\] *\{(?P<axes>[^}]*)\}")
_AXIS = re.compile(r"'([^']+)'=(\d+)")
_MEMBER = re.compile(r"'([^']+)'(?::\(\d+\)(\d+))?")  # an axis, or its part
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRUE_FALSE = re.compile(r"true_computation=%?([\w.\-]+), false_computation=%?([\w.\-]+)")


class _Instruction(NamedTuple):
    type: str
    opcode: str
    rest: str


def audit(compiled: jax.stages.Compiled | str) -> tuple[Collective, ...]:
    """Function: list every collective of a compiled program, from its text.

    It shows the real traffic: a compiler may widen a dtype, or split or add collectives. A
    collective of several arrays is listed once per array.

    Args:
      compiled: `jax.jit(step).lower(...).compile()`, or its text, for a CPU or GPU; TPU programs
        are untested.

    Returns:
      The collectives, in program order. If the compiler changed none, and the step has no others
      (mean loss, weight, `track_error`), their bytes add up to `fg.wire_bytes(exchange, params)`.
      For `Scheduled`, add up the bytes of one branch.

    Raises:
      ValueError: if the text is not that of a compiled program.

    Example:
      >>> step = jax.jit(lambda x: 2 * x).lower(jnp.ones(3)).compile()
      >>> fg.audit(step)  # nothing is sent
      ()
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    entry, computations = _parse(text or "")
    return tuple(_walk(entry, computations, (), repeated=False))


def _parse(text: str) -> tuple[str, dict[str, dict[str, _Instruction]]]:
    computations: dict[str, dict[str, _Instruction]] = {}
    entry = ""
    current: dict[str, _Instruction] = {}
    for line in text.splitlines():
        if match := _INSTRUCTION.match(line):
            current[match["name"]] = _Instruction(match["type"], match["opcode"], match["rest"])
        elif match := _COMPUTATION.match(line):
            current = computations[match["name"]] = {}
            if match["entry"]:
                entry = match["name"]
    rule, remedy = "be a compiled program", "pass jax.jit(step).lower(...).compile()."
    check(entry != "", "audit(compiled)", rule, "a text without an ENTRY", remedy)
    return entry, computations


def _walk(
    name: str,
    computations: dict[str, dict[str, _Instruction]],
    branch: tuple[int, ...],
    *,
    repeated: bool,
) -> Iterator[Collective]:
    instructions = computations[name]
    for instruction in instructions.values():
        kind = instruction.opcode.removesuffix("-start")
        if kind in RING:
            for operand in _operands(instruction.rest):
                for dtype, dims in _ARRAY.findall(instructions[operand].type):
                    shape = tuple(int(d) for d in dims.split(",") if d)
                    size = math.prod(shape) * _bits(dtype) // 8
                    workers = _group_size(instruction.rest)
                    yield Collective(kind, dtype, shape, size, branch, repeated, workers)
        elif instruction.opcode == "conditional":
            for index, called in enumerate(_branches(instruction.rest)):
                yield from _walk(called, computations, (*branch, index), repeated=repeated)
        elif instruction.opcode != "fusion":
            inside = repeated or instruction.opcode == "while"
            for called in _CALLED.findall(instruction.rest):
                yield from _walk(called, computations, branch, repeated=inside)


def _operands(rest: str) -> list[str]:
    depth = 1
    for position, char in enumerate(rest):
        depth += (char == "(") - (char == ")")
        if not depth:
            return re.findall(r"%([\w.\-]+)", rest[:position])
    return []


def _group_size(rest: str) -> int | None:
    if match := _GROUPS.search(rest):
        return int(match["size"] or match["first"].count(",") + 1)
    if match := _MESH_GROUPS.search(rest):
        sizes = dict(_AXIS.findall(match["mesh"]))
        return math.prod(int(part or sizes[name]) for name, part in _MEMBER.findall(match["axes"]))
    return None


def _branches(rest: str) -> list[str]:
    if match := _BRANCHES.search(rest):
        return [name.strip().lstrip("%") for name in match[1].split(",")]
    if match := _TRUE_FALSE.search(rest):
        return [match[2], match[1]]  # in the order of lax.cond: branch 0 is the false one
    return []


def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 0
