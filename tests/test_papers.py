"""The page of the papers' claims: methods, tests, commands, verdicts, and the files' figures."""

import collections
import json
import pathlib
import re

import pytest
from test_completeness import BESIDE, METHOD_NAMES, OPTIMIZERS

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "docs/results/papers.md").read_text()
RESULTS = ROOT / "benchmarks/results/papers"
VERDICTS = ("reproduced", "in part", "not reproduced", "not comparable", "not measured")
HEADER = "| claim | the paper's figure | our set-up | our figure | verdict | command or test |"


def rows():
    """The cells of each row of the tables of claims."""
    for table in PAGE.split(HEADER)[1:]:
        lines = table.strip().split("\n\n")[0].splitlines()
        assert set(lines[0]) <= set("|- "), lines[0]
        for line in lines[1:]:
            assert line.startswith("| ")
            assert line.endswith(" |")
            yield [cell.strip() for cell in line[1:-1].split("|")]


ROWS = list(rows())


def test_every_row_has_six_cells_and_a_verdict():
    assert len(ROWS) > 80
    for row in ROWS:
        assert len(row) == 6, row
        assert row[4] in VERDICTS or re.fullmatch(r"TODO\(\w+\)", row[4]), row


def test_what_has_a_verdict_says_how_it_was_found():
    for _, _, setting, figure, verdict, how in ROWS:
        if verdict in VERDICTS[:3]:
            assert setting, figure
            assert figure, setting
            assert how, figure


@pytest.mark.parametrize("name", sorted(METHOD_NAMES | OPTIMIZERS | BESIDE))
def test_every_method_is_on_the_page(name):
    assert re.search(rf"`(fg\.(methods|optimizers|contrib\.\w+)\.)?{name}`", PAGE)


NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py::\w+)`", PAGE)))


@pytest.mark.parametrize("name", NAMED)
def test_a_test_that_is_named_exists(name):
    file, function = name.split("::")
    assert re.search(rf"^def {function}\(", (ROOT / file).read_text(), re.MULTILINE)


def test_many_tests_are_named():
    assert len(NAMED) > 20
    assert len(NAMED) == len(set(re.findall(r"tests/[\w/.:]*", PAGE)))


def test_every_command_is_a_script_or_a_letter_that_is_explained():
    letters = set(re.findall(r"\*\*(\w+)\*\* is\s", PAGE))
    assert letters
    used = set()
    for *_, how in ROWS:
        for part in how.split(", ") if how else []:
            command = re.fullmatch(r"`python ([\w/.]+)( \w+)?( --?[\w-]+( \w+)?)*`", part)
            if command:
                assert (ROOT / command[1]).is_file(), part
            elif part in letters:
                used.add(part)
            else:
                assert part.strip("`") in NAMED or part.startswith("TODO("), part
    assert used == letters


def test_the_count_is_that_of_the_tables():
    counted = collections.Counter(row[4] for row in ROWS)
    section = PAGE.split("## How many of each")[1]
    said = re.findall(r"^\| ([a-z ]+) \| (\d+) \|$", section, re.MULTILINE)
    assert {verdict: int(count) for verdict, count in said} == {v: counted[v] for v in VERDICTS}


# The figures of the two result files.

ERRORS = {row["gradient"]: row for row in json.loads((RESULTS / "errors.json").read_text())["rows"]}
TRAINING = json.loads((RESULTS / "training.json").read_text())["runs"]
TASKS = list(dict.fromkeys(run["task"] for run in TRAINING))


def figures(*words):
    """Our figure of the row whose claim or set-up has these words."""
    (found,) = (row[3] for row in ROWS if all(word in " ".join(row[:3]) for word in words))
    return found


def test_the_errors_are_those_of_the_file():
    lm, conv = ERRORS["language model"], ERRORS["convolutions"]
    for codec in lm["relative"]:
        cells = [codec]
        for found in (lm, conv):
            below = found["below"].get(codec)
            share = "" if below is None else f" {100 * below:.1f} %"
            cells += [f"{found['relative'][codec]:.3f}", share.strip()]
        assert "| " + " | ".join(cells).replace("|  |", "| |").rstrip() in PAGE
    assert lm["below_all"] == conv["below_all"] == 0
    assert figures("below all others'").startswith("for 0.0 %;")
    told = figures("less approximation error")
    for codec in ("FFT (paper)", "QSGD", "TernGrad", "top-k"):
        both = " and ".join(f"{row['relative'][codec]:.2f}" for row in (lm, conv))
        assert both in told, both


def test_the_quantizers_are_those_of_the_file():
    found = [row["quantized"] for row in ERRORS.values()]
    told = figures("fixed range")
    assert " and ".join(f"{row['tuned to [-1, 1]']:.2f}" for row in found) in told
    assert " and ".join(f"{row['tuned to its range']:.3f}" for row in found) in told
    told = figures("even steps")
    for row in found:
        assert f"{row['fitted']:.4f} against {row['even steps']:.4f}" in told


def test_the_searches_are_those_of_the_file():
    found = [search for row in ERRORS.values() for search in row["searches"]]
    survivors, passes = zip(*(search["trimmed"] for search in found), strict=True)
    told = figures("trimmed search")
    assert f"{min(survivors):.1f} to {max(survivors):.0f} times k survive" in told
    assert f"in {min(passes)} or {max(passes)} passes" in told
    assert max(passes) == min(passes) + 1
    published = [search["binary, stops at 0.2"][0] for search in found]
    (good,) = (share for share in published if share >= 1)
    bad = [share for share in published if share < 1]
    expected = f"{good:.2f} k once, else {min(bad):.2f} to {max(bad):.2f} k"
    assert figures("binary search") == expected
    ours = [search["Threshold"] for search in found]
    assert f"{min(ours):.2f} to {max(ours):.2f} k" == figures("2^-20")


def test_the_clipping_is_that_of_the_file():
    told = figures("clipping at 2.5")
    for key, digits in (("shorter", 1), ("degrees", 0)):
        scale = 100 if key == "shorter" else 1
        both = [f"{scale * row['clipped'][key]:.{digits}f}" for row in ERRORS.values()]
        assert " and ".join(both) in told


def mean(task, name, key):
    seeds = [run[key] for run in TRAINING if (run["task"], run["method"]) == (task, name)]
    return sum(seeds) / len(seeds)


THETAS = [f"theta {theta}" for theta in (0.5, 0.7, 0.85, 0.9, 0.99)]


@pytest.mark.parametrize(
    ("claim", "names"),
    [
        ("accuracy against θ", THETAS),
        ("from 0.99, too", ["theta 0.9, then 0", "theta 0.99, then 0"]),
    ],
)
def test_what_thetas_do_to_training_is_what_the_file_says(claim, names):
    told = figures(claim)
    assert ", ".join(f"{100 * mean('digits', name, 'accuracy'):.1f}" for name in names) in told
    assert f"{100 * mean('digits', 'dense', 'accuracy'):.1f}" in told
    for task in TASKS:
        found = {run["method"] for run in TRAINING if run["task"] == task}
        losses = [f"{mean(task, name, 'loss'):.3f}" for name in names if name in found]
        assert f"{', '.join(losses)} (dense {mean(task, 'dense', 'loss'):.3f})" in told


def test_what_falling_recovers_is_what_the_file_says():
    told = figures("recovers the accuracy")
    stayed, fell, dense = (
        f"{100 * mean('digits', name, 'accuracy'):.1f}"
        for name in ("theta 0.99", "theta 0.99, then 0", "dense")
    )
    assert f"{stayed} % without, {fell} % with, {dense} % dense" in told


def test_likeness_is_what_the_file_says():
    told = figures("residuals are alike")
    for task in TASKS:
        plain, low = (f"ScaleCom, uptake {uptake}" for uptake in (1.0, 0.1))
        cosines = [f"{mean(task, name, 'residuals'):.2f}" for name in (plain, low)]
        assert f"{task} {' and '.join(cosines)}" in told
        assert f"{mean(task, plain, 'overlap'):.2f}" in told
    for task in TASKS:
        both = [f"{mean(task, name, 'loss'):.3f}" for name in (plain, low)]
        assert f"{task} {' and '.join(both)}" in figures("low-pass filter")
