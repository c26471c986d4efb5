"""Attacks on a user's model: ``unlearn attack --model``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from stable_forgetting.benchmarks.apply.relearn import audit_task
from stable_forgetting.benchmarks.apply.work import benchmark_of
from stable_forgetting.benchmarks.audits.derive import AuditTable
from stable_forgetting.common.audits.base import ModelAudit
from stable_forgetting.common.base.seeding import make_deterministic
from stable_forgetting.common.protocol.benchmark import check_device, pick_device
from stable_forgetting.common.protocol.given import Application


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
        task = audit_task(benchmark, benchmark.original, original)
        other = "retrain-2" if label == "retrain" else "retrain"
        if other in given:
            task = replace(task, load_reference=partial(getattr, given[other], "original"))
        for table, attack in zip(tables, attacks.values(), strict=True):
            attack.parts = benchmark.part_table
            table.put(label, 0, partial(attack.measure, task))
    for table in tables:
        table.relate("retrain")
    return tables
