"""Configs of text data, models and scenarios: defaults, and one line per mistake."""

from __future__ import annotations

import pytest

from stable_forgetting.common.base.config import validate
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.readers import TextDataConfig
from stable_forgetting.language.scenarios import TextScenarioConfig


def test_defaults_are_filled_in_before_they_are_hashed():
    data = TextDataConfig.of()
    assert (data.authors, data.forget_authors, data.questions) == (36, 4, 20)
    assert data.train_on_facts
    assert TextDataConfig.of(name="tofu").authors is None
    assert not TextDataConfig.of(name="tofu").train_on_facts
    model = CausalModelConfig()
    assert (model.kind, model.dim, model.tokenizer) == ("gpt_neo", 128, 4000)
    assert CausalModelConfig(name="microsoft/phi-1_5").kind is None


@pytest.mark.parametrize(
    ("model", "fields", "clue"),
    [
        (TextDataConfig, {"name": "tofu", "authors": 3}, "both or none"),
        (TextDataConfig, {"source": "hub"}, "only for name: tofu"),
        (TextDataConfig, {"name": "tofu", "questions": 3}, "only for name: fictitious"),
        (TextDataConfig, {"questions": None}, "needs authors"),
        (TextDataConfig, {"questions": 21}, "less than or equal to 20"),
        (TextDataConfig, {"name": "jsonl"}, "belong together"),
        (TextDataConfig, {"name": "jsonl", "files": {"forget": "../x"}}, "below the data root"),
        (CausalModelConfig, {"dim": 30}, r"multiple of 2 \* heads"),
        (CausalModelConfig, {"dim": None}, "needs a value"),
        (CausalModelConfig, {"original": "x"}, "not for name: tiny"),
        (CausalModelConfig, {"name": "x/y", "dim": 8}, "has its own"),
        (TextScenarioConfig, {"kind": "forget01", "forget_authors": 2}, "only for kind: authors"),
        (TextScenarioConfig, {"kind": "forget05", "draw": True}, "draw"),
        (TextScenarioConfig, {"kind": "requests", "requests": []}, "only 0 requests"),
        (TextScenarioConfig, {"request": 1}, "request is only for kind: requests"),
        (TextScenarioConfig, {"kind": "requests", "request": 4}, "only 3 requests"),
        (TextScenarioConfig, {"used": 0.5}, "only for kind: requests"),
        (
            TextScenarioConfig,
            {"kind": "requests", "requests": ["forget01"], "draw": True},
            "requests given as numbers",
        ),
    ],
)
def test_every_mistake_is_one_line(model, fields, clue):
    with pytest.raises(ConfigError, match=clue) as caught:
        validate(model, fields, "suite.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "label"),
    [
        ({}, "4-authors"),
        ({"forget_authors": 2, "draw": True}, "2-authors-drawn"),
        ({"kind": "forget05"}, "forget05"),
        ({"kind": "requests"}, "request-1-of-3-3-3"),
        (
            {"kind": "requests", "requests": ["forget01", "forget05"], "request": 2},
            "request-2-of-forget01-forget05",
        ),
    ],
)
def test_labels(fields, label):
    assert TextScenarioConfig(**fields).label == label
