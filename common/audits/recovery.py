"""What brings knowledge back without any data: no adapter, or coarser weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

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
from stable_forgetting.common.data.parts import Part, utility_parts

if TYPE_CHECKING:
    from torch import Tensor, nn


class RemoveAdapter(ModelAudit):
    """The attack that needs no skill: take the adapter off.

    Formula: accuracies of the base weights alone; recovered = 100 (FA_base - FA_U) / (FA_Original -
    FA_U).  An adapter beside its base is undone in full, by construction, unless it is merged
    before the model is given away: this row is what such a release costs.
    Source: by construction of every adapter beside a frozen base (LoRA, arXiv 2106.09685).
    """

    info = AuditInfo(1, "minutes", "%", "not deployed unmerged")

    def measure(self, task: AuditTask) -> Measures:
        """Accuracies without the adapter and the share of FA that comes back."""
        if not task.adapted:
            raise NotApplicable("no adapter: the whole weights are stored")
        forget = task.split.parts["forget"]
        before = task.collect(task.load(), forget).accuracy
        base = task.load_original()
        bare = task.collect(base, forget)
        lost = bare.accuracy - before
        recovered = Measure(100.0, n=len(bare), note="base is Original") if lost > 0 else None
        nothing = Measure(None, n=len(bare), note="nothing was forgotten")
        return {
            "forget": accuracy(bare.correct, task.seed),
            **held_out(task, base, self.parts),
            "recovered": recovered or nothing,
        }


def held_out(task: AuditTask, model: nn.Module, table: Mapping[str, Part]) -> Measures:
    """Accuracy on every part that holds out what is to be kept, named after it."""
    parts = task.split.parts
    return {
        part: accuracy(task.collect(model, parts[part]).correct, task.seed)
        for part in utility_parts(parts, table)
    }


def requantise(weight: Tensor, bits: int) -> Tensor:
    """Symmetric rounding with one scale per output row; each entry moves by at most scale / 2.

    Args:
        weight: (k, ...) weights.
        bits: Of the signed integer, at least 2.

    Returns:
        scale * round(weight / scale), scale = max |row| / (2^(bits-1) - 1), of the same shape.
    """
    import torch

    top = 2 ** (bits - 1) - 1
    rows = weight.detach().reshape(len(weight), -1).float()
    scale = rows.abs().amax(dim=1, keepdim=True) / top
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return ((rows / scale).round() * scale).reshape(weight.shape).to(weight.dtype)


def requantise_(model: nn.Module, bits: int) -> int:
    """Rounds every weight of two or more dimensions in place; returns how many were rounded."""
    import torch

    count = 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and name.endswith("weight"):
                parameter.copy_(requantise(parameter, bits))
                count += 1
    return count


class Requantise(ModelAudit):
    """Rounding the weights: a small unlearning update can fall below the rounding step.

    Formula: w <- s round(w / s) with s = max |row| / (2^(b-1) - 1) for every weight matrix, b = 8
    and 4; accuracy on forget and test afterwards, and the change of FA in points.  A change far
    above Retrain's is recovered knowledge; a fall of test accuracy is the price of the rounding.
    Source: Zhang et al. 2024 (arXiv 2410.16454).
    """

    info = AuditInfo(1, "minutes", "%", "no change of FA")

    class Config(Strict):
        """Config of the rounding.

        Attributes:
            bits: Widths of the integers to try.
        """

        bits: tuple[Annotated[int, Field(ge=2, le=16)], ...] = (8, 4)

    def measure(self, task: AuditTask) -> Measures:
        """FA (Clopper-Pearson), its change, and test accuracy, per width."""
        parts = task.split.parts
        before = task.collect(task.load(), parts["forget"]).accuracy
        result: Measures = {}
        for bits in self.config.bits:
            model = task.load()
            requantise_(model, bits)
            forget = task.collect(model, parts["forget"])
            change = Measure(forget.accuracy - before, n=len(forget))
            result[f"int{bits} forget"] = accuracy(forget.correct, task.seed)
            result[f"int{bits} change"] = change
            tests = held_out(task, model, self.parts)
            result |= {f"int{bits} {part}": measure for part, measure in tests.items()}
        return result
