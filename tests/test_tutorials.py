"""Tutorials run as they are shown and print what they say, and what is stored of them is small."""

import importlib
import json
import pathlib
import re

import pytest
from cases import SLOW
from test_docs import CODE, LINK, anchors

ROOT = pathlib.Path(__file__).parents[1]
TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.ipynb"))
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?(?: ?%)?")
QUICK = {"lora", "plain-jit"}
"""Those that every run of CI executes."""

tutorials = pytest.mark.parametrize("file", TUTORIALS, ids=lambda file: file.stem)


def cells(file, kind):
    found = json.loads(file.read_text())["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


def outputs(file):
    """All outputs, each with the cell that it belongs to."""
    return [(cell, output) for cell in cells(file, "code") for output in cell["outputs"]]


def printed(cell):
    """What a cell has printed, warnings included."""
    return "".join("".join(output.get("text", "")) for output in cell["outputs"])


def alike(text, stored):
    """Whether the words and the whole numbers are the same, and measured numbers nearly so.

    A whole number counts bytes, parameters or steps. One with a decimal point, or of percents, was
    measured: it depends on how this jax rounds, and on the text that comes with it and with this
    Python. It may differ by a tenth, and by one in its last digit.
    """
    if NUMBER.sub("#", text).split() != NUMBER.sub("#", stored).split():
        return False
    pairs = zip(NUMBER.findall(text), NUMBER.findall(stored), strict=True)
    return all(near(one, other) for one, other in pairs)


def near(one, other):
    if "." not in other and "%" not in other:
        return one == other
    one, other = (re.sub("[, %]", "", number) for number in (one, other))
    now, then = float(one), float(other)
    digits, _, power = other.partition("e")
    last = 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))
    return abs(now - then) <= 0.1 * abs(then) + 1.01 * last


@pytest.mark.processes
@pytest.mark.parametrize(
    "file",
    [pytest.param(f, marks=[] if f.stem in QUICK else SLOW, id=f.stem) for f in TUTORIALS],
)
def test_a_tutorial_prints_what_is_stored(file):
    """And no warnings, which would be on the stream of errors."""
    executed = pytest.importorskip("make_tutorials").executed(file)
    now = [cell for cell in executed["cells"] if cell["cell_type"] == "code"]
    streams = {output.get("name") for cell in now for output in cell["outputs"]}
    assert streams <= {"stdout", None}
    for cell, before in zip(now, cells(file, "code"), strict=True):
        text, stored = printed(cell), printed(before)
        assert alike(text, stored), f"{text}\n--- stored:\n{stored}"


@tutorials
def test_what_is_stored_was_executed_once_from_top_to_bottom(file):
    code = cells(file, "code")
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    kinds = {(output["output_type"], output.get("name")) for _, output in outputs(file)}
    assert kinds <= {("stream", "stdout"), ("display_data", None)}
    assert not re.search(r"/(tmp|home|root|work|usr)/|site-packages", file.read_text())


@tutorials
def test_links_of_a_tutorial_lead_somewhere(file):
    text = "\n\n".join("".join(cell["source"]) for cell in cells(file, "markdown"))
    for target in LINK.findall(CODE.sub("", text)):
        name, _, anchor = target.partition("#")
        assert (file.parent / name).exists(), target
        if anchor:
            assert anchor in anchors(file.parent / name), target


@tutorials
def test_a_tutorial_uses_what_is_public(file):
    source = "\n".join("".join(cell["source"]) for cell in cells(file, "code"))
    assert re.findall(r"^.*import.*fftgrad.*$", source, re.MULTILINE) == ["import fftgrad as fg"]
    assert not re.search(r"\bfg(\.\w+)*\._", source)


@tutorials
def test_a_page_has_the_cells_and_what_they_printed(file, monkeypatch):
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    notebook = json.loads(file.read_text())
    page = importlib.import_module("_notebooks").markdown(notebook, file.name)
    for cell in notebook["cells"]:
        assert "".join(cell["source"]) in page
    for cell in cells(file, "code"):
        assert printed(cell).rstrip() in page
    assert page.count('<img class="drawn"') == 1
