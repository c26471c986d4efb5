"""Which form a stored adapter has when its model is evaluated, and when work goes on from it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from stable_forgetting.benchmarks.pipeline.worksite import Worksite
from stable_forgetting.common.bounded.attach import adapted_layers, attach, merges_exactly
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.bounded.files import save_adapter
from stable_forgetting.common.store.weights import save_weights

MLP = ("blocks.*.mlp.fc*",)


@pytest.mark.parametrize("mode", ["merged", "split"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_evaluation_keeps_adapters_that_merging_would_round(tiny, tmp_path, mode, dtype):
    original, model = tiny.net().to(dtype), tiny.net().to(dtype)
    attach(
        model, MLP, AdapterConfig(rank=2, phi="sine", mode=mode), torch.Generator().manual_seed(0)
    )
    for _, layer in adapted_layers(model):
        layer.A.data.fill_(1e-4)
    folders = {"unlearn": tmp_path / "unlearn", "original": tmp_path / "original"}
    save_adapter(model, folders["unlearn"])
    folders["original"].mkdir()
    save_weights(original, folders["original"])
    blank = SimpleNamespace(blank=lambda: tiny.net(seed=5).to(dtype))
    site = object.__new__(type("Site", (Worksite,), {"benchmark": blank}))
    site._store = SimpleNamespace(checked=lambda kind, key: folders[kind])
    start = SimpleNamespace(kind="original", key="", start=None, spec=None)
    stage = SimpleNamespace(kind="unlearn", key="", start=start, spec=None)
    exact, x = site._model(stage, exact=True), torch.linspace(-1, 1, 18, dtype=dtype).reshape(3, 6)
    kept = mode == "split" and dtype == torch.bfloat16
    assert merges_exactly(model) is not kept
    assert len(list(adapted_layers(exact))) == (4 if kept else 0)
    assert not list(adapted_layers(site._model(stage)))
    loose = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(exact(x), model(x), rtol=loose, atol=loose)
    assert torch.equal(exact(x), model(x)) or not kept
