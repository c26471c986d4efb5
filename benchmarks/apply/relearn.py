"""How soon fine-tuning on the forget data brings them back."""

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
    """Steps until the model is as right on the forget data as ``share`` of the given one.

    Args:
        benchmark: Prepared.
        model: The unlearned model; copies of it are trained.

    Returns:
        Steps with their range over batch orders, and the settings.
    """
    seed = benchmark.config.seed
    task = AuditTask(
        load=lambda: copy.deepcopy(model),
        load_original=lambda: benchmark.original,
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
    settings = {"lr": LR, "batch_size": CONFIG.batch_size, "share": CONFIG.share}
    settings |= {"max_steps": CONFIG.max_steps}
    return {"relearn": {**RelearnTime(CONFIG).measure(task)["steps"].to_json(), **settings}}
