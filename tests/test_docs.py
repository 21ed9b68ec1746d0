"""README and docs: every Python block runs, and every file that they name exists."""

import os
import pathlib
import re
import runpy
import subprocess
import sys

import jax
import pytest

import fftgrad as fg

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
SHOWN = re.compile(r"you should see\n\n```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"\d[\d.]*(?:e[+-]?\d+)?")
PATH = re.compile(r"(?<![\w/.:-])((?:benchmarks|docs|examples|fftgrad|tests)/[\w./-]*\w/?)")

pages = pytest.mark.parametrize("page", PAGES, ids=NAMES)


def blocks(page):
    """The Python blocks of a page, at the lines where they stand in it."""
    text = page.read_text()
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start(1))
        yield "\n" * line + found[1]


@pytest.mark.usefixtures("examples_are_compiled")
@pytest.mark.parametrize(
    "page",
    [
        # A plan times all that it compares.
        pytest.param(page, marks=[pytest.mark.slow] if page.name == "plan.md" else [])
        for page in PAGES
        if any(blocks(page))
    ],
    ids=lambda page: page.name,
)
def test_python_blocks_run_as_printed(page, capsys, monkeypatch, tmp_path):
    """None raises, in a folder without files, and what a page prints is finite."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for source in blocks(page):
        exec(compile(source, str(page), "exec"), namespace)
    out = capsys.readouterr().out
    assert ("print(" in page.read_text()) == bool(out)
    assert not re.search(r"\b(nan|inf)\b", out), out
    for shown in SHOWN.findall(page.read_text()):
        assert NUMBER.sub("", out) == NUMBER.sub("", shown)
        numbers = [float(number) for number in NUMBER.findall(shown)]
        assert [float(number) for number in NUMBER.findall(out)] == pytest.approx(numbers, rel=0.1)


NEEDS = "The blocks of this page need 8 devices"
ONE_DEVICE = """\
import pathlib, sys
sys.path.insert(0, sys.argv[1])
import test_docs
for page in map(pathlib.Path, sys.argv[2:]):
    print(page.name)
    namespace = {"__name__": "__main__"}
    for source in test_docs.blocks(page):
        exec(compile(source, str(page), "exec"), namespace)
"""


@pytest.mark.processes
def test_python_blocks_run_on_one_device(tmp_path):
    found = [str(page) for page in PAGES if any(blocks(page)) and NEEDS not in page.read_text()]
    done = subprocess.run(
        [sys.executable, "-c", ONE_DEVICE, str(ROOT / "tests"), *found],
        cwd=tmp_path,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[-2000:]


@pages
def test_relative_links_lead_somewhere(page):
    for target in LINK.findall(CODE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


def anchors(page):
    """The anchors that a site makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading) for heading in headings)
    return {heading.strip().lower().replace(" ", "-") for heading in plain}


@pages
def test_files_that_a_page_names_exist(page):
    text = page.read_text()
    for path in PATH.findall(text):
        assert (ROOT / path).exists(), path
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
        assert f"\ndef {name}(" in (ROOT / file).read_text(), name


@pytest.mark.parametrize("name", ["Int8", "HalfGather"])
def test_the_examples_of_contributing_pass_the_checks(name, tmp_path):
    codes = BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text())
    (code,) = (code for code in codes if f"class {name}(" in code)
    file = tmp_path / "_example.py"
    file.write_text(code)
    part = runpy.run_path(str(file))[name]()
    if isinstance(part, fg.codecs.Codec):
        fg.testing.check_codec(part, sizes=(1, 90), eager=False)
        assert fg.wire_bytes(part, jax.ShapeDtypeStruct((1009,), "float32")) == 4 + 1012 + 4
    else:
        fg.testing.check_exchange(part)
