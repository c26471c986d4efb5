"""Boundary Expand: push forget data into a class of their own, then drop it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stable_forgetting.common.base.numbers import Count, Positive
from stable_forgetting.common.methods.base import MethodInfo, UnlearningMethod
from stable_forgetting.common.train.config import FitConfig

if TYPE_CHECKING:
    from torch import nn

    from stable_forgetting.common.methods.task import UnlearnTask


class BoundaryExpand(UnlearningMethod):
    """Boundary Expand: add a shadow class, train forget data into it, drop its row again.

    Formula: widen the head by one row (drawn anew); minimise CE(f(x), C) for x in D_f, where C
    is the new class; remove the row.  Never reads retain data.  SalUn's port leaves the row.

    Source: Chen et al. 2023, arXiv 2303.11570; its repository (10 epochs of SGD, lr 1e-5).  Sweep
    lr.
    """

    info = MethodInfo(1, "Chen et al. 2023 (arXiv 2303.11570)", frozenset({"forget"}))

    class Config(FitConfig):
        epochs: Count | None = 10
        batch_size: Count = 64
        lr: Positive = 1e-5

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Widens, trains, narrows."""
        from stable_forgetting.common.methods.tools.heads import head_name, narrow_head, widen_head
        from stable_forgetting.common.methods.tools.objectives import ToOneClass

        config: Any = self.config
        name = head_name(task)
        widen_head(task.model, name, task.generator("shadow class"))
        engine = FitConfig.of(config)
        loaders = task.loaders(["forget"], engine)
        task.fit(task.model, ToOneClass(task.family.num_classes), loaders, engine)
        narrow_head(task.model, name, task.family.num_classes)
        return task.model
