"""Attacks on a user's model: ``unlearn attack --model``, and ``relearn`` after an application."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stable_forgetting.benchmarks.apply.work import benchmark_of
from stable_forgetting.benchmarks.audits.derive import AuditTable
from stable_forgetting.common.audits.base import AuditTask, ModelAudit
from stable_forgetting.common.audits.recovery import RelearnTime
from stable_forgetting.common.base.seeding import make_deterministic
from stable_forgetting.common.protocol.benchmark import check_device, pick_device
from stable_forgetting.common.protocol.given import Application, GivenBenchmark
from stable_forgetting.common.train.config import FitConfig

if TYPE_CHECKING:
    from torch import nn

LR = 1e-4
"""Of AdamW on all weights."""
CONFIG = RelearnTime.Config(batch_size=16)
BATCH = 32


def attack_given(
    models: Mapping[str, Path],
    samples: Mapping[str, Any],
    attacks: Mapping[str, ModelAudit],
    *,
    device: str = "auto",
    threads: int = 1,
) -> list[AuditTable]:
    """A table per attack.

    Args:
        models: Label -> folder, file or hub id; the first one is the model, ``original`` and
            ``retrain`` stand beside it.
        samples: Role (``forget``, ``retain``, ``test``) -> path.
        attacks: By name.
        device: Of torch.
        threads: Of torch.
    """
    import torch

    device = pick_device(device)
    check_device(device)
    make_deterministic(threads)
    given = {}
    for label, path in models.items():
        about = Application(model=path, method="original", device=device, **samples)
        given[label] = benchmark_of(about)
        given[label].prepare(torch.device(device), [])
    original = given["original"].original
    tables = [AuditTable(name, attack) for name, attack in attacks.items()]
    for label, benchmark in given.items():
        task = _task(benchmark, benchmark.original, original)
        other = "retrain-2" if label == "retrain" else "retrain"
        if other in given:
            task = replace(task, load_reference=partial(getattr, given[other], "original"))
        for table, attack in zip(tables, attacks.values(), strict=True):
            attack.parts = benchmark.part_table
            table.put(label, 0, partial(attack.measure, task))
    for table in tables:
        table.relate("retrain")
    return tables


def relearned(benchmark: GivenBenchmark, model: nn.Module) -> dict[str, Any]:
    """Steps until a copy is as right on the forget data as ``share`` of the given model."""
    task = _task(benchmark, model, benchmark.original)
    settings = {"lr": LR, "batch_size": CONFIG.batch_size, "share": CONFIG.share}
    settings |= {"max_steps": CONFIG.max_steps}
    return {"relearn": {**RelearnTime(CONFIG).measure(task)["steps"].to_json(), **settings}}


def _task(benchmark: GivenBenchmark, model: nn.Module, original: nn.Module) -> AuditTask:
    """What an attack is given of a user's model, of which copies are trained."""
    seed = benchmark.config.seed
    return AuditTask(
        load=lambda: copy.deepcopy(model),
        load_original=lambda: original,
        adapted=False,
        source=benchmark.source,
        split=benchmark.split(seed),
        family=benchmark,
        collect=benchmark.collect,
        features=None,
        recipe=FitConfig(steps=CONFIG.max_steps, lr=LR),
        batch_size=BATCH,
        seed=seed,
    )
