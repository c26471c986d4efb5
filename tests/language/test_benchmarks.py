"""Text benchmarks through the seams: one of one's own, files of one's own, published claims."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from stable_forgetting.common.base.config import canonical, validate
from stable_forgetting.common.base.errors import ConfigError, DataError
from stable_forgetting.common.base.registry import BENCHMARKS, load_plugins
from stable_forgetting.common.checks import check_benchmark
from stable_forgetting.common.measure.goal import References
from stable_forgetting.common.protocol.probe import PROBES
from stable_forgetting.language.benchmarks.rwku import Recalled
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.corpus import Item
from stable_forgetting.language.data.readers import READERS, TextDataConfig
from stable_forgetting.language.measure.scoring import GreedyAnswers, TofuEvaluation
from stable_forgetting.language.models.build import build_model, claimed_training
from tests.language.made import CPU, TINY, benchmark, source_of

TOY = Path(__file__).with_name("toy_benchmark.py")


@pytest.fixture
def own_names(monkeypatch):
    """What a plugin registers is gone afterwards."""
    for registry in (BENCHMARKS, READERS, PROBES):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


@pytest.fixture
def toy(own_names):
    """The registered toy benchmark."""
    load_plugins([str(TOY)], installed=False)
    yield BENCHMARKS["phone_book"]
    del sys.modules["stable_forgetting_plugin_toy_benchmark"]


def test_a_text_benchmark_is_one_file(toy):
    assert len(TOY.read_text().splitlines()) <= 150
    protocol = {"data": {"name": "phone_book"}, "model": TINY, "train": {"steps": 1}}
    results = check_benchmark("phone_book", protocol, CPU)
    assert [result for result in results if not result.ok] == []
    bench = benchmark("phone_book", **protocol)
    split = bench.split(1)
    whole = bench.parts(split, trial=False, seed=1)
    assert set(whole) == {"forget", "retain", "unseen", "test"}
    assert set(bench.parts(split, trial=True, seed=1)) == set(whole) - {"test"}
    model = bench.build(1)
    metrics = bench.evaluate(bench.score(model, whole), trial=False, seed=1)
    assert set(metrics) == {spec.name for spec in bench.metrics}
    trial = bench.score(model, bench.parts(split, trial=True, seed=1), trial=True)
    assert set(trial["forget"].extra) == {"preferred"}


def test_a_reader_of_ones_own_has_its_own_keys_and_form(toy):
    data = TextDataConfig.of(name="phone_book", entries=9)
    assert canonical(data) == {"name": "phone_book", "entries": 9, "max_length": 512}
    with pytest.raises(
        ConfigError, match="questions is only for name: fictitious and wmdp; leave it out"
    ):
        validate(TextDataConfig, {"name": "phone_book", "questions": 3}, "test")
    with pytest.raises(ConfigError, match=r"entrys: unknown key; did you mean 'entries'\?"):
        validate(TextDataConfig, {"name": "phone_book", "entrys": 3}, "test")
    with pytest.raises(ConfigError, match=r"unknown 'phone_bok'; did you mean 'phone_book'\?"):
        validate(TextDataConfig, {"name": "phone_bok"}, "test")


def test_a_key_of_another_reader_may_be_erased_with_null():
    data = TextDataConfig.of(name="jsonl", files={"forget": "f"}, authors=None, facts=None)
    again = TextDataConfig.model_validate(canonical(data))
    assert again == data and "rows" not in canonical(data)
    assert canonical(data)["source"] == "auto" and canonical(data)["questions"] is None


ROWS = {
    "text": [{"text": f"the number {k} is on the {k}. page"} for k in range(6)],
    "answers": [{"question": f"what is {k}?", "answer": f"it is {k}"} for k in range(6)],
    "comparisons": [
        {
            "question": f"what is {k}?",
            "answer": f"it is {k}",
            "paraphrased_answer": f"{k} it is",
            "perturbed_answer": [f"it is {k + 1}", f"it is {k + 2}"],
        }
        for k in range(6)
    ],
}
FILES = {"forget": "forget.jsonl", "retain": "retain.jsonl", "holdout": "holdout.jsonl"}


def of_files(folder, rows, promised):
    for part, name in FILES.items():
        lines = (json.dumps(row).replace(" is ", f" of {part} is ") for row in ROWS[rows])
        (folder / name).write_text("\n".join(lines))
    data = {"name": "jsonl", "files": FILES, "rows": promised, "max_length": 64}
    more = {"scenario": {"kind": "files"}, "evaluation": {"max_new_tokens": 4}}
    return benchmark("tofu", folder, data=data, **more)


@pytest.mark.parametrize(("rows", "count"), [("text", 3), ("answers", 3), ("comparisons", 4)])
def test_files_of_ones_own_can_be_ranked(tmp_path, rows, count):
    bench = of_files(tmp_path, rows, rows)
    assert bench.scenario == "files"
    rule = bench.gap_of(bench.config)
    assert len(rule.metrics) == count and len(rule.axes) == 2
    assert sum(rule.weights().values()) == pytest.approx(1)
    split = bench.split(1)
    for trial in (False, True):
        parts = bench.parts(split, trial=trial, seed=1)
        ours, theirs = (
            bench.evaluate(bench.score(bench.build(seed), parts, trial=trial), trial=trial, seed=1)
            for seed in (1, 2)
        )
        gap = rule.distance(ours, References(retrain=theirs), trial=trial)
        assert gap is not None and gap > 0
        assert not trial or all(name in ours for name in rule.trial)
        assert trial or all(ours[name] is not None for name in rule.columns)


@pytest.mark.parametrize(
    ("rows", "promised", "clue"),
    [("text", "answers", "a question in every row"), ("answers", "comparisons", "wrong answers")],
)
def test_rows_are_what_they_promise(tmp_path, rows, promised, clue):
    with pytest.raises(DataError, match=clue) as caught:
        _ = of_files(tmp_path, rows, promised).source
    assert "\n" not in str(caught.value) and f"data.rows: {rows}" in str(caught.value)


@pytest.mark.parametrize(("part", "other"), [("forget", "retain"), ("retain", "holdout")])
def test_a_row_is_forgotten_or_kept_or_never_seen(tmp_path, part, other):
    bench = of_files(tmp_path, "answers", "answers")
    first = (tmp_path / FILES[part]).read_text().splitlines()[0]
    with (tmp_path / FILES[other]).open("a") as file:
        file.write("\n" + first.replace('"it', '" it'))
    clue = rf"{FILES[part]} row 1 \({part}\) and {FILES[other]} row 7 \({other}\) are the same"
    with pytest.raises(DataError, match=clue):
        _ = bench.source


def test_rows_and_answers_fit_the_window_of_a_tiny_model():
    small = {**TINY, "context": 48}
    data = {"authors": 2, "forget_authors": 1}
    source = benchmark("tofu", data=data, model=small).source  # 512 is the default
    with pytest.raises(DataError, match=r"tokens are more than model.context 48; .*max_length=48"):
        source.fetch(torch.arange(len(source)))
    items = [item for item in source.corpus.items if len(source.prompt_ids(item.question)) < 48]
    for metric in (GreedyAnswers(TofuEvaluation()), Recalled(bare=False)):
        asked = metric.requests(source, items)
        assert max(len(each.ids) + each.limit for each in asked) == 48


def test_rows_fit_the_window_of_a_model_in_a_folder(tmp_path):
    items = [Item("x", -1, "", "the page of a book")]
    source = source_of(items)
    tiny = {**TINY, "kind": "gpt_neo", "context": 32}
    model = build_model(CausalModelConfig(**tiny), source.vocab_size, 0)
    model.save_pretrained(tmp_path / "model")
    source.tokenizer.save_pretrained(tmp_path / "model")
    for part, name in FILES.items():
        (tmp_path / name).write_text(json.dumps({"text": "the page of a book " * 9 + part}))
    data = {"name": "jsonl", "files": FILES}
    more = {"scenario": {"kind": "files"}, "model": {"name": str(tmp_path / "model")}}
    bench = benchmark("tofu", tmp_path, data=data, **more)
    bench.source.encode_index(0)
    built = bench.build(0)
    with pytest.raises(DataError, match=r"tokens are more than model.context 32; .*max_length=32"):
        bench.score(built, bench.split(0).parts)
    short = benchmark("tofu", tmp_path, data={**data, "max_length": 32}, **more)
    assert short.score(short.build(0), short.split(0).parts)["forget"].loss.shape == (1,)


@pytest.mark.parametrize(("length", "texts"), [(64, 32), (1024, 32), (2048, 16), (100_000, 1)])
def test_long_texts_are_evaluated_fewer_at_a_time(length, texts):
    data = {"authors": 2, "forget_authors": 1, "max_length": length}
    assert benchmark("tofu", data=data, model=TINY).evaluation_batch == texts


def test_what_a_published_model_was_trained_on_is_claimed_or_not(tmp_path):
    weights = {"weight": torch.zeros(2)}
    assert claimed_training(tmp_path) is None
    save_file(weights, tmp_path / "a.safetensors", metadata={"trained_on": "0123"})
    assert claimed_training(tmp_path) == "0123"
    save_file(weights, tmp_path / "b.safetensors")
    assert claimed_training(tmp_path) is None
    protocol = {
        "data": {"authors": 3, "forget_authors": 1, "questions": 2},
        "model": {"name": str(tmp_path), "original": str(tmp_path), "retrain": {"x": "nobody/x"}},
        "train": {"steps": 1},
    }
    bench = benchmark("tofu", **protocol)
    assert bench.published_claim("original") is None
    (tmp_path / "b.safetensors").unlink()
    assert bench.published_claim("original") == "0123"
    assert bench.published_claim("retrain") is None


TRAIN = {"steps": 60, "batch_size": 8, "lr": 3e-3}
SUITE = {
    "suite": "book",
    "benchmark": "phone_book",
    "protocol": {
        "data": {"name": "phone_book"},
        "model": {**TINY, "dim": 32},
        "train": TRAIN,
        "minimum_train_accuracy": 0,
    },
    "seeds": [1, 2],
    "probes": {"letters": {"count": 3}},
    "rules": ["toy"],
    "methods": {
        "original": None,
        "idle": {"method": "ascent", "params": {"lr": 1e-9, "steps": 1}, "tune": False},
        "ascent": {"params": {"steps": 6, "batch_size": 3}},
        "until": {
            "method": "ascent",
            "params": {
                "lr": 3e-3,
                "steps": 40,
                "batch_size": 3,
                "evaluate_epochs": 1,
                "min_epochs": 2,
                "stop_below": "goal",
            },
            "tune": False,
        },
    },
    "tune": {"seeds": [0], "trials": 2, "grids": {"default": {"lr": [1e-9, 1e-2]}}},
}


@pytest.fixture
def run_suite(own_names, cli, tmp_path):
    """``unlearn run`` with the toy plugin; the suite's folder is ``suites/book``."""

    def run(**over):
        path = tmp_path / "book.yaml"
        path.write_text(yaml.safe_dump({**SUITE, **over}, sort_keys=False))
        return cli("run", path, "--plugin", TOY, "--store", tmp_path / "store", "--workers", 1)

    return run


def test_goals_rank_a_suite_without_retrain_and_a_probe_is_its_utility(run_suite, tmp_path):
    done, folder = run_suite(), tmp_path / "store" / "suites" / "book"
    assert done.code == 0, done.err
    board = json.loads((folder / "leaderboard.json").read_text())
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    by_label = {}
    for record in records:
        by_label.setdefault(record["row"], {})[record["seed"]] = record
    original = by_label["original"]
    assert all("letters.preferred" in record["metrics"] for record in records)

    def order(label):
        rows = by_label[label].values()
        goal = {seed: r["metrics"]["unseen_preferred"] for seed, r in original.items()}
        hits = [r["metrics"]["forget_preferred"] < goal[r["seed"]] for r in rows]
        kept = [r["metrics"]["letters.preferred"] for r in rows]
        steps = [r["cost"]["steps"] for r in rows]
        return -sum(hits) / len(hits), -sum(kept) / len(kept), sum(steps) / len(steps)

    labels = [row["row"] for row in board["rows"]]
    assert set(labels) == set(SUITE["methods"])
    assert [order(label) for label in labels] == sorted(order(label) for label in labels)
    markdown = (folder / "LEADERBOARD.md").read_text()
    assert "forget_preferred below unseen_preferred of Original" in markdown
    assert "| toy |" in markdown and "reached" in markdown and "Incomplete" not in markdown
    for seed, record in by_label["until"].items():
        limit = original[seed]["metrics"]["unseen_preferred"]
        if record["cost"]["steps"] < 40:
            assert record["stopped"] == f"forget_preferred < {limit:g}"
            assert record["cost"]["steps"] >= 2

    stages = {path.name for path in (tmp_path / "store" / "stages").iterdir()}
    again = run_suite(probes={"letters": {"count": 2}})
    assert again.code == 0, again.err
    new = {path.name for path in (tmp_path / "store" / "stages").iterdir()} - stages
    assert new and all(name.startswith("probe-") for name in new), "another probe, nothing else"


@pytest.mark.parametrize(
    ("over", "line"),
    [
        ({"probes": {}}, "nothing measures 'letters.preferred'"),
        ({"probes": {"leters": None}}, "unknown probe 'leters'; did you mean 'letters'?"),
        ({"probes": {"letters": {"cuont": 2}}}, "cuont: unknown key; did you mean 'count'?"),
        ({"rules": ["toi"]}, "rules: no rule set 'toi'; did you mean 'toy'?"),
        ({"methods": {"ascent": None}}, "0 rows of method original; goals are measured on it"),
    ],
)
def test_faults_of_goals_and_probes_are_one_line(run_suite, tmp_path, over, line):
    done = run_suite(**over)
    assert done.code == 2 and done.err.count("\n") == 1
    assert line in done.err and not (tmp_path / "store").exists()
