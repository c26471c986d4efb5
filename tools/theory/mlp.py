"""The experiment: fit an MLP to the digits, ascend on one class, measure every step.

The inequality.  With C classes and the logit gap ``m = max_{j != y} z_j - z_y``, the loss is
``L = log(1 + S)``, ``S = sum_{j != y} exp(z_j - z_y)``.  The largest of the C - 1 terms of S is
exp(m) and none is larger, so exp(m) <= S <= (C - 1) exp(m), and

    m < log(1 + e^m) <= L <= log(1 + (C - 1) e^m) < log(1 + C e^m)

for every logit vector.  Taking the maximum over all j instead gives max(m, 0), for which
``max(m, 0) <= L <= log(1 + C e^max(m, 0))`` holds too; m is the tighter choice and is what is
used here.  (The paper's further step ``1 + C e^m <= (1 + C) e^m`` needs m >= 0 and is not used.)
Since z_j - z_y <= sqrt(2) ||z||, the lemma gets a rate: ``||z|| >= m / sqrt(2)``.

Source: the paper, "Theoretical Analysis" (lemma on logits, theorem on weights and gradients).
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from stable_forgetting.common.base.seeding import derive, generator
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.bounded.layer import BoundedLinear, adapted_layers
from stable_forgetting.common.bounded.phi import PHIS
from stable_forgetting.common.bounded.product import bounded_delta
from stable_forgetting.common.train.telemetry import first_nonfinite

WIDTHS = (64, 96, 96, 10)
RANK, ALPHA = 8, 16.0
ACTIVE = 0.5
"""|omega A B^T| above which phi is clearly not the identity: sin(.5) = .479, tanh(.5) = .462."""
SIDES = ("gap", "gap_soft", "tight", "paper", "norm")
Labelled = tuple[Tensor, Tensor]
"""Pixels (n, 64) in [0, 1], labels (n,) int64."""


@dataclass(frozen=True)
class Variant:
    """What is trained: all weights (``phi`` None) or adapters ``(alpha/r) phi(omega A B^T)``."""

    name: str
    phi: str | None
    omega: float = 1.0

    @property
    def bounded(self) -> bool:
        """Whether the certificate ||dW||_F <= (alpha/r) sqrt(d k) applies."""
        return self.phi is not None and PHIS[self.phi].bounded


@dataclass(frozen=True)
class Setting:
    """How it is trained.  ``lr`` is LoRA's; full ascent uses ``full_lr``; other omegas rescale."""

    optimizer: str
    rate: str
    scope: str
    activation: str
    lr: float
    full_lr: float

    def __str__(self) -> str:
        return f"{self.optimizer}, {self.rate}, {self.scope} layers, {self.activation}"

    def step_size(self, variant: Variant) -> float:
        """The rate that gives ``variant`` the same first change of the weights as LoRA.

        With A = 0 the change of dW is (alpha/r) omega dA B^T.  AdamW's dA does not depend on the
        size of the gradient, so lr / omega; SGD's carries another omega, so lr / omega^2.
        """
        if variant.phi is None:
            return self.full_lr
        return self.lr / variant.omega ** (2 if self.optimizer == "sgd" else 1)


def optimizer_of(
    model: nn.Module, kind: str, lr: float, *, ascend: bool = False
) -> torch.optim.Optimizer:
    """Plain SGD, or AdamW at its defaults without weight decay, on what is trained.

    On a GPU AdamW's step can be part of a CUDA graph.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr, maximize=ascend)
    on_card = parameters[0].is_cuda
    return torch.optim.AdamW(
        parameters, lr, weight_decay=0.0, maximize=ascend, fused=on_card, capturable=on_card
    )


def trained(losses: Iterable[Tensor], optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Each loss, after its step was taken; ends before one that is not finite.

    ``losses`` are computed as they are asked for, on the model as it then is.
    """
    for loss in losses:
        if first_nonfinite([("loss", loss)]):
            return
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def batches_of(data: Labelled, epochs: int, draw: torch.Generator) -> Iterator[Labelled]:
    """Shuffled batches of 128."""
    for _ in range(epochs):
        for batch in torch.randperm(len(data[1]), generator=draw).split(128):
            yield data[0][batch], data[1][batch]


def load_data(seed: int, probe: int = 400) -> tuple[Labelled, Labelled, Labelled]:
    """All 1797 digits; those of the class to forget (by ``seed``); a probe of the rest."""
    digits = load_digits()
    x = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    y = torch.tensor(digits.target, dtype=torch.int64)
    forget = y == derive(seed, "theory", "class") % WIDTHS[-1]
    rest = torch.nonzero(~forget).flatten()
    order = torch.randperm(len(rest), generator=generator(seed, "theory", "probe"))[:probe]
    return (x, y), (x[forget], y[forget]), (x[rest[order]], y[rest[order]])


def fit(data: Labelled, activation: str, seed: int, epochs: int = 25) -> nn.Sequential:
    """An MLP fitted to ``data``."""
    model = nn.Sequential()
    for layer, (d, k) in enumerate(pairwise(WIDTHS)):
        if layer:
            model.append({"relu": nn.ReLU, "tanh": nn.Tanh}[activation]())
        linear = nn.Linear(d, k)
        noise = torch.randn(k, d, generator=generator(seed, "theory", "init", layer))
        linear.weight.data = noise * math.sqrt(2.0 / d)
        nn.init.zeros_(linear.bias)
        model.append(linear)
    batches = batches_of(data, epochs, generator(seed, "theory", "batches"))
    losses = (F.cross_entropy(model(x), y) for x, y in batches)
    deque(trained(losses, optimizer_of(model, "adamw", 2e-3)), maxlen=0)
    return model


def variant_of(
    fitted: nn.Sequential, setting: Setting, variant: Variant, seed: int
) -> nn.Sequential:
    """A copy of the model, to be trained whole or through adapters."""
    model = copy.deepcopy(fitted)
    if variant.phi is not None:
        config = AdapterConfig(rank=RANK, alpha=ALPHA, phi=variant.phi, omega=variant.omega)
        model.requires_grad_(False)
        for layer in range(len(WIDTHS) - 1 - (setting.scope == "hidden")):
            draw = generator(seed, "theory", "B", layer)
            model[2 * layer] = BoundedLinear(cast(nn.Linear, model[2 * layer]), config, draw)
    return model


def logit_gap(logits: Tensor, labels: Tensor) -> Tensor:
    """m = max_{j != y} z_j - z_y, (n,), from logits (n, C) and labels (n,)."""
    y = labels[:, None]
    return logits.scatter(1, y, -math.inf).amax(1) - logits.gather(1, y)[:, 0]


def loss_bounds(gap: Tensor, classes: int) -> dict[str, Tensor]:
    """The four bounds of the module's inequality, each shaped as ``gap``; they cannot overflow."""
    zero = torch.zeros_like(gap)
    return {
        "gap": gap,
        "gap_soft": torch.logaddexp(zero, gap),
        "tight": torch.logaddexp(zero, gap + math.log(classes - 1)),
        "paper": torch.logaddexp(zero, gap + math.log(classes)),
    }


def loss_slacks(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Least slack of each side over the samples, in float64; negative beyond ``rounding`` refutes.

    Returns:
        ``gap``, ``gap_soft``, ``tight``, ``paper``, ``norm`` (||z|| - m / sqrt(2)) and ``rounding``
        (what float64 may lose at this size of the logits).
    """
    z = logits.detach().double()
    gap, loss = logit_gap(z, labels), F.cross_entropy(z, labels, reduction="none")
    bound = loss_bounds(gap, z.shape[1])
    slack = {k: float((loss - bound[k]).min()) for k in ("gap", "gap_soft")}
    slack |= {k: float((bound[k] - loss).min()) for k in ("tight", "paper")}
    slack["norm"] = float((z.norm(dim=1) - gap / math.sqrt(2)).min())
    slack["rounding"] = 8 * float(np.finfo(np.float64).eps) * (1 + float(z.abs().max()))
    return slack


@torch.no_grad()
def measure(
    model: nn.Module, logits: Tensor, forget: Labelled, retain: Labelled
) -> dict[str, float]:
    """Everything about one step, after its backward pass.

    ``certificate_ratio`` is the worst layer's ||dW||_F / ((alpha/r) sqrt(d k)); above 1 it breaks
    the certificate.  It is also reported for unbounded adapters, which promise nothing.
    """
    row = {f"slack_{side}": value for side, value in loss_slacks(logits, forget[1]).items()}
    row["loss"] = float(F.cross_entropy(logits.double(), forget[1]))
    row["logit_norm"] = float(logits.double().norm(dim=1).mean())
    gradients = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    row["gradient"] = math.sqrt(float(torch.stack(gradients).sum()))
    row["forget_accuracy"] = float((logits.argmax(1) == forget[1]).double().mean())
    row["retain_accuracy"] = float((model(retain[0]).argmax(1) == retain[1]).double().mean())
    layers = [layer for _, layer in adapted_layers(model)]
    last: Any = next(reversed([*model.children()]))
    row["last_weight"] = float(last.weight.double().norm())
    if not layers:
        return row
    deltas = [  # of unbounded adapters in float64: their size has no limit
        bounded_delta(layer.A, layer.Bt, layer.bound)
        if layer.bound.record.bounded
        else bounded_delta(layer.A.double(), layer.Bt.double(), layer.bound)
        for layer in layers
    ]
    if last in layers:
        row["last_weight"] = float((last.weight + deltas[-1]).double().norm())
    ratios = [float(d.double().norm()) / math.sqrt(d.numel()) * RANK / ALPHA for d in deltas]
    arguments = torch.cat(
        [
            (layer.A.double() @ layer.Bt.double()).flatten().abs() * layer.bound.frequency
            for layer in layers
        ]
    )
    return row | {
        "delta_norm": math.sqrt(sum(float(d.double().square().sum()) for d in deltas)),
        "certificate_ratio": max(ratios),
        "active_share": float((arguments > ACTIVE).double().mean()),
        "max_argument": float(arguments.max()),
    }


def ascend(
    fitted: nn.Sequential,
    data: tuple[Labelled, Labelled],
    setting: Setting,
    variant: Variant,
    *,
    seed: int,
    steps: int,
) -> tuple[list[dict[str, float]], int | None]:
    """One ascent of ``steps`` full-batch steps on the forget set's cross-entropy.

    Returns:
        :func:`measure` of every step from 0, before its update; and the first step that met a
        number that is not finite, which has no row and ends the ascent.
    """
    forget, retain = data
    model = variant_of(fitted, setting, variant, seed)
    optimizer = optimizer_of(model, setting.optimizer, setting.step_size(variant), ascend=True)
    rows: list[dict[str, float]] = []
    for step in range(steps + 1):
        logits = model(forget[0])
        loss = F.cross_entropy(logits, forget[1])
        loss.backward()
        moved = [p for p in model.parameters() if p.requires_grad]
        checked = [logits, loss, *moved, *(p.grad for p in moved if p.grad is not None)]
        if first_nonfinite(("any", tensor) for tensor in checked):
            return rows, step
        rows.append(measure(model, logits, forget, retain))
        optimizer.step()
        optimizer.zero_grad()
    return rows, None
