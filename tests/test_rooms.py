"""The house keeps its floors: no import upward, no circle, nothing loose at the root."""

import ast
import functools
import pathlib
import subprocess
import sys

import pytest

import fftgrad as fg

ROOT = pathlib.Path(__file__).parent.parent / "fftgrad"

# From the ground up: what stands in a line may import the lines below it, and itself.
FLOORS = [
    ["_axes", "_values"],
    ["ops"],
    ["_comm"],
    ["_contracts"],
    ["codecs", "memories"],
    ["exchanges"],
    ["training"],
    ["methods", "tools"],
    ["optimizers"],
    ["__init__"],
    ["islands", "testing"],
    ["planning"],
    ["checkpoint", "contrib"],
    ["__main__"],
]
BESIDE = {"planning", "checkpoint", "contrib", "islands", "testing"}
"""What the core does not load."""
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def room_of(module: str) -> str:
    """The room of fftgrad.codecs.selectors._top_k: codecs."""
    return module.split(".")[1] if "." in module else "__init__"


def imports(file: pathlib.Path) -> set[str]:
    """The modules of fftgrad that a file imports."""
    found: set[str] = set()
    tree = ast.parse(file.read_text())
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in set(ast.walk(tree)) - for_types:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                path = ROOT.parent / inner.replace(".", "/")
                is_module = path.is_dir() or path.with_suffix(".py").exists()
                found.add(inner if is_module else node.module)
    return {module for module in found if module.split(".")[0] == "fftgrad"}


def module_of(file: pathlib.Path) -> str:
    name = ".".join(file.relative_to(ROOT.parent).with_suffix("").parts)
    return name.removesuffix(".__init__")


@functools.cache
def graph() -> dict[str, set[str]]:
    """What each module imports of fftgrad."""
    return {module_of(file): imports(file) for file in ROOT.rglob("*.py")}


def test_every_room_has_a_floor():
    assert {room_of(module) for module in graph()} == set(FLOOR)


def test_nothing_imports_upward():
    for module, imported in graph().items():
        for other in imported:
            own, its = room_of(module), room_of(other)
            assert FLOOR[its] < FLOOR[own] or its == own, f"{module} imports {other}"


def test_there_is_no_circle():
    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        for other in graph().get(module, set()) - done:
            visit(other, (*path, module))
        done.add(module)

    done: set[str] = set()
    for module in graph():
        visit(module, ())


STARTED = """
import sys, fftgrad as fg
print(*sys.modules)
method = fg.methods.fft_sparsification(theta_schedule={0: 0.9, 5: 0.0})
fg.compressed_pmean(method, axis_name="data")
fg.RangeFloat(8, limits=(-1.0, 1.0)), fg.Cast("bfloat16")
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""


def test_importing_it_loads_the_core_alone_and_a_transformation_starts_no_backend():
    """Or jax.distributed could not be initialized after it."""
    said = subprocess.run(
        [sys.executable, "-c", STARTED], check=True, cwd=ROOT.parent, capture_output=True, text=True
    )
    extras = {"dp_accounting", "flax", "matplotlib", "orbax", "safetensors", "obstore"}
    extras |= {f"fftgrad.{room}" for room in BESIDE}
    assert not set(said.stdout.split()) & extras


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("LloydMax", "; there is fftgrad.codecs.LloydMax"),
        ("power_sgd", "; there is fftgrad.methods.power_sgd"),
        ("nothing", ""),
    ],
)
def test_a_name_that_is_in_a_room_is_found(name, said):
    with pytest.raises(AttributeError, match=f"no attribute '{name}'{said}$"):
        getattr(fg, name)
