"""Methods with teachers: Bad Teacher; SCRUB and SCRUB+R."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from stable_forgetting.common import data, objectives
from stable_forgetting.common.base.numbers import Amount, Count, NonNegative, Positive
from stable_forgetting.common.methods import tools
from stable_forgetting.common.methods.base import BOTH, MethodInfo
from stable_forgetting.common.methods.gradient import AdaptedMethod, GradientMethod, ShortConfig
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.train.config import FitConfig

if TYPE_CHECKING:
    from torch import nn

    from stable_forgetting.common.train.protocols import AfterStep, Stateful


class BadTeacher(GradientMethod):
    """Bad Teacher: distil an untrained model on forget and Original on retain.

    Formula: with l = 1 on D_f and 0 on D_r, over shuffled D_f u D_r,
        minimise mean over samples of KL( l softmax(t_b/T) + (1-l) softmax(t_c/T) || softmax(s/T) )
    t_c is Original; t_b is the model before any training (with pretrained weights: those, under a
    new head); neither is trained.  The mean is over samples only, not over classes too.

    Source: Chundawat et al. 2023, arXiv 2205.08096; its repository and SSD's, whose settings for a
    ViT are the default: Adam at 1e-4, a constant rate, no weight decay (AdamW without decay is
    Adam), .3 of the retain set, drawn once (``retain_share``).  They make one pass with batches of
    128 (preset ``repository_vit``); the default is ours, three with 64, as small sets have few
    batches.  Their KL is averaged over classes, too, which Adam's rate does not feel.
    """

    info = MethodInfo(2, "Chundawat et al. 2023 (arXiv 2205.08096)", BOTH | {"initial"})

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "repository_vit": {"epochs": 1, "batch_size": 128},
    }

    class Config(ShortConfig):
        """Settings of Bad Teacher.

        Attributes:
            temperature: Divides all logits before the softmax; 1, as published.
            retain_share: Share of the retain set that is distilled, drawn once; .3, as published.
                An epoch is a pass over it and the forget set, so that a budget of 8 passes reads
                2.4 times the retain set.  A report's retain passes are what was read.
        """

        weight_decay: NonNegative = 0.0
        schedule: Literal["constant", "linear", "cosine"] = "constant"
        temperature: Positive = 1.0
        retain_share: Annotated[float, Field(gt=0, le=1)] = 0.3

    def prepare(self, task: UnlearnTask) -> objectives.Objective:
        """Distillation from both teachers."""
        untrained = task.fresh_model().requires_grad_(False).eval()
        return tools.TwoTeachers(
            task.reference(),
            lambda batch: task.forward(untrained, batch),
            tools.members_of(task.indices("forget")),
            self.config.temperature,
        )

    def loaders(
        self, task: UnlearnTask, parts: Sequence[str], config: FitConfig
    ) -> dict[str, data.Loader]:
        """One shuffled stream over the forget set and a share of the retain set."""
        count = max(1, round(self.config.retain_share * len(task.indices("retain"))))
        chosen = task.drawn("retain", count, "retain share")
        indices = np.sort(np.concatenate([task.indices("forget"), chosen]))
        stream = task.generator("batches", "mixed")
        return {"mixed": data.Loader(task.source, indices, config.micro_batch, stream)}


PAPER = "Kurmanji et al. 2023 (arXiv 2302.09880)"
IN_STEPS = {
    "warmup_epochs": "give warmup_steps",
    "evaluate_epochs": "give evaluate_every, in steps",
    "min_epochs": "leave it out",
}
"""What SCRUB takes in steps alone: its first epochs have two passes, the others one."""


class Scrub(AdaptedMethod):
    """SCRUB: alternate passes away from Original on forget and towards it on retain.

    Formula: t = Original (frozen, eval mode), s = the model, T = ``temperature``,
        KL_T = T^2 mean over samples of sum_c t_c log(t_c / s_c), both softened by T
        for e in 1..epochs:
            if e <= max_epochs:  a pass over D_f: step(-KL_T)
            a pass over D_r: step(gamma CE + alpha KL_T)
    One optimizer for all passes.  The student is the teacher at first, unless a dropout sets them
    apart, and there KL is least: the first step's gradient is rounding, which Adam scales up, so
    that processors that round otherwise leave in other directions.

    Source: Kurmanji et al. 2023, arXiv 2302.09880; its repository (gamma 0.99, alpha 0.001, T 4,
    2 passes on forget; lr 5e-4, 6 to 10 epochs).  Sweep lr, ``max_epochs`` and alpha.
    """

    info = MethodInfo(2, PAPER, BOTH)

    class Config(ShortConfig):
        """Settings of SCRUB.

        Attributes:
            max_epochs: Passes over the forget set, one in each of the first epochs; 2, as
                published.
            forget_batch_size: Forget samples per step; 64, as those of retain.
            temperature: Divides the logits of teacher and student; 4, as published.
            gamma: Weight of the cross-entropy on retain; .99, as published.
            alpha: Weight of the divergence from Original on retain; .001, as published.
        """

        epochs: Count | None = 5
        max_epochs: Amount = 2
        forget_batch_size: Count = 64
        temperature: Positive = 4.0
        gamma: NonNegative = 0.99
        alpha: NonNegative = 0.001

        @model_validator(mode="after")
        def _counts_epochs(self) -> Scrub.Config:
            if self.epochs is None:
                raise ValueError("steps: this method alternates whole passes; give epochs")
            for name, mend in IN_STEPS.items():
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}: this method's epochs differ in length; {mend}")
            return self

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Runs the passes as one training run."""
        self._run(task)
        return task.model

    def _run(
        self,
        task: UnlearnTask,
        *,
        loader: data.ChainedLoader | None = None,
        after_step: Sequence[AfterStep] = (),
        stateful: dict[str, Stateful] | None = None,
    ) -> None:
        config: Any = self.config
        objective = tools.Scrubbing(
            task.reference(),
            tools.members_of(task.indices("forget")),
            temperature=config.temperature,
            gamma=config.gamma,
            alpha=config.alpha,
        )
        self._attach(task)
        task.fit(
            task.model,
            objective,
            {"turns": loader or self._passes(task)},
            config.engine().model_copy(update={"epochs": 1}),
            stateful=stateful,
            **self._constraints(*after_step),
        )

    def _passes(self, task: UnlearnTask) -> data.ChainedLoader:
        config: Any = self.config
        forget = task.loader(
            "forget", batch_size=max(1, config.forget_batch_size // config.accumulation)
        )
        retain = task.loader("retain", batch_size=config.micro_batch)
        away = min(config.max_epochs, config.epochs)
        turns = [forget, retain] * away + [retain] * (config.epochs - away)
        return data.ChainedLoader(turns, repeat=config.accumulation)


class ScrubRewind(Scrub):
    """SCRUB+R: SCRUB, rewound to the pass after which forget data look like unseen data.

    Formula: that of SCRUB, then a choice.  After the last pass, the reference is the
    model's error on held-out data with the forget set's class shares: sum over classes c of
    share_c(D_f) * error_c(held out).  Of the models at the end of each epoch the one whose error
    on D_f is closest to the reference is returned; of equals the latest.  Errors are taken in eval
    mode without augmentation.

    Reads the validation data (and their forgotten classes in class forgetting), which tuning
    selects on as well: choose its hyperparameters on other data, or say so beside the number.

    Source: Kurmanji et al. 2023, arXiv 2302.09880, "rewinding".
    """

    info = MethodInfo(2, PAPER, BOTH | {"validation", "validation_forget"})

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Keeps the weights after every epoch, then chooses."""
        loader = self._passes(task)
        rewind = tools.Rewind(task, loader, self._ends(loader))
        self._run(task, loader=loader, after_step=[rewind], stateful={"rewind": rewind})
        rewind.choose()
        return task.model

    def _ends(self, loader: data.ChainedLoader) -> list[int]:
        """Batches until the end of each epoch: of each pass over retain, the last loader."""
        ends, batches = [], 0
        for part in loader.loaders:
            batches += loader.batches_of(part)
            if part is loader.loaders[-1]:
                ends.append(batches)
        return ends
