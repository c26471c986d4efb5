"""Objectives that turn hidden states away from Original's, or are taken under a shift of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stable_forgetting.common.data.batch import Batch, Forward
from stable_forgetting.common.methods.tools.steps import AroundTerms
from stable_forgetting.common.objectives.objectives import ObjectiveValue
from stable_forgetting.common.objectives.positions import (
    Average,
    average,
    sample_cross_entropy,
    wide,
)
from stable_forgetting.common.objectives.terms import Term
from stable_forgetting.common.train.protocols import ModelForward
from stable_forgetting.language.methods.hidden import Positions, blocks_of, captured, states_at


class Progress:
    """Counts optimizer steps, called after each.

    Attributes:
        total: Steps of the run.
    """

    def __init__(self) -> None:
        self.steps, self.total = 0, 1

    def __call__(self, model: nn.Module) -> None:
        """One more."""
        self.steps += 1

    @property
    def half(self) -> float:
        """t / 2T at the step t = 1, ..., T that is taken: 1/2 at the last one."""
        return (self.steps + 1) / (2 * self.total)

    def state(self) -> dict[str, Tensor]:
        """Steps done."""
        return {"steps": torch.tensor(self.steps)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continues from a :meth:`state`."""
        self.steps = int(state["steps"])


def lower_blocks(model: nn.Module) -> list[str]:
    """Names of the blocks 5/16 and 10/16 of the way up; one where they are the same."""
    name, blocks = blocks_of(model)
    places = {max(0, share * len(blocks) // 16 - 1) for share in (5, 10)}
    return [f"{name}.{place}" for place in sorted(places)]


@dataclass(frozen=True)
class Rerouting:
    """The objective of :class:`language.methods.latent.CircuitBreakers`.

    Attributes:
        model: The trained model, of which ``layers`` are modules.
        frozen: Original.
        layers: Dotted module names.
        run: (model, batch) -> logits, for ``frozen``.
        positions: Which positions count.
        over: How they are averaged.
        progress: How far the run is.
        nudge: (H,) what is added to Original's states of forget data, in units of their norm.
    """

    model: nn.Module
    frozen: nn.Module
    layers: Sequence[str]
    run: ModelForward
    positions: Positions
    forget_weight: float
    retain_weight: float
    over: Average
    progress: Progress
    nudge: Tensor
    parts: tuple[str, ...] = ("forget", "retain")

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        """Two forwards of each batch."""
        turn, turn_loss = self._compared(forward, batches["forget"], self._alike)
        hold, hold_loss = self._compared(forward, batches["retain"], _distance)
        done = self.progress.half
        total = (1 - done) * self.forget_weight * turn + done * self.retain_weight * hold
        logged = {"forget_term": turn, "forget_loss": turn_loss}
        return ObjectiveValue(total, {**logged, "retain_term": hold, "retain_loss": hold_loss})

    def _compared(self, forward: Forward, batch: Batch, measure: Any) -> tuple[Tensor, Tensor]:
        logits, now, mask = states_at(self.model, self.layers, forward, batch, self.positions)
        with torch.no_grad():
            loss = sample_cross_entropy(logits, batch.labels).mean()
            _, then, _ = states_at(self.frozen, self.layers, self._original, batch, self.positions)
        pairs = zip(now, then, strict=True)
        values = [average(measure(ours, theirs), mask, self.over) for ours, theirs in pairs]
        return torch.stack(values).mean(), loss

    def _alike(self, ours: Tensor, theirs: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(theirs, dim=-1, keepdim=True)
        return F.cosine_similarity(ours, theirs + norm * self.nudge.to(theirs), dim=-1).relu()

    def _original(self, batch: Batch) -> Tensor:
        return self.run(self.frozen, batch)


def _distance(ours: Tensor, theirs: Tensor) -> Tensor:
    return torch.linalg.vector_norm(ours - theirs, dim=-1)


@contextmanager
def shifted(module: nn.Module, shift: Tensor) -> Iterator[None]:
    """While open, ``shift`` is added to what ``module`` returns (to the first of a tuple)."""

    def add(_: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0] + shift.to(output[0]), *output[1:])
        return output + shift.to(output)

    with module.register_forward_hook(add):
        yield


@dataclass(frozen=True)
class UnderAttack(AroundTerms):
    """A forget term under the worst shift of a layer's hidden states, and a retain term.

    Attributes:
        layer: Dotted name of a module of the trained model.
        lured: What the attack lowers on the forget batch.
        epsilon: Largest norm of a position's shift.
    """

    layer: str
    lured: Term
    epsilon: float
    steps: int
    lr: float

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        """The attack, then one forward of each batch."""
        with shifted(self.model.get_submodule(self.layer), self.attack(forward, batches["forget"])):
            forget = replace(self.objective, retain=None)(forward, batches)
        return self.and_retain(forget, forward, batches)

    def attack(self, forward: Forward, batch: Batch) -> Tensor:
        """(N, T, H) the shift, zero where there is no token."""
        module = self.model.get_submodule(self.layer)
        with torch.no_grad(), captured(module) as outputs:
            forward(batch)
        shift = torch.zeros_like(wide(outputs[0])).requires_grad_()
        real = batch.inputs["attention_mask"].unsqueeze(-1).to(shift.device)
        optimizer = torch.optim.AdamW([shift], lr=self.lr)
        for _ in range(self.steps):
            with shifted(module, shift * real):
                loss = self.lured(forward(batch), batch)
            shift.grad = torch.autograd.grad(loss, shift)[0]
            optimizer.step()
            with torch.no_grad():
                norm = torch.linalg.vector_norm(shift, dim=-1, keepdim=True)
                shift.div_((norm / self.epsilon).clamp_min(1))
        return (shift * real).detach()
