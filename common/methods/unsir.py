"""UNSIR: learn noise that the forgotten classes hate, train on it, repair."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stable_forgetting.common import data, objectives
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.numbers import Count, NonNegative, Positive
from stable_forgetting.common.methods import tools
from stable_forgetting.common.methods.base import RETAIN, Length, MethodInfo, UnlearningMethod
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.train.config import FitConfig

if TYPE_CHECKING:
    from torch import nn


class Unsir(UnlearningMethod):
    """UNSIR: impair with error-maximising noise, then repair; class forgetting only.

    Formula: for each forgotten class c,
        n_c = ``noise_samples`` inputs from N(0, 1); ``noise_steps`` of Adam(``noise_lr``) on
              -CE(Original(n_c), c) + ``noise_decay`` mean_i ||n_i||^2
        impair: ``epochs`` over shuffled {(n_c, c)} x ``noise_repeats`` u D_r'   with CE
        repair: ``repair_epochs`` over D_r'                                      with CE
    D_r' holds ``retain_per_class`` samples of each retained class.  Each class's noise carries its
    own label (the notebook labels all of it 0).  Never reads forget data: the forgotten classes
    are those that the retain set lacks.

    Source: Tarun et al. 2023, arXiv 2111.08947 (there 20 repeats of 32 noise images, 1000 per
    class); the SSD repository's ViT settings (Adam 1e-4, 25 to 40 noise steps at 0.1, 80 repeats,
    500 per class).
    """

    info = MethodInfo(
        2, "Tarun et al. 2023 (arXiv 2111.08947)", RETAIN, scenarios=frozenset({"class"})
    )

    class Config(FitConfig):
        """Settings of UNSIR.

        Attributes:
            repair_epochs: Passes over retained samples after the impairment; 1, as published.
            noise_samples: Noise inputs per forgotten class; 32, as published.
            noise_steps: Steps of Adam on the noise; 40, of the published 25 to 40.
            noise_lr: Learning rate of the noise; .1, as published.
            noise_decay: Weight of the squared norm of the noise; .1, as published.
            noise_repeats: How often each noise input is in the training set; 20, as published.
            retain_per_class: Samples of each retained class in both phases; 500, as in SSD's
                repository.
        """

        epochs: Count | None = 1
        repair_epochs: Count = 1
        batch_size: Count = 64
        lr: Positive = 1e-4
        noise_samples: Count = 32
        noise_steps: Count = 40
        noise_lr: Positive = 0.1
        noise_decay: NonNegative = 0.1
        noise_repeats: Count = 20
        retain_per_class: Count = 500

    @classmethod
    def within(cls, config: Any, unit: Length, amount: int) -> dict[str, Any]:
        """One pass impairs, the others repair; repair has no length in steps."""
        if unit == "steps" or amount < 2:
            return {}
        return {"epochs": 1, "repair_epochs": amount - 1}

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Noise, impair, repair."""
        config: Any = self.config
        # of all classes: the forget set is not to be read
        classes = range(task.family.num_classes)
        gone = data.unretained_classes(task.source, classes, task.indices("retain"))
        if not gone:
            raise DataError("unsir forgets whole classes, and all are retained; remove the row")
        inputs, labels = tools.learn_noise(
            task,
            gone,
            samples=config.noise_samples,
            config=FitConfig(steps=config.noise_steps, lr=config.noise_lr, loss_cap=1e30),
            decay=config.noise_decay,
        )
        remaining = self._subset(task)
        noisy = np.tile(-1 - np.arange(len(labels)), config.noise_repeats)
        engine = FitConfig.of(config)
        source = tools.WithExtras(task.source, inputs, labels)
        self._fit(task, source, np.concatenate([remaining, noisy]), engine, "impair")
        repair = FitConfig.of(config, steps=None, epochs=config.repair_epochs)
        self._fit(task, source, remaining, repair, "repair")
        return task.model

    def _fit(
        self, task: UnlearnTask, source: Any, indices: np.ndarray, config: FitConfig, phase: str
    ) -> None:
        stream = task.generator("batches", phase)
        loader = data.Loader(source, indices, config.micro_batch, stream)
        more = phase == "impair"
        task.fit(task.model, objectives.CrossEntropy(phase), {phase: loader}, config, more=more)

    def _subset(self, task: UnlearnTask) -> np.ndarray:
        """Sorted indices of at most ``retain_per_class`` random samples of each class."""
        import torch

        labels, indices = tools.labels_of(task, "retain"), task.indices("retain")
        order = torch.randperm(len(labels), generator=task.generator("retain subset"))
        chosen = [
            order[labels[order] == label][: self.config.retain_per_class]
            for label in labels.unique()
        ]
        return np.sort(indices[torch.cat(chosen).numpy()])
