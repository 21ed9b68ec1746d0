"""The tables of README and docs are those that the benchmarks make of the committed results."""

import ast
import json
import re

import pytest
from processes import ROOT

import fftgrad as fg
from fftgrad.planning._plan import ACCEPTED


def page(name):
    return (ROOT / name).read_text()


def table_of(text, start):
    """The lines of the table that starts so."""
    return start + text.partition(f"\n{start}")[2].partition("\n\n")[0]


def rows(table):
    """The cells of a Markdown table, by the first of each row."""
    lines = [line.strip("|").split("|") for line in table.splitlines()]
    return {first.strip(): [cell.strip() for cell in rest] for first, *rest in lines[2:]}


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.every_case
@pytest.mark.parametrize(
    "file",
    [file for file in PAGES if "<!-- table: " in file.read_text()],
    ids=lambda file: str(file.relative_to(ROOT)),
)
def test_a_page_has_the_tables_that_the_results_make(imported, file):
    text = file.read_text()
    assert imported("pages").filled(text) == text
    assert text.count("<!-- table: ") == text.count("<!-- end -->")


def test_every_table_is_on_a_page(imported):
    pages = imported("pages")
    found = [name for file in PAGES for _, name, _ in pages.BLOCK.findall(file.read_text())]
    assert sorted(found) == sorted(pages.TABLES)


def test_readme_and_page_choose_among_what_a_plan_recommends(imported):
    pages = imported("pages")
    recommended = {row.name for row in pages.candidates().values() if row.loss in ACCEPTED}
    assert set(pages.CHOICES) == recommended
    for name in ("README.md", "docs/choose.md"):
        shown = [cells[0] for cells in rows(table_of(page(name), "| your link |")).values()]
        assert shown == list(pages.CHOICES)


def test_a_line_of_the_page_is_that_of_the_plan(imported):
    """Of any link: what a plan says to paste depends on the row alone."""
    pages, text = imported("pages"), page("docs/choose.md")
    own = [row for row in pages.candidates().values() if row.loss in ACCEPTED]
    known = {row.name: fg.planning.Timing(0.0, 0.0) for row in own}
    options = {"step": "30ms", "link": "100mbit", "workers": pages.WORKERS, "buckets": 1}
    found = fg.planning.plan(pages.LIKE, rows=own, timings=known, **options)
    shown = re.findall(r"^# ([^\n]*)\ntx = (.*?)(?=^$|^```)", text, re.MULTILINE | re.DOTALL)
    assert {name: ast.dump(ast.parse(code)) for name, code in shown} == {
        row.name: ast.dump(ast.parse(row.code)) for row in found.rows
    }
    assert len(shown) == len(own)


def test_a_table_that_is_not_the_results_is_replaced(imported, monkeypatch, tmp_path, capsys):
    pages, file = imported("pages"), tmp_path / "page.md"
    monkeypatch.setattr(pages, "TABLES", {"one": lambda: "| 1 |"})
    text = "Before.\n\n<!-- table: one -->\n\n| 0 |\n|---|\n\n<!-- end -->\n\nBehind.\n"
    file.write_text(text)
    monkeypatch.setattr(pages, "PAGES", [file])
    pages.main()
    assert file.read_text() == text.replace("| 0 |\n|---|", "| 1 |")
    assert capsys.readouterr().out == f"{file}\n"
    pages.main()
    assert not capsys.readouterr().out


def test_a_study_shows_its_tables(imported, capsys):
    module = imported("convergence")
    module.main(["seeds", "--show"])
    shown = capsys.readouterr().out.partition("\nof ")[0]
    record = json.loads((ROOT / "benchmarks/results/convergence/seeds.json").read_text())
    assert shown.strip() == module.STUDIES["seeds"].tables(record)
