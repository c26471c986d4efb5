"""``unlearn attack --model``: attacks on a user's model, beside the models that it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from stable_forgetting.benchmarks.apply.work import attack_task, benchmark_of
from stable_forgetting.common.audits.base import Measures, ModelAudit, NotApplicable
from stable_forgetting.common.base.errors import Diverged
from stable_forgetting.common.base.seeding import make_deterministic
from stable_forgetting.common.protocol.benchmark import check_device, pick_device
from stable_forgetting.common.protocol.given import Application

Cell = Measures | str


@dataclass(frozen=True)
class Suspects:
    """What is attacked, and with what.

    Attributes:
        models: Label -> folder, file or hub id; the first one is the model, ``original`` and
            ``retrain`` stand beside it.
        samples: Role (``forget``, ``retain``, ``test``) -> path.
    """

    models: Mapping[str, Path]
    samples: Mapping[str, Path]
    device: str = "auto"
    threads: int = 1


def attack_given(
    suspects: Suspects, attacks: Mapping[str, ModelAudit]
) -> dict[str, dict[str, Cell]]:
    """Attack -> label -> what it measures of the model, or why it measures nothing.

    Raises:
        UserError: A model or samples can be mended.
    """
    import torch

    device = pick_device(suspects.device)
    check_device(device)
    make_deterministic(suspects.threads)
    given = {}
    for label, path in suspects.models.items():
        samples: dict[str, Any] = dict(suspects.samples)
        about = Application(model=path, method="original", device=device, **samples)
        given[label] = benchmark_of(about)
        given[label].prepare(torch.device(device), [])
    original = given["original"].original
    found: dict[str, dict[str, Cell]] = {name: {} for name in attacks}
    for label, benchmark in given.items():
        task = attack_task(benchmark, benchmark.original, original)
        other = "retrain-2" if label == "retrain" else "retrain"
        if other in given:
            task = replace(task, load_reference=partial(getattr, given[other], "original"))
        for name, attack in attacks.items():
            attack.parts = benchmark.part_table
            try:
                found[name][label] = attack.measure(task)
            except NotApplicable as error:
                found[name][label] = error.reason
            except Diverged as error:
                found[name][label] = str(error)
    for name, cells in found.items():
        target = cells.get("retrain")
        for label, cell in cells.items():
            if label != "retrain" and isinstance(cell, dict) and isinstance(target, dict):
                cells[label] = {**cell, **attacks[name].relate(cell, target)}
    return found
