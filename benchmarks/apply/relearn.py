"""How soon fine-tuning on the forget data brings them back."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from stable_forgetting.common.audits.base import AuditTask
from stable_forgetting.common.audits.relearning import RelearnTime
from stable_forgetting.common.data.batch import ordered_batches
from stable_forgetting.common.data.splits import ForgetSplit
from stable_forgetting.common.train.config import FitConfig

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from stable_forgetting.common.measure.scores import Scores
    from stable_forgetting.common.protocol.subject import Subject

LR = 1e-4
"""Of AdamW on all weights."""
CONFIG = RelearnTime.Config(batch_size=16)
BATCH = 32


class _Forget(ForgetSplit):
    """The forget samples alone."""

    def __post_init__(self) -> None:
        """Nothing else is read."""


def relearned(subject: Subject, model: nn.Module) -> dict[str, Any]:
    """Steps until the model is as right on the forget data as ``share`` of the given one.

    Args:
        subject: Loaded.
        model: The unlearned model; copies of it are trained.

    Returns:
        Steps with their range over batch orders, and the settings.
    """

    def collected(trained: nn.Module, indices: np.ndarray) -> Scores:
        from stable_forgetting.common.measure.scores import collect

        trained.eval()
        batches = ordered_batches(subject.source, indices, BATCH)
        return collect(lambda batch: subject.forward(trained, batch), batches, keep_probs=False)

    task = AuditTask(
        load=lambda: copy.deepcopy(model),
        load_original=lambda: subject.original,
        adapted=False,
        source=subject.source,
        split=_Forget("apply", {"forget": subject.parts["forget"]}, subject.source.digest),
        family=subject,
        collect=collected,
        features=None,
        recipe=FitConfig(steps=CONFIG.max_steps, lr=LR),
        batch_size=BATCH,
        seed=subject.application.seed,
    )
    settings = {"lr": LR, "batch_size": CONFIG.batch_size, "share": CONFIG.share}
    settings |= {"max_steps": CONFIG.max_steps}
    return {"relearn": {**RelearnTime(CONFIG).measure(task)["steps"].to_json(), **settings}}
