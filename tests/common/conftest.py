"""What tests of methods and of adapters share: a trained tiny net, its losses, kills, factors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from stable_forgetting.common.bounded.layer import BoundedLinear
from stable_forgetting.common.data.batch import Batch
from stable_forgetting.common.methods.base import train_reference
from stable_forgetting.common.objectives.positions import sample_cross_entropy
from stable_forgetting.common.train.config import FitConfig
from tests.common.made import values_of
from tests.common.train.trained import Killed, resumed

RECIPE = FitConfig(steps=25, batch_size=16, lr=1e-2)


@pytest.fixture(scope="session")
def baseline(tiny):
    """Original of a problem, a model's losses on it, and a training that is killed and resumed."""

    def original(source, split, **fields):
        access = frozenset({"forget", "retain", "initial"})
        task = tiny.task(source, split, access=access, recipe=RECIPE, **fields)
        return train_reference(task, ["forget", "retain"])

    def losses(model, source, split, parts=("forget", "retain", "test")) -> dict[str, float]:
        model.eval()
        values = {}
        for part in parts:
            batch = source.fetch(torch.as_tensor(split.parts[part]))
            with torch.no_grad():
                loss = sample_cross_entropy(tiny.forward(model, batch), batch.labels)
            values[part] = float(loss.double().mean())
        return values

    def resumes(run, folder) -> list[int]:
        """The steps after a kill at the eleventh; the model is that of a whole run."""

        def kill(step, total, loss):
            if step == 11 and total >= 11:
                raise Killed

        whole = run()
        model, steps = resumed(run, folder, kill)
        assert tiny.same(whole, model)
        return steps

    return SimpleNamespace(recipe=RECIPE, original=original, losses=losses, resumes=resumes)


@pytest.fixture
def source(tiny):
    return tiny.Source()


@pytest.fixture
def builds(monkeypatch):
    """(layer, dtype) of every effective weight that is built, in order."""
    seen, real = [], BoundedLinear.effective_weight

    def noted(self, dtype):
        seen.append((id(self), dtype))
        return real(self, dtype)

    monkeypatch.setattr(BoundedLinear, "effective_weight", noted)
    return seen


@pytest.fixture
def line():
    """A linear model in float64, and a batch of each part."""
    model = nn.Linear(3, 4).double()
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(values_of(*parameter.shape, seed=seed, scale=0.5))
    batches = {
        part: Batch({"x": values_of(5, 3, seed=seed)}, torch.arange(5) % 4, torch.arange(5))
        for seed, part in enumerate(("forget", "retain"), start=7)
    }
    return model, batches
