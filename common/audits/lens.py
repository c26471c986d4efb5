"""The logit lens: what the layers below the last one would say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from stable_forgetting.common.audits.base import (
    AuditInfo,
    AuditTask,
    Measures,
    ModelAudit,
    NotApplicable,
)
from stable_forgetting.common.audits.intervals import accuracy

if TYPE_CHECKING:
    from torch import nn


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of the model's longest list of modules of one class.

    Raises:
        NotApplicable: There is no list of two or more.
    """
    from torch import nn

    lists = [
        [*module]
        for module in model.modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len({*map(type, module)}) == 1
    ]
    blocks = max(lists, key=len, default=[])
    if len(blocks) < 2:
        raise NotApplicable("the model has no list of two or more blocks")
    return blocks


@contextmanager
def leaving_after(blocks: list[nn.Module], count: int) -> Iterator[None]:
    """While open, the blocks behind the first ``count`` give back what they are given."""

    def passed_on(_: nn.Module, inputs: Any, named: Any, output: Any) -> Any:
        state = inputs[0] if inputs else named["hidden_states"]
        return (state, *output[1:]) if isinstance(output, tuple) else state

    handles = [block.register_forward_hook(passed_on, with_kwargs=True) for block in blocks[count:]]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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
                scores = task.collect(model, task.split.parts["forget"])
            found[f"block {count} forget"] = accuracy(scores.correct, task.seed)
        return found
