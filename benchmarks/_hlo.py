"""What a scheduled program of XLA does: its kernels, and where the host waits."""

import dataclasses
import math
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
WIDTHS = {
    **dict.fromkeys(("pred", "s8", "u8"), 1),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 8),
    "token": 0,
}
SAME_PLACE = {"bitcast", "reshape", "copy", "get-tuple-element"}
TAKES = {"slice", "dynamic-slice", "gather"}
PUTS = {"scatter": 2, "dynamic-update-slice": 1}
"""Which operand is what is put."""
UNKNOWN_TRIPS = 31
"""What a loop of unknown length is counted as: it bisects the bits of a key."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a computation."""

    name: str
    op: str
    line: str

    @property
    def nbytes(self) -> int:
        """The size of its result."""
        shape = self.line.partition(" = ")[2].partition(f" {self.op}(")[0]
        return sum(
            WIDTHS[dtype] * math.prod(map(int, filter(None, lengths.split(","))))
            for dtype, lengths in re.findall(r"(\w+)\[([\d,]*)\]", shape)
        )

    @property
    def count(self) -> int:
        """How many values its result has; 0 for several results."""
        shape = re.match(r"\w+\[([\d,]*)\]", self.line.partition(" = ")[2])
        return math.prod(map(int, filter(None, shape[1].split(",")))) if shape else 0

    @property
    def operands(self) -> list[str]:
        """The names of what it works on."""
        arguments = self.line.partition(f" {self.op}(")[2].partition(")")[0]
        return re.findall(r"%([\w.\-]+)", arguments)

    def computations(self, *attributes: str) -> list[str]:
        """The computations that it names under these attributes."""
        pattern = rf"(?:{'|'.join(attributes)})=(\{{[^}}]*\}}|[\w.\-%]+)"
        found = re.findall(pattern, self.line)
        return [name.strip("{}% ") for names in found for name in names.split(",")]


@dataclasses.dataclass(frozen=True)
class Cost:
    """What running a computation takes."""

    kernels: int = 0  # launches, loops times their trips, conditionals by their cheapest branch
    # how often the host waits for a value from the device to know what comes next
    host_syncs: int = 0
    # bytes that the kernels read and write. Of what a kernel only slices or gathers from, what it
    # takes counts; of what it scatters into, in place, what it puts there, twice
    traffic: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.kernels + other.kernels,
            self.host_syncs + other.host_syncs,
            self.traffic + other.traffic,
        )

    def __rmul__(self, times: int) -> "Cost":
        return Cost(times * self.kernels, times * self.host_syncs, times * self.traffic)


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
        body = self.computations[name or self.entry]
        sizes = {instruction.name: instruction.nbytes for instruction in body}
        return sum((self._cost(instruction, sizes) for instruction in body), Cost())

    def _cost(self, instruction: Instruction, sizes: dict[str, int]) -> Cost:
        if instruction.op in KERNELS or instruction.op.endswith("-start"):
            return Cost(kernels=1, traffic=self._traffic(instruction, sizes))
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

    def _traffic(self, instruction: Instruction, sizes: dict[str, int]) -> int:
        """Bytes that a kernel reads and writes."""
        operands = [sizes[name] for name in instruction.operands]
        if instruction.op != "fusion":
            # What a collective starts has its operands among its results.
            started = instruction.op.endswith("-start")
            return instruction.nbytes + (0 if started else sum(operands))
        (name,) = instruction.computations("calls")
        body = {i.name: i for i in self.computations[name]}
        root = list(body.values())[-1]
        results = [body[o] for o in root.operands] if root.op == "tuple" else [root]
        total, in_place = 0, set[str]()
        for result in results:
            result = _origin(result, body)
            if result.op in PUTS:
                in_place.add(_origin(body[result.operands[0]], body).name)
                # Of updates that are found on the way many may be for nowhere.
                put = body[result.operands[PUTS[result.op]]].nbytes
                total += 2 * min(put, result.nbytes)
            else:
                total += result.nbytes
        for parameter in (i for i in body.values() if i.op == "parameter"):
            if parameter.name not in in_place:
                (number,) = re.findall(r" parameter\((\d+)\)", parameter.line)
                total += int(operands[int(number)] * _taken(parameter, body))
        return total


def _instructions(body: str) -> Iterator[Instruction]:
    for line in body.splitlines():
        found = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (?:\(.*?\)|\S+) ([a-z][a-z\-]*)\(", line)
        if found:
            yield Instruction(found[1], found[2], line)


def _origin(instruction: Instruction, body: dict[str, Instruction]) -> Instruction:
    """Where a value comes from that only looks different."""
    while instruction.op in SAME_PLACE:
        instruction = body[instruction.operands[0]]
    return instruction


def _taken(source: Instruction, body: dict[str, Instruction]) -> float:
    """Which share of a value its readers take, at most."""
    readers = [i for i in body.values() if source.name in i.operands]
    total = 0.0 if readers else 1.0
    for reader in readers:
        if reader.op in TAKES and reader.operands[0] == source.name:
            total += _taken(reader, body) * reader.count / source.count
        elif reader.op in KERNELS or reader.op in PUTS or reader.count != source.count:
            total += 1.0
        else:
            total += _taken(reader, body)
        if total >= 1.0:
            break
    return min(total, 1.0)
