from __future__ import annotations

from types import SimpleNamespace

import pytest
import timm
import torch

from stable_forgetting.common.protocol.probe import make_probe
from stable_forgetting.vision.models.family import last_layers


def measured(model):
    probe = make_probe("ceiling", {}, "test")
    return probe, probe.measure(model.eval(), SimpleNamespace(last_layers=last_layers))


def vit(**over):
    torch.manual_seed(0)
    small = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 3}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=4, **{**small, **over})
    torch.nn.init.normal_(model.head.weight, std=0.5)
    return model


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_ascent_on_everything_before_the_last_layers_stays_below(pool):
    model = vit(global_pool=pool)
    probe, table = measured(model)
    trained = [
        p
        for name, p in model.named_parameters()
        if not name.startswith(("norm", "fc_norm", "head"))
    ]
    optimizer = torch.optim.Adam(trained, lr=0.03, maximize=True)
    images, labels = torch.randn(8, 3, 16, 16), torch.arange(8) % 4
    for _ in range(60):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels, reduction="none")
        loss.sum().backward()
        optimizer.step()
    for value, label in zip(loss.tolist(), labels.tolist(), strict=True):
        assert value <= table.rows[f"class {label}"]["ceiling"] + 1e-3
    summary = probe.summary(table)
    assert max(loss.tolist()) > 0.9 * summary["ceiling.loss"]
    related = probe.related({**summary, "forget_loss": summary["ceiling.loss"] / 2})
    assert related == {"ceiling.reached": pytest.approx(50)}


@pytest.mark.parametrize("name", ["resnet18", "test_vit3", "deit_tiny_distilled_patch16_224"])
def test_a_model_that_does_not_end_in_norm_and_head_has_no_ceiling(name):
    """The second pools by attention, and the third adds the logits of another head."""
    model = timm.create_model(name, num_classes=4)
    probe, table = measured(model)
    assert last_layers(model) is None
    assert probe.summary(table) == {"ceiling.loss": None}
    assert probe.related({"ceiling.loss": None, "forget_loss": 1.0}) == {"ceiling.reached": None}
