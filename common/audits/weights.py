"""Attacks on the weights alone: 4 bits, pruning, a smaller or larger update."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from stable_forgetting.common.audits.base import (
    AuditInfo,
    AuditTask,
    Measures,
    ModelAudit,
    NotApplicable,
)
from stable_forgetting.common.audits.intervals import accuracy
from stable_forgetting.common.audits.recovery import held_out
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.numbers import NonNegative

if TYPE_CHECKING:
    from torch import Tensor, nn

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The 16 values of NormalFloat4 (arXiv 2305.14314, appendix E)."""
BLOCK = 64
"""Entries that share a scale, as in that paper."""


def normal_float(weight: Tensor) -> Tensor:
    """The nearest NF4 values: max |w| of each block of 64 entries times one of :data:`NF4`.

    Returns:
        The rounded weight, of the same shape; a block of zeros stays zero.
    """
    import torch
    from torch.nn import functional

    flat = weight.detach().flatten().float()
    blocks = functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True)
    values = torch.tensor(NF4, device=weight.device)
    borders = (values[1:] + values[:-1]) / 2
    nearest = values[torch.bucketize(blocks / torch.where(scale > 0, scale, 1.0), borders)]
    return (nearest * scale).flatten()[: len(flat)].view_as(weight).to(weight.dtype)


def pruned(weight: Tensor, share: float) -> Tensor:
    """The weight with its ``share`` of smallest entries set to zero; of equal ones the first."""
    flat = weight.detach().flatten().clone()
    smallest = flat.abs().argsort(stable=True)[: int(share * len(flat))]
    flat[smallest] = 0
    return flat.view_as(weight)


def change_matrices_(model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Changes every weight of two or more dimensions in place."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and name.endswith("weight"):
                parameter.copy_(change(parameter))


def after(audit: ModelAudit, task: AuditTask, model: nn.Module, name: str) -> Measures:
    """Accuracy on forget and on what is to be kept, of a changed model; columns under ``name``."""
    forget = task.collect(model, task.split.parts["forget"])
    kept = held_out(task, model, audit.parts)
    columns = {"forget": accuracy(forget.correct, task.seed), **kept}
    return {f"{name} {part}": measure for part, measure in columns.items()}


class NormalFloat(ModelAudit):
    """Rounding to the 4 bits that models are deployed in: NF4, as bitsandbytes and QLoRA have it.

    Formula: w <- s q, s = max |w| over a block of 64 entries, q the nearest of NF4's 16 values to
    w / s, for every weight matrix; accuracy afterwards.  The scales are not rounded again.
    Source: Dettmers et al. 2023 (arXiv 2305.14314); as an attack, arXiv 2410.16454, 2602.13151.
    """

    info = AuditInfo(1, "minutes", "%", "that of Retrain")

    def measure(self, task: AuditTask) -> Measures:
        """Accuracies of the rounded model."""
        model = task.load()
        change_matrices_(model, normal_float)
        return after(self, task, model, "NF4")


class Prune(ModelAudit):
    """Pruning: the smallest weights of every matrix are set to zero.

    Formula: w_ij <- 0 for the ``shares`` of a matrix's entries with the smallest |w_ij|; accuracy
    afterwards.  What only a small change had hidden may come back.
    Source: Han et al. 2015 (arXiv 1506.02626); as an attack, Jia et al. 2023 (arXiv 2304.04934).
    """

    info = AuditInfo(1, "minutes", "%", "that of Retrain")

    class Config(Strict):
        """Config of the pruning.

        Attributes:
            shares: Of the entries of a matrix that are set to zero.
        """

        shares: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = (0.3, 0.5)

    def measure(self, task: AuditTask) -> Measures:
        """Accuracies for every share."""
        found: Measures = {}
        for share in self.config.shares:
            model = task.load()
            change_matrices_(model, lambda weight, share=share: pruned(weight, share))  # type: ignore[misc]
            found |= after(self, task, model, f"{100 * share:g} %")
        return found


class ScaleAdapter(ModelAudit):
    """A release of the adapter beside its base: whoever has it may scale it.

    Formula: W = W0 + s dW for every s of ``scales``; accuracy afterwards.  s = 0 is
    remove_adapter, s = 1 the model as it is.
    Source: by construction of every adapter (LoRA's alpha, arXiv 2106.09685).
    """

    info = AuditInfo(1, "minutes", "%", "not deployed unmerged")
    leaks: ClassVar[str] = ""

    class Config(Strict):
        """Config of the scaling.

        Attributes:
            scales: Factors of the adapter's update.
        """

        scales: tuple[NonNegative, ...] = (0.25, 0.5, 2.0)

    def measure(self, task: AuditTask) -> Measures:
        """Accuracies for every scale."""
        import torch

        if not task.adapted:
            raise NotApplicable("no adapter: the whole weights are stored")
        found: Measures = {}
        base = dict(task.load_original().named_parameters())
        for scale in self.config.scales:
            model = task.load()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.lerp_(base[name].to(parameter), 1.0 - scale)
            found |= after(self, task, model, f"x{scale:g}")
        return found
