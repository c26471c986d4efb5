"""Gradient ascent and gradient difference through LoRA that starts by FILA: LoKU's ablations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.methods import MethodInfo, UnlearnTask
from common.schemas import AdapterConfig, FilaConfig, NonNegative, Positive
from common.unlearners.forget_retain import (
    LORA,
    ForgetConfig,
    ForgetOnlyMethod,
    ForgetRetainMethod,
    RetainConfig,
)

if TYPE_CHECKING:
    from common.objectives import Term

PAPER = "LoKU, Cha et al. 2024 (arXiv 2408.06621), ablation"
BOTH = frozenset({"forget", "retain"})


class GAFila(ForgetOnlyMethod):
    """GA + FILA: ascent on forget through LoRA that starts by FILA.

    Formula: minimise -CE(B_f).  Only the start reads retain data: its Fisher information.
    Source: arXiv 2408.06621.
    """

    info = MethodInfo(1, PAPER, BOTH)

    class Config(ForgetConfig):
        lr: Positive = 3e-5
        adapter: AdapterConfig | None = LORA
        fila: FilaConfig | None = FilaConfig()

    def forget_term(self, task: UnlearnTask) -> Term:
        """Ascent."""
        from common.losses import cross_entropy
        from common.terms import Mean

        return Mean(cross_entropy, self.config.average, sign=-1.0)


class GDFila(ForgetRetainMethod):
    """GD + FILA: gradient difference through LoRA that starts by FILA.

    Formula: minimise CE(B_r) - lambda CE(B_f), lambda = ``forget_weight`` (1 in the source).
    Source: arXiv 2408.06621.
    """

    info = MethodInfo(1, PAPER, BOTH)

    class Config(RetainConfig):
        lr: Positive = 1e-3
        forget_weight: NonNegative = 0.2
        adapter: AdapterConfig | None = LORA
        fila: FilaConfig | None = FilaConfig()

    def forget_term(self, task: UnlearnTask) -> Term:
        """Ascent."""
        from common.losses import cross_entropy
        from common.terms import Mean

        return Mean(cross_entropy, self.config.average, sign=-1.0)
