"""EU-k: retrain the last blocks from the start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stable_forgetting.common.base.numbers import Count, Positive
from stable_forgetting.common.methods.base import MethodInfo
from stable_forgetting.common.methods.cf_k import PAPER, CFk

if TYPE_CHECKING:
    from stable_forgetting.common.methods.task import UnlearnTask


class EUk(CFk):
    """EU-k, exact unlearning of the last k blocks: re-initialise these, train them on retain.

    Formula: as CF-k, but the last ``k`` blocks, the final norm and the head first go back to what
    they were before Original saw data (with pretrained weights: those; the head anew).  What the
    frozen blocks learnt from the forget set stays.  Never reads forget data.  The share of the
    weights is CF-k's: with ``k: 1`` 24 % of a ViT of four blocks, 8 % of a ViT-S of twelve.

    Source: Goel et al. 2022, arXiv 2201.06640; the ERASURE repository (SGD, lr 0.01, weight decay
    0.1, 10 epochs).  Sweep k in {0, 1, 2, 4} and lr.
    """

    info = MethodInfo(1, PAPER, frozenset({"retain", "initial"}))

    class Config(CFk.Config):
        epochs: Count | None = 10
        lr: Positive = 1e-3

    def _start(self, task: UnlearnTask, chosen: Sequence[str]) -> None:
        import torch

        fresh = dict(task.fresh_model().named_parameters())
        with torch.no_grad():
            for name, parameter in task.model.named_parameters():
                if name in chosen:
                    parameter.copy_(fresh[name])
