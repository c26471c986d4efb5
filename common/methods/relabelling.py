"""Methods that train forget data on other labels: random, fixed, of a neighbour, of a new class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from stable_forgetting.common import data, objectives
from stable_forgetting.common.base.numbers import Count, NonNegative, Positive
from stable_forgetting.common.methods import tools
from stable_forgetting.common.methods.base import BOTH, FORGET, MethodInfo, UnlearningMethod
from stable_forgetting.common.methods.gradient import (
    AdaptedConfig,
    AdaptedMethod,
    GradientMethod,
    ShortConfig,
)
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.train.config import FitConfig

if TYPE_CHECKING:
    from torch import nn

    from stable_forgetting.common.train.protocols import AfterStep


class RandomLabel(AdaptedMethod):
    """RL: train on random labels for the forget set and true labels for the retain set.

    Formula: each epoch y~ ~ U{0..C-1} for D_f; ``mixed``: one shuffled pass over D_f u D_r;
    ``sequential``: a pass over D_f, then one over D_r (what the SalUn repository does on CIFAR-10).
    Source: Golatkar et al. 2020; the SalUn repository (Classification/unlearn/RL.py).
    """

    info = MethodInfo(2, "Golatkar et al. 2020 (arXiv 1911.04933)", BOTH)

    class Config(AdaptedConfig):
        """Settings of RL.

        Attributes:
            mode: One shuffled pass over both sets (``mixed``, the default) or one after the other.
            exclude_true: Never draw the true label; off, as in SalUn's repository.
            redraw: Draw the labels anew every epoch; on, as in SalUn's repository.
        """

        steps: Count | None = None
        epochs: Count | None = 3
        batch_size: Count = 64
        lr: Positive = 3e-4
        mode: Literal["mixed", "sequential"] = "mixed"
        exclude_true: bool = False
        redraw: bool = True

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Fine-tunes on relabelled data."""
        self._attach(task)
        self._train(task)
        return task.model

    def _train(self, task: UnlearnTask, *after_step: AfterStep) -> None:
        loaders, objective = {"mixed": self._loader(task)}, objectives.CrossEntropy("mixed")
        constraints = self._constraints(*after_step)
        task.fit(task.model, objective, loaders, self.config.engine(), **constraints)

    def _classes(self, task: UnlearnTask) -> list[int] | None:
        """What labels are drawn from; None for all classes."""
        return None

    def _loader(self, task: UnlearnTask) -> data.Loader:
        config: Any = self.config
        micro = config.micro_batch

        def relabel(*parts: str) -> data.Loader:
            return data.RelabelledLoader(
                task.loader(*parts, batch_size=micro),
                task.indices("forget"),
                task.family.num_classes,
                classes=self._classes(task),
                exclude_true=config.exclude_true,
                redraw=config.redraw,
            )

        if config.mode == "mixed":
            return relabel("forget", "retain")
        turns = [relabel("forget"), task.loader("retain", batch_size=micro)]
        return data.ChainedLoader(turns, repeat=config.accumulation)


class Amnesiac(RandomLabel):
    """Amnesiac: train on fixed wrong labels for the forget set and true ones for the retain set.

    Formula: once, y~ ~ U(retained classes without y) for each x of D_f; minimise CE on shuffled
    {(x, y~): D_f} u D_r.  Unlike ``random_label``, an epoch does not redraw the labels, and neither
    the true one is drawn nor that of a class which is forgotten as a whole.

    Source: the Bad Teacher and SSD repositories (there 3 epochs of Adam at a constant 1e-4, batches
    of 128; here AdamW with decay .05 along a cosine, batches of 64).
    Graves et al.'s own first method, undoing recorded updates, needs a log of Original's training.
    """

    info = MethodInfo(2, "Graves et al. 2021 (arXiv 2010.10981)", BOTH)

    class Config(ShortConfig, RandomLabel.Config):
        """Settings of Amnesiac.

        Attributes:
            exclude_true: Never draw the true label; on, as in the repositories.
            redraw: Draw the wrong labels anew every epoch; off, as they are fixed in the
                repositories.
        """

        exclude_true: bool = True
        redraw: bool = False

    def _classes(self, task: UnlearnTask) -> list[int]:
        """Those that the retain set has."""
        every = range(task.family.num_classes)
        gone = data.unretained_classes(task.source, every, task.indices("retain"))
        return sorted(set(every) - set(gone))


class BoundaryShrink(GradientMethod):
    """Boundary Shrink: relabel forget data with the neighbouring class, found by one attack step.

    Formula: c = Original (frozen, eval mode), inputs in [low, high],
        x' = clip(x + d (high - low) sign(grad_x CE(c(x), y)), low, high);   y' = argmax c(x')
        minimise CE(f(x), y') for x in D_f
    d is ``attack_step``.  For images [low, high] is the normalised [0, 1] per channel, so that d is
    in pixel units; a source that gives no bounds has those observed on D_f.  y' may still be y
    where the step is too short.  Never reads retain data.

    Source: Chen et al. 2023, arXiv 2303.11570; its repository (d 0.1, 10 epochs of SGD, lr 1e-5).
    Sweep lr.
    """

    info = MethodInfo(1, "Chen et al. 2023 (arXiv 2303.11570)", FORGET)

    class Config(ShortConfig):
        """Settings of Boundary Shrink.

        Attributes:
            attack_step: Length of the attack step, as a share of the range of inputs; .1, as in the
                repository.
        """

        epochs: Count | None = 10
        lr: Positive = 1e-5
        weight_decay: NonNegative = 0.0
        attack_step: Positive = 0.1

    def prepare(self, task: UnlearnTask) -> objectives.Objective:
        """Cross-entropy of the forget set towards its neighbours."""
        return tools.ToNeighbours.of(task, self.config.attack_step)


class BoundaryExpand(UnlearningMethod):
    """Boundary Expand: add a shadow class, train forget data into it, drop its row again.

    Formula: widen the head by one row (drawn anew); minimise CE(f(x), C) for x in D_f, where C
    is the new class; remove the row.  Never reads retain data.  SalUn's port leaves the row.

    Source: Chen et al. 2023, arXiv 2303.11570; its repository (10 epochs of SGD, lr 1e-5).  Sweep
    lr.
    """

    info = MethodInfo(1, "Chen et al. 2023 (arXiv 2303.11570)", FORGET)

    class Config(FitConfig):
        epochs: Count | None = 10
        batch_size: Count = 64
        lr: Positive = 1e-5

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Widens, trains, narrows."""
        name = tools.head_name(task)
        tools.widen_head(task.model, name, task.generator("shadow class"))
        task.train(tools.ToOneClass(task.family.num_classes), FitConfig.of(self.config))
        tools.narrow_head(task.model, name, task.family.num_classes)
        return task.model
