"""CF-k: fine-tune the last blocks only; and the choice of those blocks."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.numbers import Amount, Count, NonNegative, Positive
from stable_forgetting.common.methods.base import MethodInfo, UnlearningMethod
from stable_forgetting.common.train.config import FitConfig

if TYPE_CHECKING:
    from torch import nn

    from stable_forgetting.common.methods.task import UnlearnTask

PAPER = "Goel et al. 2022 (arXiv 2201.06640)"


def last_parameters(
    names: Sequence[str], k: int, *, blocks: str | None, head: Sequence[str]
) -> list[str]:
    """Names of the parameters in the last ``k`` blocks and of all that come after the blocks.

    Args:
        names: All parameter names, in the model's order.
        k: Number of blocks; 0 is what comes after them only (final norm and head).
        blocks: Name of the list of blocks, such as ``blocks``; the numbered list with most
            parameters when absent.
        head: Patterns of head parameters; always chosen, wherever they are registered.

    Raises:
        ConfigError: There is no such list, or it is shorter than ``k``.
    """
    numbered: dict[str, list[int]] = {}
    for name in names:
        if block := re.match(r"(.+?)\.(\d+)\.", name):
            numbered.setdefault(block[1], []).append(int(block[2]))
    if not numbered or (blocks is not None and blocks not in numbered):
        lists = ", ".join(numbered) or "none"
        raise ConfigError(
            f"blocks: {blocks} is no numbered list of blocks; this model has: {lists}"
        )
    chosen = blocks or max(numbered, key=lambda prefix: len(numbered[prefix]))
    ids = sorted(set(numbered[chosen]))
    if k > len(ids):
        raise ConfigError(f"k: {k} is more than the {len(ids)} blocks of {chosen}; take fewer")
    inside = [name.startswith(f"{chosen}.") for name in names]
    end = len(names) - inside[::-1].index(True)
    last = tuple(f"{chosen}.{number}." for number in ids[len(ids) - k :])
    return [
        name
        for place, name in enumerate(names)
        if place >= end
        or name.startswith(last)
        or any(fnmatch.fnmatch(name, pattern) for pattern in head)
    ]


class CFk(UnlearningMethod):
    """CF-k: fine-tune the last k blocks on retain, freeze the rest, count on forgetting.

    Formula: minimise CE(B_r) over the last ``k`` blocks, the final norm and the head; ``k: 0``
    trains norm and head only.  Never reads forget data.  With ``k: 1`` these are 24 % of the
    weights of a small ViT of four blocks, and 8 % of those of a ViT-S of twelve.

    Source: Goel et al. 2022, arXiv 2201.06640; the ERASURE repository (SGD, lr 0.01, weight decay
    0.1, 10 epochs).  Sweep k in {0, 1, 2, 4} and lr.
    """

    info = MethodInfo(1, PAPER, frozenset({"retain"}))

    class Config(FitConfig):
        """Settings of CF-k.

        Attributes:
            k: Blocks at the end that are trained; 1, the least with a block in it.
            blocks: Name of the list of blocks; the numbered list with most
                parameters when absent.
        """

        epochs: Count | None = 5
        batch_size: Count = 64
        lr: Positive = 3e-4
        weight_decay: NonNegative = 0.1
        k: Amount = 1
        blocks: str | None = None

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Trains the end of the network on retain."""
        from stable_forgetting.common.objectives.objectives import CrossEntropy

        config: Any = self.config
        names = [name for name, _ in task.model.named_parameters()]
        chosen = last_parameters(names, config.k, blocks=config.blocks, head=task.family.head)
        self._start(task, chosen)
        for name, parameter in task.model.named_parameters():
            parameter.requires_grad_(name in chosen)
        engine = FitConfig.of(config)
        objective = CrossEntropy("retain", engine.average)
        task.fit(task.model, objective, task.loaders(["retain"], engine), engine)
        return task.model

    def _start(self, task: UnlearnTask, chosen: Sequence[str]) -> None:
        """CF-k starts from Original's weights."""
