"""What tests of the loop share: a sink, a kill, small configs and loaders."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from stable_forgetting.common.data.loader import ChainedLoader, RelabelledLoader
from stable_forgetting.common.train.config import FitConfig

MLP = ("blocks.*.mlp.fc*",)
RETAIN, FORGET = np.arange(0, 32), np.arange(32, 48)


class Sink:
    """Keeps logged scalars."""

    def __init__(self):
        self.rows = {}

    def scalars(self, step, values):
        self.rows[step] = dict(values)

    def rewind(self, step):
        self.rewound = step


class Killed(Exception):
    pass


def kill_at(last):
    def progress(step, total, loss):
        if step == last:
            raise Killed

    return progress


def resumed(run, folder, kill):
    """(model, steps of the rest) of a training that ``kill`` ends and that is run again."""
    path, steps = folder / "checkpoint.safetensors", []
    with pytest.raises(Killed):
        run(checkpoint=path, progress=kill)
    assert list(folder.glob("checkpoint*.safetensors"))
    return run(checkpoint=path, progress=lambda step, *_: steps.append(step)), steps


def small(**fields):
    return FitConfig(**{"steps": 6, "batch_size": 8, "lr": 1e-2, "log_every": 1, **fields})


def cross_entropy(tiny, part):
    def loss_of(model, batches):
        batch = batches[part]
        return nn.functional.cross_entropy(tiny.forward(model, batch), batch.labels)

    return loss_of


def adamw(model, decay):
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.05, fused=True)


def mixed_loaders(tiny, source):
    everything = np.arange(48)
    relabelled = RelabelledLoader(
        tiny.loader(source, everything, 8, "mixed", augment=True), FORGET, tiny.classes
    )
    return {"retain": relabelled}


def chained_loaders(tiny, source):
    forget = RelabelledLoader(
        tiny.loader(source, FORGET, 8, "f", augment=True), FORGET, tiny.classes, exclude_true=True
    )
    return {"retain": ChainedLoader([forget, tiny.loader(source, RETAIN, 8, "r", augment=True)])}


def pair_loaders(tiny, source):
    return {
        "retain": tiny.loader(source, RETAIN, 8, "r", augment=True),
        "forget": tiny.loader(source, FORGET, 8, "f"),
    }


def interrupted(tiny, run, path, **fields):
    with pytest.raises(Killed):
        run(tiny.net(), small(checkpoint_every=2, **fields), checkpoint=path, progress=kill_at(3))


class Noisy:
    """An evaluation that draws from the global stream and looks at the model's mode."""

    def __init__(self, metrics=lambda step: {"forget_prob": 100.0 - step}):
        self.metrics, self.seen = metrics, []

    def __call__(self, model, step):
        assert not any(module.training for module in model.modules())
        torch.rand(3)
        self.seen.append(step)
        return self.metrics(step)
