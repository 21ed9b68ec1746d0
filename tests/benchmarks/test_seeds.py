"""The founding papers' claims again, and the speed-ups that papers name."""

import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fftgrad as fg

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks/results"


@pytest.fixture
def seeds(imported):
    return imported("seeds")


@pytest.fixture
def speeds(imported):
    return imported("others.speeds")


@pytest.fixture
def nanogpt(imported):
    return imported("others.nanogpt")


def record(path):
    return json.loads((RESULTS / path).read_text())


def test_the_rows_stand_beside_those_of_the_loss_at_the_end(seeds):
    lines = seeds.beside(record("convergence/seeds.json")).splitlines()
    found = [line.split("|")[1].strip() for line in lines[2:]]
    assert found[:2] == list(seeds.DENSE)
    assert found[2:5] == ["100x, Muon, lead 0.5", "30x, Muon, lead 0.3", "300x, Muon, lead 0.5"]
    assert found[5:] == [row.name for row in seeds.ROWS]


@pytest.mark.parametrize("file", ["seeds", "seeds-64"])
def test_the_best_rate_of_each_row_has_a_worse_one_on_both_sides(imported, file):
    runs = record(f"convergence/{file}.json")["runs"]
    score = imported("program").score
    for task, method in {(run["task"], run["method"]) for run in runs}:
        own = [
            run for run in runs if (run["task"], run["method"], run["seed"]) == (task, method, 0)
        ]
        best = min(own, key=score)["rate"]
        assert {best / 2, best, 2 * best} <= {run["rate"] for run in own}, (task, method)


def test_rows_are_what_their_names_say(seeds):
    for row in (*seeds.ROWS, *seeds.LEARNERS):
        _, led, lead = row.name.partition("lead ")
        assert (row.optimizer is not None) == bool(led), row.name
        if led:
            assert row.optimizer.keywords == {"lead": float(lead)}
        if "x, " in row.name and "one vector" not in row.name and "FFT" in row.name:
            assert row.exchange.exchange.codec.stages[-1] == fg.Budget(ratio=30)
    found = {row.name: row.exchange for row in seeds.LEARNERS}
    assert {name: found[name].memory.uptake for name in found if "ScaleCom" in name} == {
        "ScaleCom 65x, Adam": 0.1,
        "ScaleCom 400x, Adam": 0.1,
        "ScaleCom 65x, Muon, lead 0.5": 1.0,
        "ScaleCom 400x, one vector, Muon, lead 0.5": 1.0,
    }


@pytest.mark.parametrize(("study", "workers", "steps"), [("seeds", 8, 1000), ("seeds-64", 64, 150)])
def test_runs_are_those_of_the_study(imported, study, workers, steps):
    told, own = record(f"convergence/{study}.json"), imported("convergence").STUDIES[study]
    assert told["workers"] == own.workers == workers
    assert {run["steps"] for run in told["runs"]} == {own.steps} == {steps}


def test_an_instant_codec_is_no_faster_than_the_share_allows(speeds):
    """The step without the mean stays, and of the mean what an all-gather sends of it."""
    found = speeds.speed(speeds.ALEXNET, speeds.counted(21.3))
    share, gathered = 0.6417, 7 / 21.3 / (2 * 7 / 8)
    assert found == pytest.approx(1 / (1 - share + share * gathered), rel=1e-3)


@pytest.mark.parametrize("model", ["ResNet32", "BERT-Large"])
def test_speed_ups_are_predicted_again(speeds, monkeypatch, model):
    few = [row for row in speeds.PUBLISHED if row[0].model == model]
    monkeypatch.setattr(speeds, "PUBLISHED", few)
    monkeypatch.setattr(speeds, "FILLED", ())
    told = [row for row in record("others/speeds.json")["rows"] if row["model"] == model]
    for new, row in zip(speeds.rows(), told, strict=True):
        assert new.pop("model") == row.pop("model") == model
        assert new.pop("method") == row.pop("method")
        assert new == pytest.approx(row, rel=1e-4)


def test_speed_ups_are_in_the_order_that_papers_name():
    rows = record("others/speeds.json")["rows"]
    for model in ("AlexNet", "ResNet32"):
        own = [row for row in rows if row["model"] == model and "published" in row]
        by = [sorted(own, key=lambda row: -row[key]) for key in ("published", "counted")]
        assert [row["method"] for row in by[0]] == [row["method"] for row in by[1]]
    above = {(r["model"], r["method"]) for r in rows if r.get("published", 0) > r.get("counted", 9)}
    assert above == {("AlexNet", name) for name in ("FFT", "top-k", "QSGD")}


def test_the_rate_is_that_of_the_readme(nanogpt):
    """A rise over 100 steps to 1e-3, and a cosine to 1e-4 at step 2,000."""
    found = [float(nanogpt.rate(step)) for step in (0, 49, 100, 1050, 2000)]
    middle = 1e-4 + 0.5 * (1 + math.cos(math.pi / 2)) * 9e-4
    assert found == pytest.approx([1e-3 / 101, 50e-3 / 101, 1e-3, middle, 1e-4])


def test_passages_are_pieces_of_the_text(nanogpt, tmp_path):
    text = "".join(chr(97 + i % 23) for i in range(2000))
    (tmp_path / nanogpt.TEXT).parent.mkdir(parents=True)
    (tmp_path / nanogpt.TEXT).write_text(text)
    train, test, vocabulary = nanogpt.texts(tmp_path)
    assert (len(train), len(test), vocabulary) == (1800, 200, 23)
    found = nanogpt.passages(np.random.default_rng(0), train, 5)
    assert found.shape == (5, 65)
    assert (np.diff(found, axis=1) % 23 == 1).all()


def test_a_dense_run_is_adamw_on_the_whole_batch(nanogpt, monkeypatch):
    """The twin has one layer here; four workers train as one that has all of their passages."""
    monkeypatch.setattr(nanogpt, "LAYERS", 1)
    twin, text = nanogpt.Twin(7), np.random.default_rng(3).integers(0, 7, 500).astype(np.int32)

    def loss(params, tokens):
        logits = twin.apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    start = twin.init(jax.random.key(0), jnp.asarray(text[None, :64]))
    own = nanogpt.ended(loss, start, nanogpt.optimizers()["dense AdamW"], text, 3)
    mask = jax.tree.map(lambda leaf: leaf.ndim > 1, start)
    plain = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(nanogpt.rate, b1=0.9, b2=0.99, weight_decay=0.1, mask=mask),
    )
    rng, params, state = np.random.default_rng(1337), start, plain.init(start)
    gradient = jax.jit(jax.grad(loss))
    for _ in range(3):
        tokens = nanogpt.passages(rng, text, 12)
        moves, state = plain.update(gradient(params, tokens), state, params)
        params = optax.apply_updates(params, moves)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), params, start)
    apart = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), params, own)
    assert min(jax.tree.leaves(moved)) > 1e-6
    assert max(jax.tree.leaves(apart)) < 1e-6


def test_fewer_bytes_end_below_their_dense_loss():
    """What the page says of nanoGPT's model, in per cent."""
    rows = record("others/nanogpt.json")["rows"][1:]
    losses = {row["ours"].partition(": ")[2]: float(row["ours"].partition(":")[0]) for row in rows}
    adamw, muon, by_adam, by_muon, hundred = losses.values()
    assert [*losses][:2] == ["dense AdamW", "dense Muon"]
    found = [by_adam / adamw, by_muon / adamw, by_muon / muon, hundred / muon]
    assert [round(100 * (ratio - 1), 1) for ratio in found] == [-1.6, -6.9, 1.4, 4.2]
