"""What a scheduled program of XLA does: its kernels, where the host waits, what overlaps."""

import dataclasses
import re
from collections.abc import Iterator

KERNELS = {
    "convolution",
    "copy",
    "custom-call",
    "dot",
    "fft",
    "fusion",
    "gather",
    "reduce",
    "reduce-window",
    "scatter",
    "sort",
}
UNKNOWN_TRIPS = 31
"""What a loop of unknown length is counted as: it bisects the bits of a key."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a computation."""

    name: str
    op: str
    line: str

    def computations(self, *attributes: str) -> list[str]:
        """The computations that it names under these attributes."""
        pattern = rf"(?:{'|'.join(attributes)})=(\{{[^}}]*\}}|[\w.\-%]+)"
        found = re.findall(pattern, self.line)
        return [name.strip("{}% ") for names in found for name in names.split(",")]


@dataclasses.dataclass(frozen=True)
class Cost:
    """What running a computation takes.

    Attributes:
      kernels: launches, loops times their trips, conditionals by their cheapest branch.
      host_syncs: how often the host waits for a value from the device to know what comes next.
    """

    kernels: int = 0
    host_syncs: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.kernels + other.kernels, self.host_syncs + other.host_syncs)

    def __rmul__(self, times: int) -> "Cost":
        return Cost(times * self.kernels, times * self.host_syncs)


class Program:
    """The text of a compiled program, whose lines are in the order in which they run."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        for head, body in re.findall(
            r"^((?:ENTRY )?%?[\w.\-]+) \(.*?\{\n(.*?)^\}", text, re.M | re.S
        ):
            name = head.removeprefix("ENTRY ").lstrip("%")
            self.computations[name] = list(_instructions(body))
            self.entry = name if head.startswith("ENTRY ") else self.entry

    def cost(self, name: str = "") -> Cost:
        """What running a computation takes; that of the whole program without a name."""
        return sum(map(self._cost, self.computations[name or self.entry]), Cost())

    def _cost(self, instruction: Instruction) -> Cost:
        if instruction.op in KERNELS or instruction.op.endswith("-start"):
            return Cost(kernels=1)
        if instruction.op == "while":
            (body,) = instruction.computations("body")
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.line)
            if trips:
                return int(trips[1]) * self.cost(body)
            return UNKNOWN_TRIPS * (self.cost(body) + Cost(host_syncs=1))
        if instruction.op == "conditional":
            branches = instruction.computations(
                "true_computation", "false_computation", "branch_computations"
            )
            return min((self.cost(b) for b in branches), key=lambda c: c.kernels) + Cost(0, 1)
        if instruction.op == "call":
            return sum((self.cost(name) for name in instruction.computations("to_apply")), Cost())
        return Cost()

    def overlaps(self, *, at_least: int = 0) -> list[tuple[str, int]]:
        """Each collective of the entry, and how many products of matrices run beside it.

        Only collectives whose result has at least that many values count.
        """
        begun: dict[str, int] = {}
        out: list[tuple[str, int]] = []
        products = 0
        for instruction in self.computations[self.entry]:
            products += _is_product(instruction)
            if instruction.op.endswith("-start"):
                begun[instruction.name] = products
            elif instruction.op.endswith("-done"):
                (start,) = re.findall(r"-done\(.*?%([\w.\-]+)\)", instruction.line)
                if _values(instruction.line) >= at_least:
                    out.append((instruction.op.removesuffix("-done"), products - begun[start]))
        return out


def _instructions(body: str) -> Iterator[Instruction]:
    for line in body.splitlines():
        found = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (?:\(.*?\)|\S+) ([a-z][a-z\-]*)\(", line)
        if found:
            yield Instruction(found[1], found[2], line)


def _is_product(instruction: Instruction) -> bool:
    """Whether it multiplies matrices: a product on its own, or one that is fused with others."""
    if instruction.op in ("dot", "convolution"):
        return True
    return instruction.op in ("fusion", "custom-call") and bool(
        re.search(r"gemm|cublas|dot_general", instruction.name + instruction.line)
    )


def _values(line: str) -> int:
    """How many values the result of an instruction has."""
    shape = re.search(r"= \(?\w+\[([\d,]*)\]", line)
    size = 1
    for length in filter(None, shape[1].split(",") if shape else ()):
        size *= int(length)
    return size
