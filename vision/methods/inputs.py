"""Methods that change inputs or look at slopes by the input: AMUN, MU-Mis, JiT, NatMU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from stable_forgetting.common import data, objectives
from stable_forgetting.common.base.numbers import Count, NonNegative, Positive
from stable_forgetting.common.methods.base import BOTH, FORGET, MethodInfo, UnlearningMethod
from stable_forgetting.common.methods.gradient import AdaptedMethod, GradientMethod, ShortConfig
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.train.config import FitConfig, Optimizer

if TYPE_CHECKING:
    from torch import nn


class AMUN(GradientMethod):
    """AMUN: train on the nearest adversarial examples of the forget set, with the labels they get.

    Formula: x' = x moved along grad_x CE(O(x), y) of length 1, in ``attack_steps`` steps of
    radius / attack_steps; the radius is doubled from ``radius`` on until argmax O(x') != y, at most
    ``doublings`` times; minimise CE(f(x'), argmax O(x')) + w_r CE(B_r), O = Original, frozen.
    Source: Ebrahimpour-Boroojeny et al. 2025 (arXiv 2503.00917, ICML); its algorithm 1 searches
    the radius in this way.
    """

    info = MethodInfo(
        1, "AMUN, Ebrahimpour-Boroojeny et al. 2025 (arXiv 2503.00917)", BOTH, modality="vision"
    )

    class Config(ShortConfig):
        """Settings of AMUN.

        Attributes:
            radius: First length of the move, in units of the model's input; .5 is ours.
            doublings: How often the length may be doubled; 6 is ours.
            attack_steps: Steps of a move; 5 is ours.
            retain_weight: Factor of the retain term; 1, torchunlearn's.
        """

        epochs_of: str | None = "retain"
        radius: Positive = 0.5
        doublings: Count = 6
        attack_steps: Count = 5
        retain_weight: NonNegative = 1.0

    def prepare(self, task: UnlearnTask) -> objectives.Objective:
        """Cross-entropy on the adversarial examples and on retain."""
        from stable_forgetting.vision.methods.adversarial import Adversarial

        config: Any = self.config
        return Adversarial(
            task.forward,
            task.frozen_copy(),
            config.radius,
            config.doublings,
            config.attack_steps,
            config.retain_weight,
        )


class MUMis(UnlearningMethod):
    """MU-Mis: make the true logit as insensitive to the input as another one; forget data alone.

    Formula: minimise mean over B_f of ||grad_x z_y||^2 - w ||grad_x z_c||^2, c a random other class
    of each sample and step.  It takes second derivatives, which the bounded layer does not have.
    Source: Cheng et al. 2024 (arXiv 2402.15109); Harry24k/machine-unlearning-pytorch (mumis.py).
    """

    info = MethodInfo(1, "MU-Mis, Cheng et al. 2024 (arXiv 2402.15109)", FORGET, modality="vision")

    class Config(FitConfig):
        """Settings of MU-Mis.

        Attributes:
            other_weight: Weight of the other logit's sensitivity; 1, as published.
        """

        epochs: Count | None = 5
        batch_size: Count = 64
        lr: Positive = 1e-4
        other_weight: NonNegative = 1.0

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Trains on the difference of the two sensitivities."""
        from stable_forgetting.vision.methods.adversarial import Sensitivity

        task.train(Sensitivity(self.config.other_weight), FitConfig.of(self.config))
        return task.model


class JiT(GradientMethod):
    """JiT: makes the model as flat as it can be around each forgotten image; forget data alone.

    Formula: minimise mean over B_f and k = 1 ... ``samples`` of ||f(x) - f(x + n_k)|| / ||n_k||, f
    the logits, n_k ~ N(0, noise^2) in every pixel, x + n_k clipped to the values that the batch
    has, and f(x + n_k) without gradient.  The published code sums over the batch, so its rates are
    those of sums: .1 to 1.5 for a ViT, one pass of SGD with batches of 128.
    Source: Foster et al. 2024 (arXiv 2402.01401); jwf40/Information-Theoretic-Unlearning
    (src/lipschitz.py).
    """

    info = MethodInfo(1, "JiT, Foster et al. 2024 (arXiv 2402.01401)", FORGET, modality="vision")

    class Config(ShortConfig):
        """Settings of JiT.

        Attributes:
            samples: Noises per image and step; 25, the code's.
            noise: Standard deviation of the noise, in units of the model's input; .5, the code's
                for a ViT and random images (.8 for classes).
            lr: Rate of SGD on the mean; .1 is ours, to be swept.
        """

        epochs: Count | None = 1
        optimizer: Optimizer = "sgd"
        lr: Positive = 0.1
        weight_decay: NonNegative = 0.0
        schedule: Literal["constant", "linear", "cosine"] = "constant"
        samples: Count = 25
        noise: Positive = 0.5

    def prepare(self, task: UnlearnTask) -> objectives.Objective:
        """The slope."""
        from stable_forgetting.vision.methods.adversarial import Smoothness

        return Smoothness(self.config.samples, self.config.noise)


class NatMU(AdaptedMethod):
    """NatMU: trains on forget images into which images of other classes are blended.

    Formula: for each x of D_f and k = 1 ... 4, c_k the class without y that Original finds k-th
    likeliest, x_k a retain image of c_k: minimise CE on shuffled {(m_k x + (1 - m_k) x_k, c_k)}
    u D_r, without augmentation of the blends.  m_k weighs the pixels: rows (k = 1) and columns (2)
    from 0 at the edge to 1 in the middle, rows (3) and columns (4) the other way; ``shift`` is
    added, and the sum clipped to [0, 1].  Of classes, only those that the retain set has count.
    x_k is drawn anew for each blend; the code draws without replacement, and where too many blends
    want one class gives some another.  It also draws a new head before it forgets a whole class.
    Source: He et al. 2024 (arXiv 2405.15495); ZhengbaoHe/NatMU (sample-wise/natmu.py).
    """

    info = MethodInfo(1, "NatMU, He et al. 2024 (arXiv 2405.15495)", BOTH, modality="vision")

    class Config(ShortConfig):
        """Settings of NatMU.

        Attributes:
            shift: Added to the weights of the forgotten image; -.19, the code's on CIFAR-10 (-.053
                for a class of CIFAR-100).
            epochs: Passes over retain images and blends together; 5, the code's.
            weight_decay: Of AdamW; .002, the code's on CIFAR-10.
        """

        epochs: Count | None = 5
        weight_decay: NonNegative = 0.002
        shift: Annotated[float, Field(gt=-1, lt=1)] = -0.19

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Ranks the classes, blends, trains."""
        from stable_forgetting.vision.methods.blends import Blends

        config: Any = self.config
        blends = Blends.drawn(task, config.shift)
        self._attach(task)
        indices = np.concatenate([task.indices("retain"), -1 - np.arange(len(blends))])
        stream = task.generator("batches", "mixed")
        loaders = {"mixed": data.Loader(blends, indices, config.micro_batch, stream)}
        objective, engine = objectives.CrossEntropy("mixed"), config.engine()
        task.fit(task.model, objective, loaders, engine, **self._constraints())
        return task.model
