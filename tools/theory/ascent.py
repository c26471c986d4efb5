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

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from stable_forgetting.common.base.seeding import derive, generator
from stable_forgetting.common.bounded.phi import PHIS, Bound
from stable_forgetting.common.bounded.product import bounded_delta, bounded_linear
from stable_forgetting.common.train.optimizer import AdamW
from stable_forgetting.common.train.telemetry import first_nonfinite

WIDTHS = (64, 96, 96, 10)
RANK, ALPHA = 8, 16.0
SQUASH: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "tanh": torch.tanh}
ACTIVE = 0.5
"""|omega A B^T| above which phi is clearly not the identity: sin(.5) = .479, tanh(.5) = .462."""


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

    def step_size(self, variant: Variant) -> float:
        """The rate that gives ``variant`` the same first change of the weights as LoRA.

        With A = 0 the change of dW is (alpha/r) omega dA B^T.  AdamW's dA does not depend on the
        size of the gradient, so lr / omega; SGD's carries another omega, so lr / omega^2.
        """
        if variant.phi is None:
            return self.full_lr
        return self.lr / variant.omega ** (2 if self.optimizer == "sgd" else 1)


@dataclass(frozen=True)
class Data:
    """Forget set, a probe of the rest; pixels in [0, 1] (n, 64), labels (n,) int64."""

    forget: tuple[Tensor, Tensor]
    retain: tuple[Tensor, Tensor]


class AscentMLP(nn.Module):
    """A fitted MLP, trained whole or through adapters; keeps what the theory speaks of.

    After ``forward``, ``inputs[l]`` is a_{l-1} (n, d_l) and ``outputs[l]`` is h_l, or the logits
    for the last l (n, k_l), with its gradient retained: dL/dW_l is ``outputs[l].grad^T inputs[l]``
    for every variant.
    """

    def __init__(self, state: list[Tensor], setting: Setting, variant: Variant, seed: int):
        super().__init__()
        full = variant.phi is None
        self.variant = variant
        self.squash: Callable[[Tensor], Tensor] = SQUASH[setting.activation]
        self.weights = nn.ParameterList(nn.Parameter(w.clone(), full) for w in state[0::2])
        self.biases = nn.ParameterList(nn.Parameter(b.clone(), full) for b in state[1::2])
        depth = len(self.weights)
        self.adapted = [] if full else list(range(depth - (setting.scope == "hidden")))
        self.A, self.Bt = nn.ParameterDict(), nn.ParameterDict()
        for layer in self.adapted:
            k, d = self.weights[layer].shape
            noise = torch.rand(RANK, d, generator=generator(seed, "theory", "B", layer))
            self.A[str(layer)] = nn.Parameter(torch.zeros(k, RANK))
            self.Bt[str(layer)] = nn.Parameter((2 * noise - 1) / math.sqrt(d))
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Logits (n, C) of x (n, 64)."""
        self.inputs, self.outputs = [], []
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            self.inputs.append(x)
            x = self._linear(layer, x, weight, bias)
            if x.requires_grad:
                x.retain_grad()
            self.outputs.append(x)
            if layer < len(self.weights) - 1:
                x = self.squash(x)
        return x

    def _linear(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if layer not in self.adapted:
            return F.linear(x, weight, bias)
        A, Bt = self.A[str(layer)], self.Bt[str(layer)]
        return bounded_linear(x, weight, bias, A, Bt, self._bound())

    def _bound(self) -> Bound:
        assert self.variant.phi is not None, "only adapters have a bound"
        return Bound(self.variant.phi, ALPHA / RANK, self.variant.omega)

    @torch.no_grad()
    def deltas(self) -> dict[int, Tensor]:
        """dW (k, d) of each adapted layer: as used if bounded, else in float64."""
        deltas = {}
        for i in self.adapted:
            A, Bt = self.A[str(i)], self.Bt[str(i)]
            wide = (A, Bt) if self.variant.bounded else (A.double(), Bt.double())
            deltas[i] = bounded_delta(*wide, self._bound())
        return deltas

    @torch.no_grad()
    def arguments(self) -> Tensor:
        """All entries of |omega A B^T|, every adapted layer together, flat, float64."""
        factors = [(self.A[str(i)].double(), self.Bt[str(i)].double()) for i in self.adapted]
        parts = [(A @ Bt).flatten() for A, Bt in factors]
        return torch.cat(parts).abs() * self.variant.omega


class Updates:
    """Plain SGD, or AdamW at its defaults without weight decay; ``sign`` +1 ascends."""

    def __init__(self, parameters: Iterable[Tensor], kind: str, lr: float, sign: float):
        self.parameters = [p for p in parameters if p.requires_grad]
        self.rate = torch.tensor(-sign * lr, dtype=torch.float64)
        self.adamw = AdamW(self.parameters) if kind == "adamw" else None

    @torch.no_grad()
    def step(self) -> None:
        """Moves every parameter along its ``grad`` and clears it."""
        if self.adamw is not None:
            self.adamw.step(self.rate)
            return
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=float(self.rate))
            parameter.grad = None


def trained(
    model: nn.Module, losses: Iterable[Tensor], lr: float, kind: str = "adamw", sign: float = -1.0
) -> Iterator[Tensor]:
    """Each loss, after its step was taken; ends before one that is not finite.

    ``losses`` are computed as they are asked for, on the model as it then is.
    """
    updates = Updates(model.parameters(), kind, lr, sign)
    for loss in losses:
        if first_nonfinite([("loss", loss)]):
            return
        loss.backward()
        updates.step()
        yield loss


def batches_of(count: int, size: int, epochs: int, draw: torch.Generator) -> Iterator[Tensor]:
    """Indices of shuffled batches."""
    for _ in range(epochs):
        yield from torch.randperm(count, generator=draw).split(size)


def load_data(seed: int, probe: int = 400) -> tuple[tuple[Tensor, Tensor], Data]:
    """All 1797 digits, and the split that forgets one class (by ``seed``)."""
    digits = load_digits()
    x = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    y = torch.tensor(digits.target, dtype=torch.int64)
    forget = y == derive(seed, "theory", "class") % WIDTHS[-1]
    rest = torch.nonzero(~forget).flatten()
    order = torch.randperm(len(rest), generator=generator(seed, "theory", "probe"))[:probe]
    return (x, y), Data((x[forget], y[forget]), (x[rest[order]], y[rest[order]]))


def fit(data: tuple[Tensor, Tensor], activation: str, seed: int, epochs: int = 25) -> list[Tensor]:
    """Weights and biases of an MLP fitted to ``data``: [W_1, b_1, ..., W_L, b_L]."""
    state = []
    for layer, (d, k) in enumerate(pairwise(WIDTHS)):
        noise = torch.randn(k, d, generator=generator(seed, "theory", "init", layer))
        state += [noise * math.sqrt(2.0 / d), torch.zeros(k)]
    setting = Setting("adamw", "fit", "all", activation, 0.0, 2e-3)
    model = AscentMLP(state, setting, Variant("full", None), seed)
    batches = batches_of(len(data[1]), 128, epochs, generator(seed, "theory", "batches"))
    losses = (F.cross_entropy(model(data[0][batch]), data[1][batch]) for batch in batches)
    deque(trained(model, losses, setting.full_lr), maxlen=0)
    pairs = zip(model.weights, model.biases, strict=True)
    return [p.detach().clone() for pair in pairs for p in pair]


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


def loss_slacks(logits: Tensor, labels: Tensor) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Least slack of each side over the samples, in float64; negative beyond ``rounding`` refutes.

    Returns:
        Scalars ``gap``, ``gap_soft``, ``tight``, ``paper``, ``norm`` (||z|| - m / sqrt(2)) and
        ``rounding`` (what float64 may lose at this size of the logits); and, per sample, (n,)
        tensors ``gap``, ``loss`` and ``norm``.
    """
    z = logits.detach().double()
    gap, loss = logit_gap(z, labels), F.cross_entropy(z, labels, reduction="none")
    bound, norm = loss_bounds(gap, z.shape[1]), z.norm(dim=1)
    slack = {k: float((loss - bound[k]).min()) for k in ("gap", "gap_soft")}
    slack |= {k: float((bound[k] - loss).min()) for k in ("tight", "paper")}
    slack["norm"] = float((norm - gap / math.sqrt(2)).min())
    slack["rounding"] = 8 * float(np.finfo(np.float64).eps) * (1 + float(z.abs().max()))
    return slack, {"gap": gap, "loss": loss, "norm": norm}


@torch.no_grad()
def measure(model: AscentMLP, logits: Tensor, data: Data) -> tuple[dict[str, float], Tensor]:
    """Everything about one step that does not need a gradient; and the (n, 3) sample cloud."""
    slack, sample = loss_slacks(logits, data.forget[1])
    deltas, hidden = model.deltas(), model.inputs[-1]
    row = {f"slack_{name}": value for name, value in slack.items()}
    row["loss"] = float(sample["loss"].mean())
    row["logit_norm"] = float(sample["norm"].mean())
    row["activation_norm"] = float(hidden.double().norm(dim=1).max())
    residual = logits.softmax(1) - F.one_hot(data.forget[1], logits.shape[1])
    row["min_logit_gradient"] = float(residual.norm(dim=1).min())
    for layer, weight in enumerate(model.weights):
        total = weight + deltas[layer] if layer in deltas else weight
        row[f"weight_{layer + 1}"] = float(total.double().norm())
    row |= certificate(model, deltas)
    row["forget_accuracy"] = float((logits.argmax(1) == data.forget[1]).double().mean())
    correct = model(data.retain[0]).argmax(1) == data.retain[1]
    row["retain_accuracy"] = float(correct.double().mean())
    return row, torch.stack([sample["gap"], sample["loss"], sample["norm"]], 1)


def certificate(model: AscentMLP, deltas: dict[int, Tensor]) -> dict[str, float]:
    """How far dW is from (alpha/r) sqrt(d k), and whether phi is out of its linear range.

    ``certificate_ratio`` is the worst layer's; above 1 it breaks the certificate.  It is also
    reported for unbounded adapters, which promise nothing.
    """
    if not deltas:
        return {}
    cap = ALPHA / RANK
    ratios = [float(v.double().norm()) / (cap * math.sqrt(v.numel())) for v in deltas.values()]
    argument = model.arguments()
    return {
        "delta_norm": math.sqrt(sum(float(v.double().square().sum()) for v in deltas.values())),
        "certificate_ratio": max(ratios),
        "active_share": float((argument > ACTIVE).double().mean()),
        "max_argument": float(argument.max()),
    }


def gradient_norms(model: AscentMLP) -> dict[str, float]:
    """||dL/dW_l||_F of each layer's whole weight, and the norm over what is trained."""
    row = {}
    for layer, (a, h) in enumerate(zip(model.inputs, model.outputs, strict=True)):
        assert h.grad is not None
        row[f"gradient_{layer + 1}"] = float((h.grad.double().mT @ a.detach().double()).norm())
    trained = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    row["gradient_trained"] = math.sqrt(float(torch.stack(trained).sum()))
    return row


def ascend(
    state: list[Tensor], data: Data, setting: Setting, variant: Variant, *, seed: int, steps: int
) -> dict[str, Any]:
    """One ascent of ``steps`` full-batch steps on the forget set's cross-entropy.

    Stops at the first number that is not finite and says which; that step has no row.

    Returns:
        ``rows`` (one per step from 0, before its update), ``clouds`` (one (n, 3) tensor of gap,
        loss, ||z|| per row), ``nonfinite`` (None or ``{"step", "what"}``).
    """
    model = AscentMLP(state, setting, variant, seed)
    updates = Updates(model.parameters(), setting.optimizer, setting.step_size(variant), sign=1.0)
    rows: list[dict[str, float]] = []
    clouds: list[Tensor] = []
    for step in range(steps + 1):
        logits = model(data.forget[0])
        loss = F.cross_entropy(logits, data.forget[1])
        loss.backward()
        grads = [p.grad for p in updates.parameters if p.grad is not None]
        checks: dict[str, Sequence[Tensor]] = {
            "weights": updates.parameters,
            "logits": [logits],
            "loss": [loss],
            "gradients": grads,
        }
        bad = first_nonfinite((name, t) for name, tensors in checks.items() for t in tensors)
        if bad:
            return {"rows": rows, "clouds": clouds, "nonfinite": {"step": step, "what": bad}}
        gradients = gradient_norms(model)
        row, cloud = measure(model, logits, data)
        rows.append(row | gradients)
        clouds.append(cloud)
        updates.step()
    return {"rows": rows, "clouds": clouds, "nonfinite": None}
