"""The tables of README and docs are those that the benchmarks make of the committed results."""

import json
import pathlib
import re

import pytest

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


def rows(table):
    """The cells of a Markdown table, by the first of each row."""
    lines = [line.strip("|").split("|") for line in table.splitlines()]
    return {first.strip(): [cell.strip() for cell in rest] for first, *rest in lines[2:]}


TIMES = ("lm-100mbit", "lm-1gbit", "resnet-100mbit")
MORE_TIMES = ("lm-1gbit-quiet", "lm-50ms")
STEPS = ("alexnet-1gbit", "alexnet-100mbit", "alexnet-loopback")


def test_the_page_on_slow_links_has_the_tables_of_its_results(figures):
    text = page("docs/slow-links.md")
    tables = [figures.target_table(LINKS, name) for name in (*TIMES, *MORE_TIMES)]
    tables += [figures.step_table(LINKS, name) for name in STEPS]
    for table in tables:
        assert table in text
    assert len(re.findall(r"^\| \| s a step", text, re.MULTILINE)) == len(tables)
    for name in TIMES:
        said = figures.in_as_many_steps(LINKS, name).removesuffix(".")
        assert said
        assert said in on_one_line(text)


def test_the_page_on_slow_links_says_up_to_which_bandwidth(figures):
    section = page("docs/slow-links.md").split("## Up to which bandwidth")[1].split("##")[0]
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
    assert f"[{first} and {second} times](docs/slow-links.md" in text
    assert f"{best:.1f} times sooner than bfloat16" in text


def test_the_headline_has_the_seconds_of_the_table():
    """Of links of 100 Mbit/s, to the last loss of dense Adam."""
    table = page("docs/slow-links.md").partition("| | steps | s a step")[2].partition("\n\n")[0]
    takes = {
        label: int(cells[2].removesuffix(" s")) for label, cells in rows(table).items() if cells[2]
    }
    compared = (
        "feedback_adam, PowerSGD",
        "feedback_muon, 100x",
        "dense Muon, bfloat16",
        "dense Adam, bfloat16",
    )
    for name in ("README.md", "docs/index.md"):
        headline = on_one_line(page(name).partition("## ")[0])
        assert all(f"{takes[label]:,} s" in headline for label in compared), name
        assert f"dense Adam in bfloat16 after {takes['dense Adam, bfloat16']:,} s" in headline


def test_the_page_on_meshes_has_the_table_of_its_results(imported):
    exchange = imported("exchange")
    records = json.loads((BENCHMARKS / "results/exchange/cpu.json").read_text())["rows"]
    table = exchange.markdown(records)
    assert table in page("docs/meshes.md")
    found = rows(table)
    assert found["bfloat16, two stages"][-3:-1] == ["1.0", "1.0"]
    assert found["gather top-k 1 %"][-3:-1] == ["24.1", "3.0"]
    assert found["hierarchical, slow links"][-3:] == ["", "", ""]
    few = [record for record in records if record["workers"] < 8]
    assert rows(exchange.markdown(few))["dense"] == ["4,194.3", "6,291.5"]


@pytest.mark.parametrize("name", ["steps-200", "prose-400"])
def test_the_page_on_training_has_the_tables_of_its_results(imported, name):
    results = json.loads((BENCHMARKS / f"results/convergence/{name}.json").read_text())
    text = page("docs/training.md")
    found = rows(imported("training").markdown(results))
    assert "dense" in found
    for method, (published, counted, *cells) in found.items():
        known = [published, counted] if name == "steps-200" else []
        for columns in ([*known, *cells[:5]], cells[5:]):
            if any(columns):
                assert f"| {' | '.join([method, *columns])} |" in text


@pytest.mark.parametrize(
    ("study", "file", "name"),
    [
        ("ends", "ends", "training"),
        ("ends", "ends-2000", "training"),
        ("seconds", "seconds", "slow-links"),
        ("downstream", "downstream", "training"),
        ("resets", "resets", "training"),
        ("endurance", "endurance", "training"),
        ("sharded", "lm", "meshes"),
    ],
)
def test_the_pages_have_the_tables_of_the_studies(imported, capsys, monkeypatch, study, file, name):
    found = imported("convergence").STUDIES[study]
    monkeypatch.setattr(imported(study), "save", lambda *_: None, raising=False)
    folder = BENCHMARKS / "results" / found.folder
    found.show(json.loads((folder / f"{file}.json").read_text()), folder, file)
    assert capsys.readouterr().out.strip() in page(f"docs/{name}.md")


@pytest.mark.parametrize(
    ("module", "file"), [("compile_time", "compile/cpu"), ("models", "programs/h100-models")]
)
def test_the_page_on_codecs_has_the_tables_of_what_is_compiled(imported, module, file):
    record = json.loads((BENCHMARKS / f"results/{file}.json").read_text())
    assert imported(module).show(record) in page("docs/codec-cost.md")


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
    codecs, meshes = page("docs/codec-cost.md"), page("docs/meshes.md")
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
        assert f"| {' | '.join(map(str, cells))} |" in meshes


def passes(row):
    """Reads and writes, in vectors, and the estimate in microseconds."""
    return f"{row['traffic_bytes'] / 4 / row['values']:.1f}", f"{estimate(row):.0f}"


def estimate(row):
    return row["traffic_bytes"] / 3.35e6 + 3 * row["kernels"]
