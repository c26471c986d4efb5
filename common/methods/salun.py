"""SalUn: random labels on the weights that matter for the forget set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from stable_forgetting.common.base.numbers import Count
from stable_forgetting.common.methods.base import MethodInfo
from stable_forgetting.common.methods.gradient import ShortConfig
from stable_forgetting.common.methods.simple import BOTH, RandomLabel

if TYPE_CHECKING:
    from torch import nn

    from stable_forgetting.common.methods.task import UnlearnTask


class SalUn(RandomLabel):
    """SalUn: random-label unlearning of the most salient weights; all others stay Original's.

    Formula:
        g = |sum over batches of D_f of grad CE(theta0)|     eval mode, ALL trained parameters
        m = 1 on the global top share ``density`` of g, by one threshold; ties are kept
        random-label training (``mode``: mixed or sequential); each step's gradient times m
        after every step: theta = m theta + (1 - m) theta0

    The last line is the point: weight decay and momentum move weights without a gradient, and the
    repository's masked weights drifted until 2026.  The mask covers norms, biases and embeddings.

    With ``adapter`` (not in the paper) the factors are masked instead: A by its saliency; B, whose
    gradient is zero while A = 0, ranks nothing and stays free.

    Source: Fan et al. 2024, arXiv 2310.12508; its repository (Classification), whose settings for a
    CNN on CIFAR-10 are the preset ``repository_cnn``.  Sweep ``density`` in {0.1, ..., 1} and lr.
    """

    info = MethodInfo(1, "Fan et al. 2024 (arXiv 2310.12508)", BOTH)

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "repository_cnn": {
            "optimizer": "sgd",
            "momentum": 0.9,
            "weight_decay": 5e-4,
            "lr": 0.013,
            "schedule": "constant",
            "epochs": 10,
            "batch_size": 256,
            "mode": "sequential",
        },
    }

    class Config(ShortConfig, RandomLabel.Config):
        """Settings of SalUn.

        Attributes:
            density: Share of the weights that are trained, the most salient ones; .5, the middle of
                the sweep.
            saliency_batch_size: Forget samples per batch while weights are ranked; 64, as in
                training.
        """

        density: Annotated[float, Field(gt=0, le=1)] = 0.5
        saliency_batch_size: Count = 64

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Ranks the weights, then trains the chosen ones on random labels."""
        from stable_forgetting.common.methods.tools.masks import MaskedWeights, top_share
        from stable_forgetting.common.methods.tools.passes import one_pass, summed_gradients
        from stable_forgetting.common.objectives.objectives import CrossEntropy

        self._attach(task)
        batches = one_pass(task, "forget", batch_size=self.config.saliency_batch_size)
        saliency = {name: g.abs() for name, g in summed_gradients(task, batches).items()}
        weights = MaskedWeights(task.model, top_share(saliency, self.config.density))
        with weights.gradients():
            self._train(
                task,
                CrossEntropy("mixed"),
                {"mixed": self._loader(task)},
                after_step=[weights.restore],
            )
        return task.model
