"""``relearn`` after an application, and what any attack is given of a user's model."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from stable_forgetting.common.audits.base import AuditTask
from stable_forgetting.common.audits.recovery import RelearnTime
from stable_forgetting.common.protocol.given import GivenBenchmark
from stable_forgetting.common.train.config import FitConfig

if TYPE_CHECKING:
    from torch import nn

LR = 1e-4
"""Of AdamW on all weights."""
CONFIG = RelearnTime.Config(batch_size=16)
BATCH = 32


def relearned(benchmark: GivenBenchmark, model: nn.Module) -> dict[str, Any]:
    """Steps until a copy is as right on the forget data as ``share`` of the given model."""
    task = audit_task(benchmark, model, benchmark.original)
    settings = {"lr": LR, "batch_size": CONFIG.batch_size, "share": CONFIG.share}
    settings |= {"max_steps": CONFIG.max_steps}
    return {"relearn": {**RelearnTime(CONFIG).measure(task)["steps"].to_json(), **settings}}


def audit_task(benchmark: GivenBenchmark, model: nn.Module, original: nn.Module) -> AuditTask:
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
        collect_correct=benchmark.collect_correct,
        features=None,
        recipe=FitConfig(steps=CONFIG.max_steps, lr=LR),
        batch_size=BATCH,
        seed=seed,
    )
