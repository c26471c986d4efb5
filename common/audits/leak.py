"""Attacks that only ask: many times, or below the last layer (the logit lens)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from stable_forgetting.common import data
from stable_forgetting.common.audits.base import (
    PERCENT,
    AuditInfo,
    AuditTask,
    Measures,
    ModelAudit,
    NotApplicable,
)
from stable_forgetting.common.audits.intervals import accuracy, bootstrap_mean
from stable_forgetting.common.audits.members import per_sample
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.numbers import Count, Positive
from stable_forgetting.common.base.seeding import derive, generator

if TYPE_CHECKING:
    from torch import Tensor, nn


class Leak(ModelAudit):
    """leak@k: the best of k draws at a temperature, where a greedy answer hides.

    Formula: mean over forget samples of the expected largest share of right positions among ``k``
    answers drawn from softmax(z / T); every position is drawn behind the right ones before it.  For
    one position this is 1 - (1 - p_y)^k, exactly; else the mean over ``rounds`` of k draws.
    Source: leak@k, arXiv 2511.04934 (there whole answers are written and judged by their text).
    """

    info = AuditInfo(1, "minutes", "%", "that of Retrain")
    budget: ClassVar[Mapping[str, str]] = {"samples": "k"}

    class Config(Strict):
        """Config of the draws.

        Attributes:
            k: Answers that the attacker draws.
            temperature: Divides the logits.
            rounds: How often k answers are drawn, where there are several positions.
        """

        k: Count = 16
        temperature: Positive = 1.0
        rounds: Count = 20

    def measure(self, task: AuditTask) -> Measures:
        """The share of right positions of the best answer."""
        value = per_sample(task, task.load(), task.split.parts["forget"], self._best(task))
        return {"forget": bootstrap_mean(100 * value, derive(task.seed, "leak"), PERCENT)}

    def _best(self, task: AuditTask) -> Callable[[Tensor, Tensor], Tensor]:
        import torch

        k, rounds = self.config.k, self.config.rounds
        stream = generator(task.seed, "audit", "leak")

        def best(logits: Tensor, labels: Tensor) -> Tensor:
            p = (logits / self.config.temperature).softmax(-1).double()
            right = p.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1).cpu()
            if labels.shape[1] == 1:
                once: Tensor = 1 - (1 - right[:, 0]).clamp(0, 1) ** k
                return once
            counted = (labels != data.IGNORE).cpu()
            total: Tensor = torch.zeros(len(labels), dtype=torch.float64)
            for _ in range(rounds):
                drawn = torch.rand(k, *right.shape, generator=stream, dtype=torch.float64) < right
                shares = (drawn & counted).sum(-1) / counted.sum(-1).clamp_min(1)
                total += shares.max(0).values
            mean: Tensor = total / rounds
            return mean

        return best


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of the model's longest list of modules of one class.

    Of a class with several lists none counts: they are the stages of a network, or the experts of
    each layer, and others run after every one of them.

    Raises:
        NotApplicable: There is no list of two or more.
    """
    from torch import nn

    lists: dict[type, list[list[nn.Module]]] = {}
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len({*map(type, module)}) == 1:
            lists.setdefault(type(module[0]), []).append([*module])
    blocks = max((own[0] for own in lists.values() if len(own) == 1), key=len, default=[])
    if len(blocks) < 2:
        raise NotApplicable("the model has no list of two or more blocks that is its whole depth")
    return blocks


@contextmanager
def leaving_after(blocks: list[nn.Module], count: int) -> Iterator[None]:
    """While open, the blocks behind the first ``count`` give back what they are given.

    Raises:
        NotApplicable: Inside, where a block changes the shape of the state.
    """

    def passed_on(_: nn.Module, inputs: Any, named: Any, output: Any) -> Any:
        state = inputs[0] if inputs else named["hidden_states"]
        made = output[0] if isinstance(output, tuple) else output
        if made.shape != state.shape:
            raise NotApplicable("the model's blocks change the shape of the state")
        return (state, *output[1:]) if isinstance(output, tuple) else state

    with ExitStack() as hooks:
        for block in blocks[count:]:
            hooks.enter_context(block.register_forward_hook(passed_on, with_kwargs=True))
        yield


class LogitLens(ModelAudit):
    """The logit lens: the last norm and the head on the hidden state after each block.

    Formula: accuracy on forget of head(norm(h_l)), h_l the state after block l, for every l below
    the last.  A method that changed the last blocks alone leaves the answer in those before.
    Source: nostalgebraist 2020, "interpreting GPT: the logit lens"; Belrose et al. 2023
    (arXiv 2303.08112).
    """

    info = AuditInfo(1, "minutes", "%", "that of Retrain")

    def measure(self, task: AuditTask) -> Measures:
        """Accuracy on forget after every block but the last."""
        model, found = task.load(), {}
        blocks = blocks_of(model)
        for count in range(1, len(blocks)):
            with leaving_after(blocks, count):
                correct = task.collect_correct(model, task.split.parts["forget"])
            found[f"block {count} forget"] = accuracy(correct, task.seed)
        return found
