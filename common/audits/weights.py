"""Attacks on the weights alone: coarser ones, pruned ones, another share of an adapter or none."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from stable_forgetting.common.audits.base import (
    AuditInfo,
    AuditTask,
    Measure,
    Measures,
    ModelAudit,
    NotApplicable,
)
from stable_forgetting.common.audits.intervals import accuracy
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.numbers import NonNegative
from stable_forgetting.common.data.parts import Part, utility_parts
from stable_forgetting.common.measure.scores import percent

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


def requantise(weight: Tensor, bits: int) -> Tensor:
    """Symmetric rounding with one scale per output row; each entry moves by at most scale / 2.

    Returns:
        scale * round(weight / scale), scale = max |row| / (2^(bits-1) - 1), of the same shape.
    """
    import torch

    top = 2 ** (bits - 1) - 1
    rows = weight.detach().reshape(len(weight), -1).float()
    scale = rows.abs().amax(dim=1, keepdim=True) / top
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return ((rows / scale).round() * scale).reshape(weight.shape).to(weight.dtype)


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


def check_dense(model: nn.Module) -> None:
    """Raises NotApplicable where weights are packed: codes are no numbers to round or to scale."""
    from stable_forgetting.common.bounded.quantised import is_quantised

    if any(map(is_quantised, model.modules())):
        raise NotApplicable("the model's weights are quantised already")


def held_out(task: AuditTask, model: nn.Module, table: Mapping[str, Part]) -> Measures:
    """Accuracy on every part that holds out what is to be kept, named after it."""
    parts = task.split.parts
    return {
        part: accuracy(task.collect_correct(model, parts[part]), task.seed)
        for part in utility_parts(parts, table)
    }


def after(
    audit: ModelAudit, task: AuditTask, model: nn.Module, name: str, before: float | None = None
) -> Measures:
    """Accuracy on forget and on what is to be kept, of a changed model; columns under ``name``.

    Where the accuracy on forget ``before`` is given, its change too.
    """
    forget = task.collect_correct(model, task.split.parts["forget"])
    columns = {"forget": accuracy(forget, task.seed)}
    if before is not None:
        columns["change"] = Measure(percent(forget) - before, n=len(forget))
    columns |= held_out(task, model, audit.parts)
    return {f"{name} {part}": measure for part, measure in columns.items()}


class ChangedMatrices(ModelAudit):
    """Accuracies of the model after a change of every weight matrix."""

    shows_change: ClassVar[bool] = False

    @abstractmethod
    def changes(self) -> Mapping[str, Callable[[Tensor], Tensor]]:
        """Name of the columns -> what becomes of a matrix."""

    def measure(self, task: AuditTask) -> Measures:
        """Accuracies for every change."""
        before, found = None, dict[str, Measure]()
        if self.shows_change:
            before = percent(task.collect_correct(task.load(), task.split.parts["forget"]))
        for name, change in self.changes().items():
            model = task.load()
            check_dense(model)
            change_matrices_(model, change)
            found |= after(self, task, model, name, before)
        return found


class Requantise(ChangedMatrices):
    """Rounding the weights: a small unlearning update can fall below the rounding step.

    Formula: w <- s round(w / s) with s = max |row| / (2^(b-1) - 1) for every weight matrix, b = 8
    and 4; accuracy on forget and test afterwards, and the change of FA in points.  A change far
    above Retrain's is recovered knowledge; a fall of test accuracy is the price of the rounding.
    Source: Zhang et al. 2024 (arXiv 2410.16454).
    """

    info = AuditInfo(1, "minutes", "%", "no change of FA")
    shows_change: ClassVar[bool] = True

    class Config(Strict):
        """Config of the rounding.

        Attributes:
            bits: Widths of the integers to try.
        """

        bits: tuple[Annotated[int, Field(ge=2, le=16)], ...] = (8, 4)

    def changes(self) -> Mapping[str, Callable[[Tensor], Tensor]]:
        """One per width."""
        return {f"int{bits}": partial(requantise, bits=bits) for bits in self.config.bits}


class NormalFloat(ChangedMatrices):
    """Rounding to the 4 bits that models are deployed in: NF4, as bitsandbytes and QLoRA have it.

    Formula: w <- s q, s = max |w| over a block of 64 entries, q the nearest of NF4's 16 values to
    w / s, for every weight matrix; accuracy afterwards.  The scales are not rounded again.
    Source: Dettmers et al. 2023 (arXiv 2305.14314); as an attack, arXiv 2410.16454, 2602.13151.
    """

    info = AuditInfo(1, "minutes", "%", "that of Retrain")

    def changes(self) -> Mapping[str, Callable[[Tensor], Tensor]]:
        """The one rounding."""
        return {"NF4": normal_float}


class Prune(ChangedMatrices):
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

    def changes(self) -> Mapping[str, Callable[[Tensor], Tensor]]:
        """One per share."""
        return {f"{100 * share:g} %": partial(pruned, share=share) for share in self.config.shares}


class RemoveAdapter(ModelAudit):
    """The attack that needs no skill: take the adapter off.

    Formula: accuracies of the base weights alone; recovered = 100 (FA_base - FA_U) / (FA_Original -
    FA_U).  An adapter beside its base is undone in full, by construction, unless it is merged
    before the model is given away: this row is what such a release costs.
    Source: by construction of every adapter beside a frozen base (LoRA, arXiv 2106.09685).
    """

    info = AuditInfo(1, "minutes", "%", "not deployed unmerged")
    leaks: ClassVar[str] = ""

    def measure(self, task: AuditTask) -> Measures:
        """Accuracies without the adapter and the share of FA that comes back."""
        if not task.adapted:
            raise NotApplicable("no adapter: the whole weights are stored")
        forget = task.split.parts["forget"]
        before = percent(task.collect_correct(task.load(), forget))
        base = task.load_original()
        bare = task.collect_correct(base, forget)
        lost = percent(bare) - before
        recovered = Measure(100.0, n=len(bare), note="base is Original") if lost > 0 else None
        nothing = Measure(None, n=len(bare), note="nothing was forgotten")
        return {
            "forget": accuracy(bare, task.seed),
            **held_out(task, base, self.parts),
            "recovered": recovered or nothing,
        }


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
            check_dense(model)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.lerp_(base[name].to(parameter), 1.0 - scale)
            found |= after(self, task, model, f"x{scale:g}")
        return found
