"""SFR-on: saliency-masked, self-weighted ascent inside a repair on retain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from stable_forgetting.common.base.numbers import Count, NonNegative, Positive
from stable_forgetting.common.methods.base import MethodInfo
from stable_forgetting.common.methods.gradient import AdaptedMethod, ShortConfig
from stable_forgetting.common.methods.simple import BOTH

if TYPE_CHECKING:
    from torch import nn

    from stable_forgetting.common.data.loader import Loader
    from stable_forgetting.common.methods.task import UnlearnTask


class SFRon(AdaptedMethod):
    """SFR-on: forget steps on the weights that forget data own, each followed by retain steps.

    Formula: F_S = mean over batches of S of (grad CE)^2 at Original, in eval mode,
        m = F_f >= ``threshold`` F_r                               entry by entry
        repeat: step on -alpha_t sum_i w_i CE_i over B_f, gradient times m,
                    w_i = CE_i^-lam / sum_j CE_j^-lam (no gradient),  alpha_t = alpha * cosine to 0
                ``retain_steps`` steps on CE(B_r), unmasked
    One optimizer for both.  The gradient norm is clipped at ``max_grad_norm`` in every step (the
    repository clips forget steps only).  Its interpolation of slow weights is off in the released
    configs (weight 1) and left out here.

    Of the newest methods this one is here because it is published with code (NeurIPS 2024), with a
    transformer (Swin-T) among its settings, and sets the ViT defaults that others are run with.

    Source: Huang et al. 2024, arXiv 2409.19732; the Unified-Unlearning-w-Remain-Geometry
    repository (``repository_swin``: its settings for Swin-T on Tiny-ImageNet; ``repository_cnn``:
    for a CNN on CIFAR-10).  The default's alpha 1 is ours, for small models from scratch, and far
    below the published 500 and 25; suites have the preset as a row of its own.  Sweep alpha and lr.
    """

    info = MethodInfo(1, "Huang et al. 2024 (arXiv 2409.19732)", BOTH)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "repository_swin": {"lr": 2e-5, "steps": 1000, "alpha": 500.0, "batch_size": 128},
        "repository_cnn": {
            "optimizer": "sgd",
            "momentum": 0.9,
            "weight_decay": 5e-4,
            "lr": 0.01,
            "steps": 1800,
            "alpha": 25.0,
            "retain_steps": 5,
            "batch_size": 128,
        },
    }

    class Config(ShortConfig):
        """Settings of SFR-on.

        Attributes:
            alpha: Weight of the ascent at its start; 1 is ours, for small models (published: 25 and
                500).
            lam: How much a sample's weight falls with its loss; .5 of the loss's power, 0 for equal
                weights.
            threshold: Least ratio of forget to retain importance of a weight that ascends; 1: no
                less.
            retain_steps: Steps on retain after each forget step; 1, as for the published Swin-T.
        """

        alpha: Positive = 1.0
        lam: NonNegative = 0.5
        threshold: NonNegative = 1.0
        retain_steps: Count = 1
        max_grad_norm: Positive | None = 7.0

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Masks, then alternates."""
        from stable_forgetting.common.methods.tools.masks import MaskedWeights
        from stable_forgetting.common.methods.tools.objectives import AlternatingAscent
        from stable_forgetting.common.methods.tools.streams import Interleaved
        from stable_forgetting.common.train.rates import total_steps

        config: Any = self.config
        self._attach(task)
        engine = config.engine()
        streams: Mapping[str, Loader] = task.loaders(["forget", "retain"], engine)
        order = [streams["forget"], *[streams["retain"]] * config.retain_steps]
        turns = Interleaved(order, repeat=engine.accumulation)
        batches = total_steps(engine, {"turns": turns}) * engine.accumulation
        objective = AlternatingAscent(turns, batches, alpha=config.alpha, lam=config.lam)
        weights = MaskedWeights(task.model, self._masks(task))
        with weights.gradients(lambda: objective.forgetting):
            self._train(task, objective, {"turns": turns}, config=engine)
        return task.model

    def _masks(self, task: UnlearnTask) -> dict[str, Any]:
        from stable_forgetting.common.methods.tools.passes import batch_fisher

        size = self.config.batch_size
        forget = batch_fisher(task, "forget", batch_size=size)
        retain = batch_fisher(task, "retain", batch_size=size)
        return {name: forget[name] >= self.config.threshold * retain[name] for name in forget}
