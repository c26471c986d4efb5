"""NOVO: a classifier trained with one key per class, which forgets a class with its key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.numbers import NonNegative, Positive
from stable_forgetting.common.methods.base import MethodInfo, UnlearningMethod
from stable_forgetting.common.methods.task import UnlearnTask

if TYPE_CHECKING:
    from torch import nn

    from stable_forgetting.common.data.batch import Batch, Forward
    from stable_forgetting.common.objectives.objectives import ObjectiveValue
    from stable_forgetting.vision.models.transformer import KeyedViT


class Novo(UnlearningMethod):
    """NOVO, our reading: train a ViT with one key per class, then delete the forgotten ones.

    Not a repair of Original: the method trains its own model (from Original's start, with its
    recipe, on all data), and deleting keys takes no step.  Each step hides every class with
    probability ``hide``, at random; only the keys of the others are given to the network.
    Formula: minimise ``CE`` on images of the shown classes ``+ beta KL(uniform || softmax f)`` on
    those of hidden ones.  Whole classes only.
    Source: NOVO, 2025 (arXiv 2507.03281), from its abstract.  hide, beta and where keys enter are
    ours: the sum of the shown keys, over sqrt(C), is added to the position embedding of every
    token, so that keys fold into the weights and the architecture stays the same.  Sweep hide {0.1,
    0.2, 0.5}, beta {0.5, 1, 2}.
    """

    info = MethodInfo(
        1,
        "NOVO, 2025 (arXiv 2507.03281)",
        frozenset({"forget", "retain", "initial"}),
        scenarios=frozenset({"class"}),
        modality="vision",
        reading=True,
    )

    class Config(Strict):
        """Settings of NOVO.

        Attributes:
            beta: Weight of the divergence from uniform on images of hidden classes; 1 is ours.
            hide: Chance that a step hides a class; .2 is ours.
            key_std: Standard deviation of the keys' entries at the start; .5 is ours.
        """

        beta: NonNegative = 1.0
        hide: Annotated[float, Field(gt=0, lt=1)] = 0.2
        key_std: Positive = 0.5

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Trains the ready model, deletes keys, folds the rest into the weights."""
        from stable_forgetting.common.data.batch import forgotten_classes
        from stable_forgetting.common.data.loader import Loader
        from stable_forgetting.vision.models.transformer import KeyedViT

        config: Any = self.config
        forget, retain = task.indices("forget"), task.indices("retain")
        gone = forgotten_classes(task.source, forget, retain)
        if not gone:
            raise ConfigError("novo forgets whole classes only; remove the row")
        keyed = KeyedViT(task.fresh_model(), task.family.num_classes)
        keyed.draw(config.key_std, task.generator("keys"))
        everything = task.indices("forget", "retain")
        stream = task.generator("train")
        loader = Loader(task.source, everything, task.recipe.micro_batch, stream)
        objective = ProxyForgetting(keyed, beta=config.beta, hide=config.hide)
        task.fit(keyed, objective, {"train": loader}, task.recipe)
        task.model.load_state_dict(keyed.folded(gone))
        return task.model


class ProxyForgetting:
    """Learn the classes whose keys are shown, know nothing of the others.

    The draw comes from torch's stream, which the engine seeds and checkpoints.
    """

    parts = ("train",)

    def __init__(self, keyed: KeyedViT, *, beta: float, hide: float):
        self.keyed, self.beta, self.hide = keyed, beta, hide

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        """Cross-entropy on shown classes and KL to uniform on hidden ones."""

        import torch

        from stable_forgetting.common.objectives.objectives import ObjectiveValue
        from stable_forgetting.common.objectives.positions import wide

        batch = batches["train"]
        shown = torch.rand(self.keyed.num_classes) >= self.hide
        self.keyed.show(shown)
        log_p = wide(forward(batch)).log_softmax(-1)
        visible = shown.to(batch.labels.device)[batch.labels]
        own = -log_p.gather(1, batch.labels.unsqueeze(1)).squeeze(1)
        uniform = -log_p.mean(1) - math.log(log_p.shape[1])
        loss = torch.where(visible, own, 0).sum() / visible.sum().clamp_min(1)
        hidden = torch.where(visible, 0, uniform).sum() / (~visible).sum().clamp_min(1)
        return ObjectiveValue(loss + self.beta * hidden, {"shown_loss": loss, "hidden_kl": hidden})
