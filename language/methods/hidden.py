"""Objectives on hidden states: captured at a named module, compared position by position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.data.batch import IGNORE, Batch, Forward, ordered_batches
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.objectives.objectives import ObjectiveValue
from stable_forgetting.common.objectives.positions import (
    Average,
    average,
    sample_cross_entropy,
    wide,
)
from stable_forgetting.common.train.protocols import ModelForward
from stable_forgetting.common.train.telemetry import evaluating

Positions = Literal["scored", "all", "answers"]


@contextmanager
def captured(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collects what ``module`` returns (the first of a tuple) while the context is open."""
    outputs: list[Tensor] = []

    def keep(_: nn.Module, inputs: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    with module.register_forward_hook(keep):
        yield outputs


def blocks_of(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The model's longest list of modules, and its name.

    Raises:
        ConfigError: The model has no list of modules.
    """
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        raise ConfigError("layer: this model has no list of blocks; name the module to steer")
    return max(lists, key=lambda item: len(item[1]))


def shortened(model: nn.Module, share: float) -> nn.Module:
    """The model, in place, with the first blocks alone: this share of them, one at least."""
    name, blocks = blocks_of(model)
    model.set_submodule(name, blocks[: max(1, round(share * len(blocks)))])
    return model


def middle_block(model: nn.Module) -> str:
    """Name of the lower middle block."""
    name, blocks = blocks_of(model)
    return f"{name}.{(len(blocks) - 1) // 2}"


def counted_positions(batch: Batch, states: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
    """(states, mask) of the positions that count, (N, T, H) and (N, T); the mask is -100 where not.

    Both lie on the device of the states, which is not the batch's where ``device_map`` spreads a
    model.

    Args:
        batch: With ``positions`` (N, A) among its inputs for texts; without, every position counts.
        states: (N, ..., H).
        positions: ``scored``: those that predict the labels; ``answers``: those of the labels,
            one later; ``all``: every real token.
    """
    if "positions" in batch.inputs and positions != "all":
        places = (batch.inputs["positions"] + (positions == "answers")).to(states.device)
        where = places.unsqueeze(-1).expand(-1, -1, states.shape[-1])
        return states.gather(1, where), batch.labels.to(states.device)
    flat = states.flatten(1, -2) if states.ndim > 2 else states.unsqueeze(1)
    mask = torch.zeros(flat.shape[:2], dtype=torch.int64, device=flat.device)
    if "attention_mask" in batch.inputs:
        padding = batch.inputs["attention_mask"].to(flat.device) == 0
        mask = mask.masked_fill(padding, IGNORE)
    return flat, mask


def states_at(
    model: nn.Module,
    layers: Sequence[str],
    forward: Forward,
    batch: Batch,
    positions: Positions,
) -> tuple[Tensor, list[Tensor], Tensor]:
    """(logits, states of each layer, mask) of a batch; see :func:`counted_positions`.

    All lie on the device of the first layer's states, but for the logits.
    """
    with ExitStack() as stack:
        found = [stack.enter_context(captured(model.get_submodule(name))) for name in layers]
        logits = forward(batch)
    pairs = [counted_positions(batch, wide(outputs[0]), positions) for outputs in found]
    mask = pairs[0][1]
    return logits, [states.to(mask.device) for states, _ in pairs], mask


@dataclass(frozen=True)
class Steering:
    """RMU's objective: see :class:`language.methods.rmu.RMU`.

    Attributes:
        model: The trained model, of which ``layer`` is a module.
        frozen: Original.
        layer: Dotted module name.
        run: (model, batch) -> logits, for ``frozen``.
        target: (H,) c u.
        positions: Which positions count.
        over: How they are averaged; ``crossed`` divides every sample's sum by every sample's count,
            as open-unlearning's broadcast does.
        adaptive: Multiply ``target`` by the norm of Original's hidden state, at each position.
    """

    model: nn.Module
    frozen: nn.Module
    layer: str
    run: ModelForward
    target: Tensor
    positions: Positions
    forget_weight: float
    retain_weight: float
    over: Average | Literal["crossed"]
    adaptive: bool = False
    parts: tuple[str, ...] = ("retain", "forget")

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        """Both distances, per entry of the hidden state."""
        hold, hold_loss = self._distance(forward, batches["retain"], None)
        push, push_loss = self._distance(forward, batches["forget"], self.target)
        total = self.forget_weight * push + self.retain_weight * hold
        logged = {"retain_term": hold, "retain_loss": hold_loss}
        return ObjectiveValue(total, {**logged, "forget_term": push, "forget_loss": push_loss})

    def _distance(
        self, forward: Forward, batch: Batch, target: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        where, how = [self.layer], self.positions
        logits, (states,), mask = states_at(self.model, where, forward, batch, how)
        with torch.no_grad():
            loss = sample_cross_entropy(logits, batch.labels).mean()
            if target is None or self.adaptive:
                _, (fixed,), _ = states_at(self.frozen, where, self._original, batch, how)
                norm = torch.linalg.vector_norm(fixed, dim=-1, keepdim=True)
                target = fixed if target is None else norm * target.to(fixed)
        distance = (states - target.to(states.device)).square().mean(-1)
        if self.over == "crossed":
            counted = mask != IGNORE
            means = (distance * counted).sum(1) / counted.sum(1, keepdim=True)
            return means.mean(), loss
        return average(distance, mask, self.over), loss

    def _original(self, batch: Batch) -> Tensor:
        return self.run(self.frozen, batch)


def random_direction(width: int, generator: torch.Generator) -> Tensor:
    """(H,) unit vector with non-negative entries: normalised U(0, 1), as published."""
    values = torch.rand(width, generator=generator)
    return values / torch.linalg.vector_norm(values)


@torch.no_grad()
def hidden_size(
    task: UnlearnTask, layer: str, positions: Positions, batch_size: int
) -> tuple[int, float]:
    """(H, mean norm of the hidden state on forget data), in eval mode."""
    norms, count, width = 0.0, 0, 0
    module = task.model.get_submodule(layer)
    with evaluating(task.model):
        for batch in ordered_batches(task.source, task.indices("forget"), batch_size):
            with captured(module) as outputs:
                task.forward(task.model, batch)
            states, mask = counted_positions(batch, wide(outputs[0]), positions)
            scored = states[mask != IGNORE]
            norms += float(torch.linalg.vector_norm(scored.double(), dim=-1).sum())
            count, width = count + len(scored), scored.shape[-1]
    return width, norms / count
