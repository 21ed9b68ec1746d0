"""The tables of README and docs are those that the benchmarks make of the committed results."""

import ast
import json
import pathlib
import re

import pytest

import fftgrad as fg
from fftgrad.advise._answer import ACCEPTED

pytest.importorskip("matplotlib")
ROOT = pathlib.Path(__file__).parent.parent.parent
BENCHMARKS = ROOT / "benchmarks"


LINKS = BENCHMARKS / "results/slow_network"


@pytest.fixture
def figures(imported):
    return imported("links")


def page(name):
    return (ROOT / name).read_text()


def on_one_line(text):
    return " ".join(text.split())


def table_of(text, start):
    """The lines of the table that starts so."""
    return start + text.partition(f"\n{start}")[2].partition("\n\n")[0]


def rows(table):
    """The cells of a Markdown table, by the first of each row."""
    lines = [line.strip("|").split("|") for line in table.splitlines()]
    return {first.strip(): [cell.strip() for cell in rest] for first, *rest in lines[2:]}


TIMES = ("lm-100mbit", "lm-1gbit", "resnet-100mbit")
STEPS = ("alexnet-1gbit", "alexnet-100mbit", "alexnet-loopback")
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
        shown = [cells[0] for cells in rows(table_of(page(name), "| take it if |")).values()]
        assert shown == list(pages.CHOICES)


def test_what_a_plan_answers_is_among_them(imported):
    """The command that README and pages ask, and the answer of that on the command line."""
    asked = "fftgrad plan --parameters 1M --workers 4 --bandwidth 100mbit --step 200ms\n"
    pages = [page(name) for name in ("README.md", "docs/choose.md", "docs/command-line.md")]
    assert all(text.count(asked) == 1 for text in pages)
    answer = re.findall(r"of the best dense: (.*?) takes", on_one_line(pages[-1]))
    assert set(answer) <= set(imported("pages").CHOICES)
    assert len(answer) == 1


def test_a_line_of_the_page_is_that_of_the_plan(imported):
    """Of any link: what a plan says to paste depends on the row alone."""
    pages, text = imported("pages"), page("docs/choose.md")
    own = [row for row in pages.candidates().values() if row.loss in ACCEPTED]
    known = {row.name: fg.advise.Timing(0.0, 0.0) for row in own}
    options = {"step": "30ms", "link": "100mbit", "workers": pages.WORKERS, "buckets": 1}
    found = fg.advise.plan(pages.LIKE, rows=own, timings=known, **options)
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


def test_no_table_of_slow_links_is_written_by_hand(imported):
    text = page("docs/results/slow-links.md")
    left = imported("pages").BLOCK.sub("", text)
    assert re.search(r"^\| \| s a step", text, re.MULTILINE)
    assert not re.search(r"^\| \| s a step", left, re.MULTILINE)


def test_the_page_on_slow_links_has_the_sentences_of_its_results(figures):
    text = page("docs/results/slow-links.md")
    for name in TIMES:
        said = figures.in_as_many_steps(LINKS, name).removesuffix(".")
        assert said
        assert said in on_one_line(text)


def test_the_page_on_slow_links_says_up_to_which_bandwidth(figures):
    section = page("docs/results/slow-links.md").split("## Up to which bandwidth")[1].split("##")[0]
    section = on_one_line(section)
    found = figures.methods(LINKS, "alexnet-1gbit")
    evens = {method: f"{rate / 1e9:.1f}" for method, rate in figures.break_evens(found).items()}
    known = sorted(float(rate) for method, rate in evens.items() if method != "bf16")
    assert f"between {known[0]} Gbit/s (top-k 1 %) and {known[-1]} Gbit/s (random-k)" in section
    assert known[0] == float(evens["top-k"])
    assert known[-1] == float(evens["random-k"])
    assert f"bfloat16 below {evens['bf16']} Gbit/s and float32 above" in section
    narrow, sparse = (figures.step_at(found[method], 1e8) for method in ("bf16", "top-k-mille"))
    assert narrow < figures.step_at(found["dense"], 1e8)
    assert f"bfloat16 at {narrow:.1f} s a step" in section
    assert f"top-k 0.1 % {narrow / sparse:.1f} times as fast" in section


def test_no_best_dense_is_named_where_none_in_16_bits_was_run(figures):
    by_label = {name: rows(figures.step_table(LINKS, name)) for name in STEPS}
    assert {cells[-1] for cells in by_label["alexnet-100mbit"].values()} == {""}
    # Without a limit float32 is the best dense, of both frameworks.
    assert all(cells[-1] == cells[-2] for cells in by_label["alexnet-loopback"].values())
    fast = by_label["alexnet-1gbit"]
    assert all(cells[-1] for cells in fast.values())
    assert fast["PyTorch DDP, fp16 hook"][-1] == fast["bfloat16, two stages"][-1] == "1.00"
    assert all(float(cells[-1]) < float(cells[-2]) for cells in fast.values())


def test_the_readme_has_what_was_measured_of_early_losses(figures):
    text = on_one_line(page("README.md"))
    dense, (best,) = figures.leads(
        figures.turns(LINKS, "lm-100mbit"), "stream-4", figures.seconds_to
    )
    first, second = (f"{value:.1f}" for value in dense)
    assert f"[{first} and {second} times](docs/results/slow-links.md" in text
    assert f"{best:.1f} times sooner than bfloat16" in text


def test_the_headline_has_the_seconds_of_the_table():
    """Of links of 100 Mbit/s, to the last loss of dense Adam."""
    text = page("docs/results/slow-links.md")
    table = text.partition("| | steps | s a step")[2].partition("\n\n")[0]
    takes = {
        label: int(cells[2].removesuffix(" s")) for label, cells in rows(table).items() if cells[2]
    }
    compared = (
        "feedback_adam, PowerSGD",
        "feedback_muon, two stages 25x",
        "dense Muon, bfloat16",
        "dense Adam, bfloat16",
    )
    for name in ("README.md", "docs/index.md"):
        headline = on_one_line(page(name).partition("## ")[0])
        assert all(f"{takes[label]:,} s" in headline for label in compared), name
        assert f"dense Adam in bfloat16 {takes['dense Adam, bfloat16']:,} s" in headline


def test_a_table_of_exchanges_compares_with_bfloat16(imported):
    exchange = imported("exchange")
    records = json.loads((BENCHMARKS / "results/exchange/cpu.json").read_text())["rows"]
    found = rows(exchange.markdown(records))
    assert found["bfloat16, two stages"][-3:-1] == ["1.0", "1.0"]
    assert found["gather top-k 1 %"][-3:-1] == ["24.1", "3.0"]
    assert found["hierarchical, slow links"][-3:] == ["", "", ""]
    few = [record for record in records if record["workers"] < 8]
    assert rows(exchange.markdown(few))["dense"] == ["4,194.3", "6,291.5"]


STUDIES = {
    "ends": "convergence/ends",
    "seconds": "convergence/seconds",
    "downstream": "convergence/downstream",
    "resets": "resets/resets",
    "endurance": "endurance/endurance",
    "sharded": "sharded/lm",
}


@pytest.mark.parametrize(("study", "file"), STUDIES.items(), ids=str)
def test_a_study_shows_its_tables(imported, capsys, monkeypatch, study, file):
    module, path = imported(study), BENCHMARKS / f"results/{file}.json"
    monkeypatch.setattr(module, "save", lambda *_: None, raising=False)
    results = json.loads(path.read_text())
    module.STUDY.show(results, path.parent, path.stem)
    assert capsys.readouterr().out.strip() == module.tables(results)


def test_columns_can_be_left_out(imported):
    table = "| a | b | c |\n|---|---|---|\n| 1 |  | 3 |"
    assert imported("pages").without(table, "b") == "| a | c |\n|---|---|\n| 1 | 3 |"


def test_the_large_models_are_of_the_sizes_that_they_are_named_by(imported):
    models = imported("models")
    counts = {name: models.count(make()) for name, make in models.MODELS.items()}
    assert counts == {"124M": 124_439_808, "1.3B": 1_315_575_808, "8B": 8_030_261_248}


def test_what_a_large_model_takes_is_bounded():
    """Of what was compiled: no wait for the host but in a branch, and memory that a device has."""
    record = json.loads((BENCHMARKS / "results/programs/h100-models.json").read_text())
    for row in record["rows"]:
        local = "local" in row["row"]
        assert row["host_syncs"] == local, row
        buckets = {"124M": 1, "1.3B": 2, "8B": 8}[row["model"]] if row["pieces"] == 1 else 1
        assert local or row["collectives"] in (buckets, 2 * buckets), row
        assert row["temporaries"] < 8, row
        assert row["state"] < 3.1, row


PROGRAMS = {
    "dense": "dense",
    "top-k": "gather of top-k 1 %, 8 bits",
    "sign": "gather of signs",
    "random-k": "random-k 1 %, summed",
    "PowerSGD": "PowerSGD rank 4",
    "top-k, one bucket": "top-k, one bucket",
    "top-k, delayed": "top-k, one bucket, `fg.training.delay()`",
    "8 local steps in 8 fragments": "`diloco`, 8 local steps in 8 fragments, delay 1",
    "8 local steps": "`diloco`, 8 local steps, delay 1",
}


def test_the_pages_have_what_programs_for_an_h100_take():
    record = json.loads((BENCHMARKS / "results/programs/h100.json").read_text())
    codecs, exchanges = page("docs/results/codec-cost.md"), page("docs/results/exchanges.md")
    for there, back in zip(record["codecs"][::2], record["codecs"][1::2], strict=True):
        cells = [there["codec"], there["kernels"], there["host_syncs"], *passes(there)]
        cells += [back["kernels"], *passes(back)]
        assert f"| {' | '.join(map(str, cells))} |" in codecs
    for row in record["updates"]:
        takes = f"{row['traffic_in_gradients']:.1f} | {row['kernels']}"
        assert f"| {row['update']} | {takes} | {row['temporaries_in_gradients']:.1f} |" in codecs
    for row in record["steps"]:
        beside = [products for _, products in row["collectives"]]
        cells = [len(beside), row["overlapped"]] if beside else ["1, in a branch", 0]
        if len(beside) == 1 and row["overlapped"]:
            cells[1] = f"1, with {beside[0]} products"
        cells = [PROGRAMS[row["step"]], *cells, row["kernels"], f"{row['compile_s']:.1f}"]
        assert f"| {' | '.join(map(str, cells))} |" in exchanges


def passes(row):
    """Reads and writes, in vectors, and the estimate in microseconds."""
    return f"{row['traffic_bytes'] / 4 / row['values']:.1f}", f"{estimate(row):.0f}"


def estimate(row):
    return row["traffic_bytes"] / 3.35e6 + 3 * row["kernels"]
