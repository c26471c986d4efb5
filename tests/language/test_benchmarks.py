"""Text benchmarks through the seams: one of one's own, files of one's own, published claims."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import benchmarks  # noqa: F401 - registers
from common.base.config import canonical, validate
from common.base.errors import ConfigError, DataError
from common.base.registry import BENCHMARKS, load_plugins
from common.checks import check_benchmark
from common.measure.gaps import average_gap
from common.protocol.benchmark import Runtime
from language.data.readers import TextDataConfig
from language.models.build import claimed_training

TOY = Path(__file__).with_name("toy_benchmark.py")
TINY = {"name": "tiny", "dim": 16, "depth": 1, "heads": 2, "context": 128, "tokenizer": 300}
CPU = Runtime(device="cpu")


@pytest.fixture
def toy(monkeypatch):
    """The registered toy benchmark, gone afterwards."""
    from language.data.readers import READERS

    for registry in (BENCHMARKS, READERS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    load_plugins([str(TOY)], installed=False)
    yield BENCHMARKS["phone_book"]
    import sys

    del sys.modules["stable_forgetting_plugin_toy_benchmark"]


def made(name, protocol, runtime=CPU):
    cls = BENCHMARKS[name]
    return cls(validate(cls.Config, protocol, "test"), runtime)


def test_a_text_benchmark_is_one_file(toy):
    assert len(TOY.read_text().splitlines()) <= 110
    protocol = {"data": {"name": "phone_book"}, "model": TINY, "train": {"steps": 1}}
    results = check_benchmark("phone_book", protocol, CPU)
    assert [result for result in results if not result.ok] == []
    bench = made("phone_book", protocol)
    split = bench.split(1)
    whole = bench.parts(split, trial=False, seed=1)
    assert set(whole) == {"forget", "retain", "test"}
    assert set(bench.parts(split, trial=True, seed=1)) == {"forget", "retain"}
    model = bench.build(1)
    metrics = bench.evaluate(bench.score(model, whole), trial=False, seed=1)
    assert set(metrics) == {spec.name for spec in bench.metrics}
    trial = bench.score(model, bench.parts(split, trial=True, seed=1), trial=True)
    assert set(trial["forget"].extra) == {"preferred"}


def test_a_reader_of_ones_own_has_its_own_keys_and_form(toy):
    data = TextDataConfig.of(name="phone_book", entries=9)
    assert canonical(data) == {"name": "phone_book", "entries": 9, "max_length": 512}
    with pytest.raises(ConfigError, match="questions is only for name: fictitious; leave it out"):
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
    for name in FILES.values():
        (folder / name).write_text("\n".join(json.dumps(row) for row in ROWS[rows]))
    data = {"name": "jsonl", "files": FILES, "rows": promised, "max_length": 64}
    protocol = {"data": data, "scenario": {"kind": "files"}, "model": TINY, "train": {"steps": 1}}
    protocol["evaluation"] = {"max_new_tokens": 4}
    return made("language", protocol, Runtime(device="cpu", data_root=folder))


@pytest.mark.parametrize(("rows", "count"), [("text", 2), ("answers", 4), ("comparisons", 6)])
def test_files_of_ones_own_can_be_ranked(tmp_path, rows, count):
    bench = of_files(tmp_path, rows, rows)
    assert bench.scenario == "files"
    rule = bench.gap_of(bench.config)
    assert rule.title == f"AG{count}" and len(rule.metrics) == count
    split = bench.split(1)
    for trial, names in ((False, rule.metrics), (True, rule.trial)):
        parts = bench.parts(split, trial=trial, seed=1)
        ours, theirs = (
            bench.evaluate(bench.score(bench.build(seed), parts, trial=trial), trial=trial, seed=1)
            for seed in (1, 2)
        )
        gap = average_gap(ours, theirs, names)
        assert gap is not None and gap > 0


@pytest.mark.parametrize(
    ("rows", "promised", "clue"),
    [("text", "answers", "a question in every row"), ("answers", "comparisons", "wrong answers")],
)
def test_rows_are_what_they_promise(tmp_path, rows, promised, clue):
    with pytest.raises(DataError, match=clue) as caught:
        _ = of_files(tmp_path, rows, promised).source
    assert "\n" not in str(caught.value) and f"data.rows: {rows}" in str(caught.value)


def test_what_a_published_model_was_trained_on_is_claimed_or_not(tmp_path):
    import torch
    from safetensors.torch import save_file

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
    bench = made("language", protocol)
    assert bench.published_claim("original") is None
    (tmp_path / "b.safetensors").unlink()
    assert bench.published_claim("original") == "0123"
    assert bench.published_claim("retrain") is None
