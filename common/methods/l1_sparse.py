"""l1-sparse: fine-tuning that prunes on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stable_forgetting.common.base.numbers import Count, NonNegative, Positive
from stable_forgetting.common.methods.base import MethodInfo, UnlearningMethod
from stable_forgetting.common.train.config import FitConfig

if TYPE_CHECKING:
    from torch import nn

    from stable_forgetting.common.methods.task import UnlearnTask


class L1Sparse(UnlearningMethod):
    """l1-sparse: keep training on retain under an l1 penalty that fades out.

    Formula: minimise CE(B_r) + a_e ||theta||_1 with a_e = a max(0, 1 - e / E) in epoch e of E (from
    0); the norm runs over all parameters, norms and biases included.  All parameters are trained.

    Source: Jia et al. 2023, arXiv 2304.04934; the Unlearn-Sparse repository (there SGD, lr 0.01,
    10 epochs, no epochs without the penalty; ``a`` from 1e-6 to 1e-4).  Deviation: AdamW, under
    which ``a`` is another quantity.  Where CE has no gradient left, Adam makes a whole step of any
    penalty, and beyond some ``a`` a larger one changes nothing.  A small ViT on digits, default
    length and rate: the norm falls by 0.5, 5, 15 and 17 % for ``a`` 1e-6, 1e-5, 1e-4 and 1e-3.
    So sweep ``a`` from 1e-7 to 1e-4, and lr.
    """

    info = MethodInfo(1, "Jia et al. 2023 (arXiv 2304.04934)", frozenset({"retain"}))

    class Config(FitConfig):
        """Settings of l1-sparse.

        Attributes:
            a: Weight of the l1 norm in the first epoch; 1e-5, the middle of the published range.
        """

        epochs: Count | None = 3
        batch_size: Count = 64
        lr: Positive = 1e-4
        a: NonNegative = 1e-5

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Fine-tunes with the fading penalty."""
        import torch

        from stable_forgetting.common.objectives.objectives import CrossEntropy
        from stable_forgetting.common.train.rates import total_steps

        config: Any = self.config
        engine = FitConfig.of(config)
        loader = task.loaders(["retain"], engine)["retain"]
        batches = total_steps(engine, {"retain": loader}) * engine.accumulation
        epochs = max(1, round(batches / loader.batches_per_epoch))

        def penalty(model: nn.Module) -> torch.Tensor:
            weight: float = config.a * max(0.0, 1 - loader.epoch / epochs)
            norm = torch.stack([p.abs().sum() for p in model.parameters()]).sum()
            return weight * norm

        objective = CrossEntropy("retain", engine.average)
        task.fit(task.model, objective, {"retain": loader}, engine, penalty=penalty)
        return task.model
