"""The ceiling of a causal model's cross-entropy: a tied head does not lift it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from stable_forgetting.common.probes import ceiling
from stable_forgetting.common.protocol.probe import make_probe
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.models.backbone import last_layers
from stable_forgetting.language.models.build import build_model
from stable_forgetting.language.models.families import FAMILIES

TINY = sorted(name for name, family in FAMILIES.items() if family.tiny is not None)
VOCABULARY = 40


def tiny(kind):
    config = CausalModelConfig(kind=kind, dim=16, depth=1, heads=2, context=16, tokenizer=300)
    model = build_model(config, VOCABULARY, 0).eval()
    with torch.no_grad():  # a head as wide as that of a trained model, and a shift that counts
        model.get_output_embeddings().weight.normal_(std=0.5)
    return model


@pytest.mark.parametrize("kind", TINY)
def test_ascent_on_everything_before_the_last_layers_stays_below(kind, monkeypatch):
    model = tiny(kind)
    probe = make_probe("ceiling", {}, "test")
    table = probe.measure(model, SimpleNamespace(last_layers=last_layers))
    layers = last_layers(model)
    assert len(table.rows) == VOCABULARY
    highest = probe.summary(table)["ceiling.loss"]
    assert probe.related({"ceiling.loss": highest, "forget_loss": highest / 4}) == {
        "ceiling.reached": 25
    }
    frozen = {id(layers.gain), id(model.get_output_embeddings().weight)}
    frozen |= {id(each) for each in (layers.shift, layers.bias)}
    trained = [p for p in model.parameters() if id(p) not in frozen]
    ids = torch.arange(24).view(3, 8)
    labels = torch.arange(3) % 2
    optimizer = torch.optim.Adam(trained, lr=0.03, maximize=True)
    for _ in range(150):
        optimizer.zero_grad()
        logits = model(input_ids=ids).logits[:, -1]
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        losses.sum().backward()
        optimizer.step()
    ceilings = [table.rows[f"class {label}"]["ceiling"] for label in labels.tolist()]
    for loss, ceiling_of in zip(losses.tolist(), ceilings, strict=True):
        assert 0.7 * ceiling_of < loss <= ceiling_of + 1e-3


def test_a_large_vocabulary_is_sampled(monkeypatch):
    monkeypatch.setattr(ceiling, "ALL", 30)
    monkeypatch.setattr(ceiling, "SOME", 8)
    table = make_probe("ceiling", {}, "test").measure(
        tiny("gpt_neo"), SimpleNamespace(last_layers=last_layers)
    )
    assert list(table.rows) == [f"class {label}" for label in range(0, VOCABULARY, 5)]


def test_families_without_a_known_end_have_none():
    model = tiny("llama")
    model.config.model_type = "gemma"  # its logits are more than a linear map
    assert last_layers(model) is None
