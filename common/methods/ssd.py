"""Selective synaptic dampening: shrink the weights that matter more to forget than to the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.numbers import Count, Positive
from stable_forgetting.common.methods.base import MethodInfo, UnlearningMethod
from stable_forgetting.common.methods.simple import BOTH

if TYPE_CHECKING:
    from torch import nn

    from stable_forgetting.common.methods.task import UnlearnTask


class SelectiveSynapticDampening(UnlearningMethod):
    """SSD: dampen weights by their importance to forget against that to all; no training.

    Formula: I_S = mean over batches of S of (grad CE)^2, in eval mode, for S = D_f and
    S = D = D_f u D_r.  Where I_f > alpha I_D: theta <- theta * min(lam I_D / I_f, 1).

    Source: Foster et al. 2024, arXiv 2308.07707; its repository (lam 1; alpha 10 for random
    forgetting and CNNs; for ViTs 5 for whole classes, 25 for subclasses: the presets).

    Which samples share a batch is part of the method, as a batch's mean gradient is squared: size
    and order.  For whole classes the repository reads retain class by class, then forget, and its
    alpha belongs to that: batches of one class make I_D several times larger than mixed ones.
    """

    info = MethodInfo(2, "Foster et al. 2024 (arXiv 2308.07707)", BOTH)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "class": {"alpha": 5.0, "order": "class"},
        "subclass": {"alpha": 25.0},
    }

    class Config(Strict):
        """Settings of SSD.

        Attributes:
            alpha: Ratio of importances from which a weight is dampened; 10, published for random
                forgetting.
            lam: How strongly; 1, as published.
            batch_size: Samples whose mean gradient is squared, which changes the importances; 64,
                as published.
            order: Of the retain samples: shuffled, or class by class as published for whole
                classes.
        """

        alpha: Positive = 10.0
        lam: Positive = 1.0
        batch_size: Count = 64
        order: Literal["shuffled", "class"] = "shuffled"

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Two passes for importances, then one multiplication."""
        import torch

        from stable_forgetting.common.methods.tools.passes import batch_fisher

        config: Any = self.config
        size = config.batch_size
        forget = batch_fisher(task, "forget", batch_size=size)
        everything = batch_fisher(
            task, "forget", "retain", batch_size=size, by_class=config.order == "class"
        )
        with torch.no_grad():
            parameters = dict(task.model.named_parameters())
            for name, mine in forget.items():
                all_, parameter = everything[name], parameters[name]
                factor = (config.lam * all_ / mine.clamp_min(1e-30)).clamp_max(1.0)
                parameter.mul_(torch.where(mine > config.alpha * all_, factor, 1.0))
        return task.model
