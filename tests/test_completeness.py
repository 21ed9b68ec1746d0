"""The table is complete, the docstrings run, and the core imports stay few."""

import ast
import doctest
import inspect
import pathlib
import re
import runpy
import subprocess
import sys

import pytest
from cases import CODECS, EXCHANGES, GRAPHS, HIERARCHIES, MEMORIES, METHODS, TILED, TYPICAL

import fftgrad as fg
from fftgrad import checkpoint, learned, privacy
from fftgrad.codecs._chain import Chain, stages

ROOT = pathlib.Path(__file__).parent.parent
PUBLIC = {
    name: value for name, value in vars(fg).items() if not name.startswith("_") and callable(value)
}
METHOD_NAMES = {name for name in vars(fg.methods) if not name.startswith("_")}
CONTRACTS = {
    "Average",
    "Chooser",
    "Codec",
    "CodecRule",
    "Compressed",
    "Exchange",
    "Graph",
    "Memory",
    "Payload",
    "Quantizer",
    "Reduced",
    "Selector",
    "Sparse",
    "Step",
    "Transform",
}
STATES = {
    "Analysis",
    "Captured",
    "PerWorker",
    "CompressedPmeanState",
    "Collective",
    "Figures",
    "Fit",
    "FitRow",
    "Measured",
    "Plan",
    "PlanRow",
    "PreviewRow",
    "Rate",
    "Replicas",
    "Resharded",
    "Scattered",
    "StepPair",
    "SyncCost",
    "Timing",
}
RULES = {"Candidate", "Layout", "Link", "Policy", "Rule"}
CHOOSERS = {"Drift", "Leader"}
GRAPH_KINDS = {"Exponential", "Ring", "Torus"}
AVERAGES = {"MedianNormClip", "TrimmedMean"}


LISTED = {name for name in METHOD_NAMES if callable(getattr(fg.methods, name))}
OPTIMIZERS = {n for n, value in vars(fg.optimizers).items() if n[0] != "_" and callable(value)}
CHECKPOINT = {n for n, value in vars(checkpoint).items() if n[0] != "_" and callable(value)}
PRIVACY = {n for n, value in vars(privacy).items() if n[0] != "_" and callable(value)}
CHECKS = {n for n, value in vars(fg.testing).items() if n[0] != "_" and callable(value)}
LEARNED = {n: value for n, value in vars(learned).items() if n[0] != "_" and callable(value)}
EXTRAS = {
    "checkpoint": {"orbax"},
    "commands": {"matplotlib", "rich"},
    "privacy": {"dp_accounting"},
    "learned": {"flax"},
    "_gradient_files.py": {"safetensors"},
}
"""What a room, or a file, may import besides."""
SCHEDULES = {"diminishing_theta"}
ROLES = (
    "Function|Codec|Composition|Transform|Selector|Quantizer|Memory|Exchange|Method|Transformation"
    "|Optimizer|Value"
)


def configurations():
    return (
        {name for name, value in PUBLIC.items() if inspect.isclass(value)}
        - CONTRACTS
        - STATES
        - RULES
        - CHOOSERS
        - AVERAGES
        - GRAPH_KINDS
    )


def test_every_public_class_is_in_the_table():
    parts = [stage for codec in [*CODECS.values(), *TILED.values()] for stage in stages(codec)]
    rows = [*parts, *MEMORIES.values(), *EXCHANGES.values(), *HIERARCHIES.values()]
    of_learned = {
        n
        for n, value in LEARNED.items()
        if inspect.isclass(value) and issubclass(value, fg.Exchange)
    }
    assert {type(row).__name__ for row in rows} - {Chain.__name__} == configurations() | of_learned


def test_every_method_is_in_the_table():
    files = {p.stem[1:] for p in (ROOT / "fftgrad/methods").glob("_[a-z]*.py")}
    assert files == LISTED
    of_learned = {n for n, value in LEARNED.items() if inspect.isfunction(value)} - {"learn"}
    assert {name.split()[0] for name in METHODS} == LISTED - SCHEDULES | OPTIMIZERS | of_learned


def test_a_part_is_abstract_or_final():
    rows = [*CODECS.values(), *TILED.values(), *MEMORIES.values(), *EXCHANGES.values()]
    for kind in {type(part) for row in rows for part in stages(row)}:
        assert kind.__subclasses__() == [], kind


def test_every_graph_is_in_the_table():
    assert {type(graph).__name__ for graph in GRAPHS.values()} == GRAPH_KINDS


def test_every_class_of_exchange_is_typical():
    assert {type(EXCHANGES[name]) for name in TYPICAL} == {type(e) for e in EXCHANGES.values()}


def test_every_chooser_is_in_the_table():
    supports = [e for e in EXCHANGES.values() if isinstance(e, fg.SharedSupport)]
    assert {type(exchange.chooser).__name__ for exchange in supports} == CHOOSERS


@pytest.mark.parametrize(
    "name",
    [
        *sorted(set(PUBLIC) - CONTRACTS - STATES),
        *(f"methods.{m}" for m in sorted(LISTED)),
        *(f"optimizers.{m}" for m in sorted(OPTIMIZERS)),
        *(f"testing.{m}" for m in sorted(CHECKS)),
        *(f"checkpoint.{m}" for m in sorted(CHECKPOINT - {"Restored"})),
        *(f"privacy.{m}" for m in sorted(PRIVACY)),
        *(f"learned.{m}" for m in sorted(set(LEARNED) - {"LearnedCodesState"})),
    ],
)
def test_public_docstrings_run(name):
    value = fg
    for part in name.split("."):
        value = getattr(value, part)
    text = inspect.getdoc(value) or ""
    assert re.match(rf"({ROLES}): ", text)
    tests = doctest.DocTestFinder(recurse=inspect.isclass(value)).find(
        value, name, globs={"jax": __import__("jax")}
    )
    examples = [test for test in tests if test.examples]
    assert examples
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in examples:
        assert runner.run(test).failed == 0


def test_every_public_name_has_its_place_in_the_reference():
    pages = "".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    listed = re.findall(r"^::: fftgrad\.([\w.]+)$", pages, flags=re.MULTILINE)
    wanted = [
        *PUBLIC,
        *(f"methods.{name}" for name in LISTED),
        *(f"optimizers.{name}" for name in OPTIMIZERS),
        *(f"testing.{name}" for name in CHECKS),
        *(f"checkpoint.{name}" for name in CHECKPOINT),
        *(f"privacy.{name}" for name in PRIVACY),
        *(f"learned.{name}" for name in LEARNED),
    ]
    assert sorted(listed) == sorted(wanted)


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


def test_importing_it_brings_no_extra():
    code = (
        "import sys, fftgrad;"
        "extras = {'dp_accounting', 'flax', 'matplotlib', 'orbax', 'rich', 'safetensors'};"
        "found = extras & set(sys.modules);"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_only_one_file_knows_how_axes_differ():
    for file in (ROOT / "fftgrad").rglob("*.py"):
        if file.name != "_axes.py":
            assert not re.search(r"manual_axis_type|jax\.__version__|pcast\(", file.read_text()), (
                file
            )


def test_files_stay_short():
    for file in (ROOT / "fftgrad").rglob("*.py"):
        assert len(file.read_text().splitlines()) <= 300, file


def test_the_library_imports_none_of_its_extras():
    code = "import sys, fftgrad; print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)
    assert not {b"flax", b"matplotlib", b"orbax", b"rich"} & set(said.stdout.split())


def test_making_a_transformation_starts_no_backend():
    """Or jax.distributed could not be initialized after it."""
    code = (
        "import fftgrad as fg;"
        "fg.methods.fft_sparsification(theta_schedule={0: 0.9, 5: 0.0});"
        "fg.FixedRangeFloat.tuned(-1.0, 1.0, bits=8), fg.Cast('bfloat16');"
        "from jax._src import xla_bridge;"
        "assert not xla_bridge.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_quickstart_stays_short():
    assert len((ROOT / "examples/quickstart.py").read_text().splitlines()) < 60


def test_quickstart_runs(capsys):
    runpy.run_path(str(ROOT / "examples/quickstart.py"), run_name="__main__")
    assert "ratio" in capsys.readouterr().out
