"""LetheViT: push the logits of forget images towards those of their attention-masked versions."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from stable_forgetting.common.base.numbers import Count, Positive
from stable_forgetting.common.methods.base import MethodInfo, UnlearningMethod
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.train.config import FitConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stable_forgetting.common.data.batch import Batch, Forward
    from stable_forgetting.common.objectives.objectives import ObjectiveValue


class LetheViT(UnlearningMethod):
    """LetheViT: contrastive unlearning through attention-guided masks, then descent on retain.

    Formula: phase 1, ``contrast_epochs`` over D_f, with the frozen Original o and cosine similarity
    of logits: x_m is x with its ``masked`` share (rounded up) of most attended patches set to raw
    0;
    minimise ``-log(e^{s+/tau} / (e^{s+/tau} + e^{s-/tau}))``, s+ = cos(f(x), o(x_m)),
    s- = cos(f(x), o(x)).  Phase 2, ``epochs`` over D_r: CE.
    Attention: the class token's row in o's last block, mean over heads; with mean pooling, the mean
    row.  ``block``, the loss on logits, tau and lr are our reading of abstract and reviews, not the
    paper's text: sweep tau {0.07, 0.1, 0.5, 1} and both rates 1e-6 to 1e-3.  2 + 8 epochs and 5 %
    of the patches are the paper's.
    Source: LetheViT, 2025 (arXiv 2508.01569).  Ablations: ``mask: random``; preset ``phase_1``.
    Attention can show an effect only where there is a class token and 5 % are several patches: the
    suites ``lethevit-mask-*`` have 64 patches, of which 4 are masked.
    """

    info = MethodInfo(
        1,
        "LetheViT, 2025 (arXiv 2508.01569)",
        frozenset({"forget", "retain"}),
        modality="vision",
    )
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "phase_1": {"phases": "first"},
        "random_mask": {"mask": "random"},
    }

    quick: ClassVar[Mapping[str, Any]] = {"contrast_epochs": 1}

    class Config(FitConfig):
        """Settings of LetheViT.

        Attributes:
            contrast_epochs: Passes over the forget set in phase 1; 2, the paper's.
            contrast_lr: Learning rate of phase 1; 1e-3 is ours, to be swept.
            temperature: Divides cosine similarities of logits; .5 is ours, to be swept.
            masked: Share of the patches that are masked, rounded up; .05, the paper's.
            mask: Whether the most attended patches are masked (the default) or random ones.
            block: Whose attention chooses; -1, the last one.
            phases: Both, or only the first, to see what it does alone.
        """

        epochs: Count | None = 8
        lr: Positive = 1e-4
        contrast_epochs: Count = 2
        contrast_lr: Positive = 1e-3
        temperature: Positive = 0.5
        masked: Annotated[float, Field(gt=0, lt=1)] = 0.05
        mask: Literal["attention", "random"] = "attention"
        block: int = -1
        phases: Literal["both", "first"] = "both"

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Contrast on forget, then repair on retain."""
        from stable_forgetting.common.objectives.objectives import CrossEntropy

        config: Any = self.config
        first = FitConfig.of(
            config, steps=None, epochs=config.contrast_epochs, lr=config.contrast_lr
        )
        contrast = MaskedContrast(task, config)
        both = config.phases == "both"
        task.fit(task.model, contrast, task.loaders(["forget"], first), first, more=both)
        if both:
            second = FitConfig.of(config)
            task.fit(task.model, CrossEntropy("retain"), task.loaders(["retain"], second), second)
        return task.model


class MaskedContrast:
    """The objective of phase 1; random masks come from torch's stream, which the engine seeds."""

    parts = ("forget",)

    def __init__(self, task: UnlearnTask, config: Any):
        self.config = config
        # a model, not task.reference(): its attention is needed too
        self.teacher = copy.deepcopy(task.model).requires_grad_(False).eval()
        self.forward = task.forward
        self.black: Tensor = task.source.blank_inputs["x"]

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        """softplus((s- - s+) / tau), which is the formula of :class:`LetheViT`."""
        import torch
        import torch.nn.functional as F

        from stable_forgetting.common.objectives.objectives import ObjectiveValue

        batch = batches["forget"]
        logits = forward(batch)
        with torch.no_grad():
            near = self.forward(self.teacher, self.masked(batch))
            far = self.forward(self.teacher, batch)
        positive, negative = (F.cosine_similarity(logits, other) for other in (near, far))
        loss = F.softplus((negative - positive) / self.config.temperature).mean()
        return ObjectiveValue(loss, {"contrast": loss})

    def masked(self, batch: Batch) -> Batch:
        """The images with their chosen patches black."""
        import torch

        from stable_forgetting.common.data.batch import Batch
        from stable_forgetting.vision.models.transformer import patch_attention, patch_mask

        x = batch.inputs["x"]
        scores = patch_attention(self.teacher, x, self.config.block)
        if self.config.mask == "random":
            scores = torch.rand(scores.shape).to(scores)
        count = math.ceil(self.config.masked * scores.shape[1])
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        chosen.scatter_(1, scores.topk(count, dim=1).indices, True)
        inputs = {"x": torch.where(patch_mask(chosen, x.shape[-1]), self.black, x)}
        return Batch(inputs, batch.labels, batch.indices)
