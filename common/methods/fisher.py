"""Fisher forgetting: noise where the retain set does not mind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from common.base.config import Strict
from common.base.errors import ConfigError
from common.base.numbers import Count, Positive
from common.methods.base import MethodInfo, UnlearningMethod
from common.methods.task import UnlearnTask

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from common.methods.tools.gradients import SampleGradients


class FisherForgetting(UnlearningMethod):
    """Fisher forgetting: Gaussian noise of variance alpha / F_r on every parameter.

    Formula: ``theta + sqrt(alpha min(1/(F_r + 1e-8), cap)) N(0, 1)``; F_r is the diagonal of the
    Fisher information on retain samples, ``mean_x sum_y p(y|x) (grad CE(x, y))^2`` (``expected``),
    or with the true labels alone (``empirical``).  The head's variance is ``head_factor`` times
    larger; where whole classes are forgotten their rows of the head are set to zero first.
    Source: Golatkar et al. 2020 (arXiv 1911.04933); the SalUn repository's Fisher path for
    cap and head factor.  The forget set is read for its labels alone.

    Memory: chunk x parameters x 8 bytes.  ``expected`` costs one backward per class and sample.
    alpha is the method's only real knob and differs by orders of magnitude between models: sweep
    1e-9 to 1e-5.
    """

    info = MethodInfo(1, "Golatkar et al. 2020 (arXiv 1911.04933)", frozenset({"forget", "retain"}))

    quick: ClassVar[Mapping[str, Any]] = {"samples": 16}

    class Config(Strict):
        alpha: Positive = 3e-7
        cap: Positive = 1e3
        head_factor: Positive = 10.0
        fisher: Literal["expected", "empirical"] = "expected"
        samples: Count = 256
        parameters: tuple[str, ...] = ("*",)
        batch_size: Count = 64
        chunk: Count = 8

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Adds the noise."""
        import torch

        from common.methods.tools.gradients import SampleGradients

        config: Any = self.config
        gradients = SampleGradients(task.model, task.forward, config.parameters, chunk=config.chunk)
        variance = (1 / (self._diagonal(task, gradients) + 1e-8)).clamp_max(config.cap)
        variance = variance * config.alpha * self._head_factors(task, gradients)
        self._zero_rows(task)
        start = gradients.flat()
        noise = torch.randn(start.shape, generator=task.generator("fisher")).to(start)
        gradients.write(start + variance.sqrt() * noise)
        return task.model

    def _diagonal(self, task: UnlearnTask, gradients: SampleGradients) -> Tensor:
        """(P,) diagonal of the Fisher information on ``samples`` retain samples."""
        import torch

        from common.data.batch import ordered_batches

        config: Any = self.config
        retain = task.indices("retain")
        order = torch.randperm(len(retain), generator=task.generator("fisher", "samples"))
        chosen = retain[order[: config.samples].numpy()]
        total = torch.zeros_like(gradients.flat())
        for batch in ordered_batches(task.source, chosen, config.batch_size):
            if batch.labels.ndim != 1:
                raise ConfigError("fisher needs samples of one label; choose another method")
            if config.fisher == "empirical":
                for part in gradients.losses(batch):
                    total += part.square().sum(0)
                continue
            with torch.no_grad():
                shares = task.forward(task.model, batch).softmax(-1)
            for label in range(task.family.num_classes):
                weights = iter(shares[:, label].split(gradients.chunk))
                for part in gradients.losses(batch, torch.full_like(batch.labels, label)):
                    total += next(weights) @ part.square()
        return total / len(chosen)

    def _head_factors(self, task: UnlearnTask, gradients: SampleGradients) -> Tensor:
        """(P,) ``head_factor`` on the classifier, 1 elsewhere."""
        import torch

        return torch.cat(
            [
                torch.full((p.numel(),), self.config.head_factor if _is_head(task, name) else 1.0)
                for name, p in gradients.parameters.items()
            ]
        ).to(gradients.flat())

    def _zero_rows(self, task: UnlearnTask) -> None:
        """Clears the head's rows of classes that the retain set no longer has."""
        import torch

        from common.data.labels import forgotten_classes

        gone = forgotten_classes(task.source, task.indices("forget"), task.indices("retain"))
        with torch.no_grad():
            for name, parameter in task.model.named_parameters():
                if gone and _is_head(task, name) and len(parameter) == task.family.num_classes:
                    parameter[gone] = 0


def _is_head(task: UnlearnTask, name: str) -> bool:
    import fnmatch

    return any(fnmatch.fnmatch(name, pattern) for pattern in task.family.head)
