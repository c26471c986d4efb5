"""Fisher forgetting and influence unlearning: one step by the curvature of the retain loss."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from stable_forgetting.common import data, objectives
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.numbers import Count, Positive
from stable_forgetting.common.methods import tools
from stable_forgetting.common.methods.base import BOTH, MethodInfo, UnlearningMethod
from stable_forgetting.common.methods.task import UnlearnTask

if TYPE_CHECKING:
    from torch import Tensor, nn


class FisherForgetting(UnlearningMethod):
    """Fisher forgetting: Gaussian noise where the retain set does not mind it.

    Formula: ``theta + sqrt(v) N(0, 1)``, ``v = alpha min((F_r + 1e-8)^(-2 power), cap)``.  F_r is
    the diagonal of the Fisher information on retain samples, ``mean_x sum_y p(y|x) (grad CE(x,
    y))^2`` (``expected``), or with the true labels alone (``empirical``).

    The default is what public code does, the same in Golatkar's notebook, the SalUn and the SSD
    repository: the noise goes with F^-1/2; ``head_cap`` holds in the classifier; v of a matrix is
    averaged over its second axis (``row_mean``), so that all weights into a unit get the same
    noise; v of the classifier is ``head_factor`` times and that of all other vectors (biases,
    norms) ``vector_factor`` times larger.  Where whole classes are forgotten, their rows of the
    classifier are set to zero and get v = ``cleared`` (before the factor).
    The preset ``paper`` is the formula of the article: noise with F^-1/4, and nothing else of this.
    Its alpha is (lambda sigma^2)^1/2 there, on another scale.
    Ours: F_r from ``samples`` retain samples.

    Source: Golatkar et al. 2020 (arXiv 1911.04933).  The forget set is read for its labels alone.
    Memory: chunk x parameters x 8 bytes.  ``expected`` costs one backward per class and sample.
    alpha is the method's only real knob and differs by orders of magnitude between models: sweep
    1e-9 to 1e-5 (SSD's repository: 1e-6).
    """

    info = MethodInfo(2, "Golatkar et al. 2020 (arXiv 1911.04933)", BOTH)

    quick: ClassVar[Mapping[str, Any]] = {"samples": 16}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {
            "power": 0.25,
            "cap": None,
            "head_cap": None,
            "row_mean": False,
            "head_factor": 1.0,
            "vector_factor": 1.0,
            "cleared": None,
        },
    }

    class Config(Strict):
        """Settings of Fisher forgetting.

        Attributes:
            alpha: Scale of the variance; 1e-6, as in SSD's repository; to be swept.
            power: Of the Fisher information in the noise; .5, as in public code (article: .25).
            cap: Largest inverse information of a weight; 1e3, as in public code.
            head_cap: The same in the classifier; 1e2, as in public code.
            row_mean: Give all weights into a unit the same noise; on, as in public code.
            head_factor: Factor of the classifier's variance; 10, as in public code.
            vector_factor: Factor of the variance of biases and norms; 10, as in public code.
            cleared: Variance of the zeroed rows of forgotten classes, before the factor; none: they
                stay.
            fisher: Over the model's own labels (``expected``, the default) or the true ones.
            samples: Retain samples that the information is taken from; 256 is ours, for time's
                sake.
            parameters: Glob patterns of the weights that get noise; all of them.
            batch_size: Samples per forward pass; it changes no number but by rounding.
            chunk: Gradients taken at once; it changes memory and speed alone.
        """

        alpha: Positive = 1e-6
        power: Positive = 0.5
        cap: Positive | None = 1e3
        head_cap: Positive | None = 1e2
        row_mean: bool = True
        head_factor: Positive = 10.0
        vector_factor: Positive = 10.0
        cleared: Positive | None = 1e-4
        fisher: Literal["expected", "empirical"] = "expected"
        samples: Count = 256
        parameters: tuple[str, ...] = ("*",)
        batch_size: Count = 64
        chunk: Count = 8

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Adds the noise."""
        import torch

        config: Any = self.config
        gradients = tools.SampleGradients(task, config.parameters, chunk=config.chunk)
        diagonal = self._diagonal(task, gradients)
        gone = self._cleared(task)
        sizes = [parameter.numel() for parameter in gradients.parameters.values()]
        parts = [
            self.variance(fisher.view_as(parameter), gone if _is_head(task, name) else None)
            for (name, parameter), fisher in zip(
                gradients.parameters.items(), diagonal.split(sizes), strict=True
            )
        ]
        variance = torch.cat([part.flatten() for part in parts])
        start = gradients.flat()
        noise = torch.randn(start.shape, generator=task.generator("fisher")).to(start)
        gradients.write(start + variance.sqrt() * noise)
        return task.model

    def _diagonal(self, task: UnlearnTask, gradients: tools.SampleGradients) -> Tensor:
        """(P,) diagonal of the Fisher information on ``samples`` retain samples."""
        import torch

        config: Any = self.config
        chosen = task.drawn("retain", config.samples, "fisher", "samples")
        total = torch.zeros_like(gradients.flat())
        for batch in data.ordered_batches(task.source, chosen, config.batch_size):
            if batch.labels.ndim != 1:
                raise ConfigError("fisher needs samples of one label; choose another method")
            if config.fisher == "empirical":
                for part in gradients.losses(batch):
                    total += part.square().sum(0)
                continue
            with torch.no_grad():
                shares = objectives.wide(task.forward(task.model, batch)).softmax(-1)
            for label in range(task.family.num_classes):
                weights = iter(shares[:, label].split(gradients.chunk))
                for part in gradients.losses(batch, torch.full_like(batch.labels, label)):
                    total += next(weights) @ part.square()
        return total / len(chosen)

    def variance(self, fisher: Tensor, gone: Sequence[int] | None) -> Tensor:
        """The variance of one parameter's noise, of the parameter's shape."""
        config: Any = self.config
        caps = [config.cap, config.head_cap if gone is not None else None]
        variance: Tensor = (fisher + 1e-8).pow(-2 * config.power)
        variance = variance.clamp_max(min([c for c in caps if c is not None], default=math.inf))
        variance = config.alpha * variance
        if config.row_mean and variance.ndim > 1:
            variance = variance.mean(dim=1, keepdim=True).expand_as(fisher).clone()
        if gone is not None:
            variance[list(gone)] = config.cleared or 0.0
            factor = config.head_factor
        else:
            factor = config.vector_factor if variance.ndim == 1 else 1.0
        scaled: Tensor = variance * factor
        return scaled

    def _cleared(self, task: UnlearnTask) -> list[int]:
        """Sets the head's rows of classes that the retain set no longer has to zero; which."""
        import torch

        if self.config.cleared is None:
            return []
        gone = data.forgotten_classes(task.source, task.indices("forget"), task.indices("retain"))
        with torch.no_grad():
            for name, parameter in task.model.named_parameters():
                if gone and parameter.requires_grad and _is_head(task, name):
                    parameter[gone] = 0
        return gone


def _is_head(task: UnlearnTask, name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in task.family.head)


class Influence(UnlearningMethod):
    """IU: theta + alpha F^-1 v, the first-order effect of dropping the forget set.

    Formula: ``v = n_f/N (mean_{D_f} grad CE - mean_{D_r} grad CE)``, N = n_f + n_r, in eval mode;
    ``F = damping I + 1/m sum_{i<=m} g_i g_i^T`` over single-sample retain gradients g_i
    (WoodFisher).  ``inverse: exact`` applies F^-1 by Woodbury's identity.  ``inverse: lineage`` is
    the recursion of the Unlearn-Sparse and SalUn repositories, ``t = <o, g>; k -= <k, g>/(m + t) o;
    o -= t/(m + t) o`` from o = g_1: its o keeps the direction of g_1, so it corrects v along one
    gradient only.  Retain gradients come from the retain set (the lineage's ImageNet path reads the
    forget set there).
    Source: Izzo et al. 2021 (arXiv 2002.10077); Singh & Alistarh 2020 (arXiv 2004.14340) for F;
    Jia et al. 2023 (arXiv 2304.04934) for the method.

    Memory of ``exact``: samples x parameters x 4 bytes; ``parameters: [blocks.11.*, head.*]``
    restricts both.  ``alpha`` is not comparable between models: sweep it (the repositories take
    0.2, papers 1 to 20).
    """

    info = MethodInfo(1, "Izzo et al. 2021 (arXiv 2002.10077); as IU in arXiv 2304.04934", BOTH)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "lineage": {"inverse": "lineage", "samples": 1000, "alpha": 0.2}
    }

    class Config(Strict):
        """Settings of IU.

        Attributes:
            alpha: Length of the step; 40 is ours, for small models; to be swept.
            damping: What is added to the diagonal of the information matrix; 1, which is ours.
            samples: Retain gradients that the matrix is made of; 128, for memory's sake.
            inverse: By Woodbury's identity (``exact``, the default) or the repositories' recursion.
            parameters: Glob patterns of the weights that move; all of them.
            batch_size: Samples per forward pass; it changes no number but by rounding.
            chunk: Gradients taken at once; it changes memory and speed alone.
        """

        alpha: Positive = 40.0
        damping: Positive = 1.0
        samples: Count = 128
        inverse: Literal["exact", "lineage"] = "exact"
        parameters: tuple[str, ...] = ("*",)
        batch_size: Count = 64
        chunk: Count = 16

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Takes the one step."""
        config: Any = self.config
        gradients = tools.SampleGradients(task, config.parameters, chunk=config.chunk)
        forget, retain = task.indices("forget"), task.indices("retain")
        share = len(forget) / (len(forget) + len(retain))
        pull = gradients.mean(task.source, forget, config.batch_size)
        pull = share * (pull - gradients.mean(task.source, retain, config.batch_size))
        singles = self._retain_gradients(task, gradients)
        solve = woodbury if config.inverse == "exact" else lineage_recursion
        gradients.write(gradients.flat() + config.alpha * solve(pull, singles, config.damping))
        return task.model

    def _retain_gradients(self, task: UnlearnTask, gradients: tools.SampleGradients) -> Tensor:
        """(m, P) gradients of single retain samples, drawn without replacement."""
        import torch

        config: Any = self.config
        chosen = task.drawn("retain", config.samples, "influence")
        batches = data.ordered_batches(task.source, chosen, config.batch_size)
        return torch.cat([part for batch in batches for part in gradients.losses(batch)])


def woodbury(v: Tensor, singles: Tensor, damping: float) -> Tensor:
    """(damping I + G^T G / m)^-1 v for G of shape (m, P), through an m x m system in float64."""
    import torch

    kernel = singles.double() @ singles.double().T
    kernel += len(singles) * damping * torch.eye(len(singles), dtype=kernel.dtype).to(kernel)
    inner: Tensor = torch.linalg.solve(kernel, (singles @ v).double()).to(v.dtype)
    return (v - singles.T @ inner) / damping


def lineage_recursion(v: Tensor, singles: Tensor, damping: float) -> Tensor:
    """The repositories' recursion, whose ``o`` never leaves the direction of the first gradient.

    ``damping`` divides the start, as in F_0 = damping I.
    """
    count = len(singles)
    k, o = v / damping, singles[0] / damping
    for single in singles[1:]:
        t = o @ single
        k = k - (k @ single) / (count + t) * o
        o = o - t / (count + t) * o
    return k
