"""What a published model was trained on is what it claims, or assumed, and reports say so."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file, save_file

from stable_forgetting.benchmarks.pipeline import models
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.base.config import validate
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.data.splits import ids_digest
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.store.records import RunRecord
from stable_forgetting.common.store.stages import StageStore


@pytest.fixture(scope="module")
def published(tiny_text_suite, tmp_path_factory):
    """Suite, checkpoint folder, and the digest of all training indices."""
    spec = load_suite(str(tiny_text_suite())).spec
    cls = BENCHMARKS[spec.benchmark]
    bench = cls(validate(cls.Config, spec.protocol, "test"), Runtime(device="cpu"))
    folder = tmp_path_factory.mktemp("checkpoint")
    bench.build(5).save_pretrained(folder)
    bench.source.tokenizer.save_pretrained(folder)
    shape = dict.fromkeys(("dim", "depth", "heads", "context", "tokenizer"))
    path = tiny_text_suite(
        protocol={"model": {"name": str(folder), "original": str(folder), **shape}},
        methods={"original": None, "retrain": None, "gd": None},
    )
    return path, folder, ids_digest(bench.split(1).train)


def claim(folder, digest):
    path = folder / "model.safetensors"
    metadata = {"format": "pt"} | ({} if digest is None else {"trained_on": digest})
    save_file(load_file(path), path, metadata=metadata)


def test_training_data_that_are_assumed_are_called_so(published, cli, tmp_path):
    path, folder, _ = published
    claim(folder, None)
    store = tmp_path / "store"
    cli.ok("run", path, "--store", store)
    results = make_plan(load_suite(str(path)), StageStore(store)).results
    for result in results:
        record_path = StageStore(store).folder("measure", result.stage.key) / "record.json"
        original = result.label != "retrain"
        assert ("trained_on" in RunRecord.load(record_path).data) == original
    text = cli("report", path, "--store", store).out
    assert "Published without a statement of its training data: Original." in " ".join(text.split())


def test_published_weights_are_not_copied(published, cli, tmp_path, monkeypatch):
    """They are read from where they came, and a change there is told."""
    path, folder, _ = published
    claim(folder, None)
    store, weights = tmp_path / "store", folder / "model.safetensors"
    run = ("run", path, "--store", store)
    cli.ok(*run, "--only", "original,retrain")
    stored = {file.parent.name.partition("-")[0] for file in store.rglob("model.safetensors")}
    assert stored == {"retrain"}
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    monkeypatch.setattr(models, "COMPARED", set())
    done = cli(*run)
    line = done.err.splitlines()[-1]
    assert done.code == 2 and "published weights are no longer those of original/seed-1" in line
    weights.write_bytes(content)
    cli.ok(*run)
    stored = {file.parent.name.partition("-")[0] for file in store.rglob("model.safetensors")}
    assert stored == {"retrain", "unlearn"}


def test_a_claim_counts_where_it_is_right(published, cli, tmp_path):
    path, folder, digest = published
    claim(folder, digest)
    store = tmp_path / "store"
    cli.ok("run", path, "--store", store)
    assert "without a statement" not in cli("report", path, "--store", store).out
    claim(folder, "0" * 64)
    done = cli("run", path, "--store", tmp_path / "other")
    line = done.err.splitlines()[-1]  # after the bar of the weights
    assert done.code == 2 and line.startswith("error: model.original") and "other training" in line
