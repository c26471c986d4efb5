"""IU: influence unlearning, one Newton-like step away from what the forget set contributed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.numbers import Count, Positive
from stable_forgetting.common.methods.base import MethodInfo, UnlearningMethod
from stable_forgetting.common.methods.task import UnlearnTask

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from stable_forgetting.common.methods.tools.gradients import SampleGradients


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

    info = MethodInfo(
        1,
        "Izzo et al. 2021 (arXiv 2002.10077); as IU in arXiv 2304.04934",
        frozenset({"forget", "retain"}),
    )
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
        from stable_forgetting.common.methods.tools.gradients import SampleGradients

        config: Any = self.config
        gradients = SampleGradients(task.model, task.forward, config.parameters, chunk=config.chunk)
        forget, retain = task.indices("forget"), task.indices("retain")
        share = len(forget) / (len(forget) + len(retain))
        pull = gradients.mean(task.source, forget, config.batch_size)
        pull = share * (pull - gradients.mean(task.source, retain, config.batch_size))
        singles = self._retain_gradients(task, gradients)
        solve = woodbury if config.inverse == "exact" else lineage_recursion
        gradients.write(gradients.flat() + config.alpha * solve(pull, singles, config.damping))
        return task.model

    def _retain_gradients(self, task: UnlearnTask, gradients: SampleGradients) -> Tensor:
        """(m, P) gradients of single retain samples, drawn without replacement."""
        import torch

        from stable_forgetting.common.data.batch import ordered_batches

        config: Any = self.config
        retain = task.indices("retain")
        order = torch.randperm(len(retain), generator=task.generator("influence"))
        chosen = retain[order[: config.samples].numpy()]
        batches = ordered_batches(task.source, chosen, config.batch_size)
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
