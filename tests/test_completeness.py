"""The table is complete, the docstrings run, and the core imports stay few."""

import ast
import doctest
import inspect
import operator
import pathlib
import re
import runpy
import sys

import jax
import jax.numpy as jnp
import pytest
from cases import CODECS, EXCHANGES, HIERARCHIES, MEMORIES, METHODS, TILED

import fftgrad as fg
from fftgrad.codecs._chain import Chain, stages

ROOT = pathlib.Path(__file__).parent.parent
NAMES = (
    *("codecs", "memories", "exchanges", "training", "methods", "optimizers", "tools"),
    *("checkpoint", "testing", "planning", "islands"),
    *("contrib.gossip", "contrib.votes", "contrib.learned"),
)
ROOMS = {"": fg} | {f"{name}.": operator.attrgetter(name)(fg) for name in NAMES}
"""What has public names, the top first."""


def shortest():
    """Each public function and class by the first of its names."""
    found = {}
    for room, module in ROOMS.items():
        for name in module.__all__:
            value = getattr(module, name)
            if not inspect.ismodule(value) and value not in found.values():
                found[room + name] = value
    return found


PUBLIC = shortest()
CONTRACTS = {
    fg.codecs.Codec,
    fg.codecs.Compressed,
    fg.exchanges.Exchange,
    fg.memories.Memory,
    fg.codecs.Payload,
    fg.codecs.Quantizer,
    fg.exchanges.Averaged,
    fg.codecs.Selector,
    fg.Step,
    fg.codecs.Transform,
    fg.codecs.Sparse,
}
EXTRAS = {
    "_storage.py": {"orbax", "tensorstore"},
    "votes.py": {"dp_accounting"},
    "_autoencoder.py": {"flax"},
    "_store.py": {"obstore"},
}
"""What a room, or a file, may import besides."""
METHOD_NAMES = set(fg.methods.__all__)
OPTIMIZERS = {"diloco", "feedback_adam", "feedback_muon", "sharded", "sparse_loco"}
BESIDE = {"lgc", "scale_by_datalens", "beer", "choco_sgd"}
"""Methods and optimizers of `contrib`."""
SCHEDULES = {"diminishing_theta", "recover_by_loss"}
"""What goes with another method, and is tested with that."""


def parts(kind):
    """The public classes of a kind of parts."""
    return {
        value
        for value in PUBLIC.values()
        if inspect.isclass(value) and issubclass(value, kind) and value not in CONTRACTS
    }


def test_every_public_class_is_in_the_table():
    found = [stage for codec in [*CODECS.values(), *TILED.values()] for stage in stages(codec)]
    rows = [*found, *MEMORIES.values(), *EXCHANGES.values(), *HIERARCHIES.values()]
    public = parts(fg.codecs.Codec) | parts(fg.memories.Memory) | parts(fg.exchanges.Exchange)
    assert {type(row) for row in rows} - {Chain} == public


def test_every_method_is_in_the_table():
    assert {name.split()[0] for name in METHODS} == METHOD_NAMES - SCHEDULES | OPTIMIZERS | BESIDE


EXPLAINED = {
    name
    for name, value in PUBLIC.items()
    if value not in CONTRACTS
    and not (inspect.isclass(value) and issubclass(value, tuple))
    and value.__module__ != "fftgrad.methods._recipes"
}
"""What has an example: all but contracts, named tuples that functions return, and recipes.

The page of the methods has one example for all recipes.
"""


@pytest.mark.usefixtures("examples_are_compiled")
@pytest.mark.parametrize("name", sorted(EXPLAINED))
def test_public_docstrings_run(name):
    value = PUBLIC[name]
    names = {"fg": fg, "jax": jax, "jnp": jnp}
    tests = doctest.DocTestFinder(recurse=inspect.isclass(value)).find(value, name, globs=names)
    examples = [test for test in tests if test.examples]
    assert examples
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in examples:
        assert runner.run(test).failed == 0


def test_every_public_name_has_its_place_in_the_reference():
    pages = "".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    listed = re.findall(r"^::: fftgrad\.([\w.]+)$", pages, flags=re.MULTILINE)
    assert sorted(listed) == sorted(PUBLIC)


def test_the_core_imports_jax_optax_and_numpy_only():
    core = {"jax", "optax", "numpy", "fftgrad", *sys.stdlib_module_names}
    for file in (ROOT / "fftgrad").rglob("*.py"):
        own = EXTRAS.get(file.parent.name, set()) | EXTRAS.get(file.name, set())
        allowed = core | own
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert {name.split(".")[0] for name in names} <= allowed, file


@pytest.mark.smoke
@pytest.mark.processes
@pytest.mark.full
def test_quickstart_runs(capsys):
    runpy.run_path(str(ROOT / "examples/quickstart.py"), run_name="__main__")
    assert "ratio" in capsys.readouterr().out
