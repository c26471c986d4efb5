"""Methods that look into a vision transformer: LetheViT at its attention, NOVO with class keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from stable_forgetting.common import data, objectives
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.numbers import Count, NonNegative, Positive
from stable_forgetting.common.methods.base import BOTH, MethodInfo, UnlearningMethod
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.train.config import FitConfig

if TYPE_CHECKING:
    from torch import nn


class LetheViT(UnlearningMethod):
    """LetheViT: contrastive unlearning through attention-guided masks, then descent on retain.

    Formula: phase 1, ``contrast_epochs`` over D_f, with the frozen Original o and cosine similarity
    of logits: x_m is x with its ``masked`` share (rounded up) of most attended patches set to raw
    0; minimise ``-log(e^{s+/tau} / (e^{s+/tau} + e^{s-/tau}))``, s+ = cos(f(x), o(x_m)),
    s- = cos(f(x), o(x)).  Phase 2, ``epochs`` over D_r: CE.
    Attention: the class token's row in o's last block, mean over heads; with mean pooling, the mean
    row.  ``block``, the loss on logits, tau and lr are our reading of abstract and reviews, not the
    paper's text: sweep tau {0.07, 0.1, 0.5, 1} and both rates 1e-6 to 1e-3.  2 + 8 epochs and 5 %
    of the patches are the paper's.
    Source: LetheViT, 2025 (arXiv 2508.01569).  Ablations: ``mask: random``; preset ``phase_1``.
    Attention can show an effect only where there is a class token and 5 % are several patches: the
    suites ``lethevit-mask-*`` have 64 patches, of which 4 are masked.
    """

    info = MethodInfo(2, "LetheViT, 2025 (arXiv 2508.01569)", BOTH, modality="vision")
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "phase_1": {"phases": "first"},
        "random_mask": {"mask": "random"},
    }

    quick: ClassVar[Mapping[str, Any]] = {"contrast_epochs": 1}

    class Config(FitConfig):
        """Settings of LetheViT.

        Attributes:
            contrast_epochs: Passes over the forget set in phase 1; 2, the paper's.
            contrast_lr: Learning rate of phase 1.
            temperature: Divides cosine similarities of logits.
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
        from stable_forgetting.vision.methods.transformer import MaskedContrast

        config: Any = self.config
        first = FitConfig.of(
            config, steps=None, epochs=config.contrast_epochs, lr=config.contrast_lr
        )
        contrast = MaskedContrast(task, config)
        both = config.phases == "both"
        task.train(contrast, first, more=both)
        if both:
            task.train(objectives.CrossEntropy("retain"), FitConfig.of(config))
        return task.model


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
        BOTH | {"initial"},
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
        from stable_forgetting.vision.methods.transformer import KeyedViT, ProxyForgetting

        config: Any = self.config
        forget, retain = task.indices("forget"), task.indices("retain")
        gone = data.forgotten_classes(task.source, forget, retain)
        if not gone:
            raise ConfigError("novo forgets whole classes only; remove the row")
        keyed = KeyedViT(task.fresh_model(), task.family.num_classes)
        keyed.draw(config.key_std, task.generator("keys"))
        everything = task.indices("forget", "retain")
        stream = task.generator("train")
        loader = data.Loader(task.source, everything, task.recipe.micro_batch, stream)
        objective = ProxyForgetting(keyed, beta=config.beta, hide=config.hide)
        rates = {f"net.{pattern}": rate for pattern, rate in task.recipe.lr_of.items()}
        recipe = task.recipe.model_copy(update={"lr_of": rates})
        task.fit(keyed, objective, {"train": loader}, recipe)
        task.model.load_state_dict(keyed.folded(gone))
        return task.model
