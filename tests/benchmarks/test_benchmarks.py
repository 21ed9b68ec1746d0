"""Benchmarks and examples: what they import, and what their results hold."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
SCRIPTS = sorted([*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "examples").rglob("*.py")])


def imports_of_fftgrad(source):
    """What a program imports of the library, as it is written."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [alias for alias in node.names if alias.name.split(".")[0] == "fftgrad"]
        elif isinstance(node, ast.ImportFrom):
            found = [node] if (node.module or "").split(".")[0] == "fftgrad" else []
        else:
            continue
        yield from (ast.unparse(node) for _ in found)


def private_names(source):
    """The names with a leading underscore that a program takes from `fg`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            owner = node.value
            while isinstance(owner, ast.Attribute):
                owner = owner.value
            if isinstance(owner, ast.Name) and owner.id == "fg":
                yield ast.unparse(node)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_scripts_use_public_names_only(script):
    source = script.read_text()
    assert set(imports_of_fftgrad(source)) <= {"import fftgrad as fg"}
    assert not list(private_names(source))


@pytest.mark.parametrize(
    "source",
    [
        "import fftgrad",
        "import fftgrad.ops as ops",
        "from fftgrad import _axes",
        "from fftgrad.codecs._spec import payload_spec",
        "import fftgrad as fg\nfg.codecs._spec.payload_spec",
    ],
)
def test_a_private_import_is_found(source):
    assert set(imports_of_fftgrad(source)) - {"import fftgrad as fg"} or [*private_names(source)]
