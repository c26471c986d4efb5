"""The language benchmark as a whole: the contract, what it compares with, spread models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stable_forgetting.common.base.config import merge, validate
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.checks import check_benchmark
from stable_forgetting.common.data.loader import Loader
from stable_forgetting.common.objectives.objectives import CrossEntropy
from stable_forgetting.common.train.config import FitConfig
from stable_forgetting.common.train.fit import fit
from stable_forgetting.language.benchmarks.tofu import TofuBenchmark, TofuConfig
from tests.language.made import CPU, TINY

PROTOCOL = {
    "data": {"name": "fictitious", "authors": 9, "forget_authors": 1, "questions": 2},
    "model": {**TINY, "context": 128, "tokenizer": 400},
    "scenario": {"kind": "forget10"},
    "train": {"steps": 2, "batch_size": 4},
    "evaluation": {"max_new_tokens": 4, "fq_reference": "loku"},
}


def benchmark(**over):
    config = validate(TofuConfig, merge(PROTOCOL, over), "test")
    return TofuBenchmark(config, CPU)


def test_the_benchmark_keeps_every_promise():
    plain = merge(PROTOCOL, {"evaluation": {"fq_reference": "tofu"}})
    results = check_benchmark("tofu", plain, CPU)
    assert [result for result in results if not result.ok] == [] and len(results) == 10


def test_lokus_reference_is_measured_and_compared():
    made = benchmark()
    split = made.split(1)
    parts = made.parts(split, trial=False, seed=1)
    assert parts["loku_reference"].tolist() == split.parts["forget"].tolist()
    ours, theirs = (made.score(made.build(seed), parts) for seed in (1, 2))
    found = made.compare(made.config, ours, theirs)
    assert 0 < found["fq"] <= 1
    plain = merge(PROTOCOL, {"evaluation": {"fq_reference": "tofu"}})
    same_rows = validate(TofuConfig, plain, "test")
    assert found == made.compare(same_rows, ours, theirs), "forget10 has fewer than 300 rows here"


def test_lokus_reference_stops_at_300_rows():
    made = benchmark(data={"authors": 150, "forget_authors": 50, "questions": 20})
    forget = made.split(1).parts["forget"]
    rows = made.parts(made.split(1), trial=False, seed=1)["loku_reference"]
    assert len(forget) == 400 and rows.tolist() == forget[:300].tolist()


@pytest.mark.parametrize(
    "scenario", [{"kind": "forget05"}, {"kind": "authors"}, {"kind": "requests", "requests": [1]}]
)
def test_lokus_reference_needs_the_model_without_forget10(scenario):
    with pytest.raises(ConfigError, match=r"retrained without forget10.* fq_reference: tofu"):
        validate(TofuConfig, {**PROTOCOL, "scenario": scenario}, "test")


def test_a_model_that_is_spread_over_devices_is_never_moved(tmp_path, monkeypatch):
    model_there = benchmark().build(1)
    model_there.save_pretrained(tmp_path)
    model = {"name": str(tmp_path), "tokenizer": 400, "device_map": {"": "cpu"}}
    config = TofuConfig.model_validate({**PROTOCOL, "model": model})
    made = TofuBenchmark(config, CPU)
    moved = []
    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "to", lambda self, *args, **_: moved.append(args) or self)
        assert made.num_classes == 400 and made.targets
        for placed in (made.build(1), made.blank()):
            assert not any(p.is_meta for p in placed.parameters())
            assert torch.equal(placed.lm_head.weight, model_there.lm_head.weight)
        moved.clear()  # what transformers does while it loads is its own affair
        split = made.split(1)
        stream = torch.Generator().manual_seed(0)
        loader = Loader(made.source, split.parts["retain"], 2, stream)
        fit(
            placed,
            CrossEntropy("retain"),
            {"retain": loader},
            FitConfig(steps=2, batch_size=2, log_every=1),
            forward=made.forward,
            seed=1,
        )
        made.score(placed, made.parts(split, trial=True, seed=1))
    assert not moved
