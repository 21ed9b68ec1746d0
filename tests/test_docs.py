"""README and docs: every Python block runs, and every file that they name exists."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

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
def test_no_python_block_is_left_out(page):
    """What is no Python says so, and what is Python starts at the margin, where it is found."""
    for fence in CODE.findall(page.read_text()):
        opening = fence.split("\n", 1)[0]
        assert opening.strip() in {"```python", "```sh", "```text"}, opening
        assert opening == "```python" or "python" not in opening, opening


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


def named():
    """The pages of the site by their paths, each with the name that the navigation shows."""
    site = (ROOT / "mkdocs.yml").read_text()
    found = re.findall(r"^ +- (?:(.+): )?(\S+\.md)$", site, re.MULTILINE)
    return {
        path: name or (ROOT / "docs" / path).read_text().split("\n", 1)[0].removeprefix("# ")
        for name, path in found
    }


def test_lists_of_pages_call_them_as_the_navigation_does():
    known = named()
    assert len(known) == len(list((ROOT / "docs").rglob("*.md")))
    index = (ROOT / "docs/index.md").read_text()
    rows = "\n".join(line for line in index.splitlines() if line.startswith("|"))
    listed = {path: text for text, path in re.findall(r"\[([^\]]*)\]\(([\w/-]+\.md)\)", rows)}
    assert listed == {path: name for path, name in known.items() if path != "index.md"}
    _, _, links = (ROOT / "README.md").read_text().partition("\n## Links\n")
    listed = re.findall(r"\[([^\]]*)\]\(docs/([\w/-]+\.md)\)", links)
    assert len(listed) > 10
    for text, path in listed:
        assert text == known[path]


def test_a_wrapped_sentence_of_returns_stays_one():
    """Without these settings each of its lines is shown as a value of its own."""
    site = (ROOT / "mkdocs.yml").read_text()
    assert "returns_multiple_items: false" in site
    assert "returns_named_value: false" in site


@pages
def test_files_that_a_page_names_exist(page):
    for path in PATH.findall(page.read_text()):
        assert (ROOT / path).exists(), path


def test_the_readme_stays_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


REFERENCE = {"design.md", "glossary.md", "wire-format.md"}


def test_readme_and_guide_can_be_read():
    """The guide is all but results, the reference and tutorials; code counts."""
    readme, *others = PAGES
    assert len(readme.read_text().split()) <= 750
    guide = [page for page in others if page.parent.name == "docs" and page.name not in REFERENCE]
    assert sum(len(page.read_text().split()) for page in (readme, *guide)) <= 20_000


def test_every_figure_is_shown():
    shown = {
        os.path.normpath(page.parent / target)
        for page in PAGES
        for target in LINK.findall(page.read_text())
    }
    assert {str(figure) for figure in (ROOT / "docs/figures").iterdir()} <= shown
