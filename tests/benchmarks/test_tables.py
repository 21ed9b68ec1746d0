"""The tables of README and docs are those that the benchmarks make of the committed results."""

import ast
import json
import re

import pytest
from processes import ROOT

import fftgrad as fg
from fftgrad.planning._plan import ACCEPTED

BENCHMARKS = ROOT / "benchmarks"


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


@pytest.mark.parametrize("file", PAGES, ids=lambda file: str(file.relative_to(ROOT)))
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


def test_a_table_of_exchanges_compares_with_bfloat16(imported):
    exchange = imported("exchange")
    records = json.loads((BENCHMARKS / "results/exchange/cpu.json").read_text())["rows"]
    found = rows(exchange.markdown(records))
    assert found["bfloat16, two stages"][-2:] == ["1.0", "1.0"]
    assert found["gather top-k 1 %"][-2:] == ["24.1", "3.0"]
    assert found["hierarchical, slow links"][-2:] == ["", ""]
    few = [record for record in records if record["workers"] < 8]
    assert rows(exchange.markdown(few))["dense"] == ["4,194.3", "6,291.5"]


STUDIES = {
    "ends": "convergence/ends",
    "seconds": "convergence/seconds",
    "seeds": "convergence/seeds",
}


@pytest.mark.parametrize(("study", "file"), STUDIES.items(), ids=str)
def test_a_study_shows_its_tables(imported, capsys, study, file):
    module, path = imported("convergence"), BENCHMARKS / f"results/{file}.json"
    module.main([study, "--show"])
    shown = capsys.readouterr().out.partition("\nof ")[0]
    assert shown.strip() == module.STUDIES[study].tables(json.loads(path.read_text()))


def test_columns_can_be_left_out(imported):
    table = "| a | b | c |\n|---|---|---|\n| 1 |  | 3 |"
    assert imported("pages").without(table, "b") == "| a | c |\n|---|---|\n| 1 | 3 |"
