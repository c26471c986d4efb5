"""K gradient-difference runs in one forward: same start, same batches, other rates and weights.

The runs of a sweep differ only in the learning rate and in the weight of the forget term.
Their frozen backbones are one, so K copies of a batch go through it together, and an adapted layer
is a batched product.  No modality: any model that treats its samples independently will do, as its
adapted layers then see K * N rows in K blocks.  It is :func:`common.train.fit.fit` on
``gradient_difference``, run by run, up to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stable_forgetting.common.bounded.attach import ball_radius, clip_layer_, project_layer_
from stable_forgetting.common.bounded.layer import BoundedLinear, adapted_layers
from stable_forgetting.common.bounded.product import bounded_delta
from stable_forgetting.common.data.batch import Batch
from stable_forgetting.common.data.loader import Loader
from stable_forgetting.common.objectives.objectives import joint_logits
from stable_forgetting.common.objectives.positions import average, cross_entropy, unlikelihood
from stable_forgetting.common.objectives.terms import ForgetLoss, PositionLoss
from stable_forgetting.common.train.config import FitConfig, learning_rate
from stable_forgetting.common.train.optimizer import AdamW
from stable_forgetting.common.train.protocols import ModelForward
from stable_forgetting.common.train.telemetry import DivergenceGuard, first_nonfinite


class BatchedLinear(nn.Module):
    """K adapters on one frozen ``nn.Linear``.

    Attributes:
        A: (K, k, r).
        Bt: (K, r, d).
    """

    def __init__(self, layer: BoundedLinear, copies: int):
        super().__init__()
        assert type(layer) is BoundedLinear, "copies share a dense weight"
        assert layer.start is None and not layer.config.dropout, "no start and no dropout"
        self.weight, self.bias = layer.weight, layer.bias
        self.bound = layer.bound
        self.A = nn.Parameter(layer.A.detach().repeat(copies, 1, 1))
        self.Bt = nn.Parameter(layer.Bt.detach().repeat(copies, 1, 1))

    def delta(self) -> Tensor:
        """Dense dW of every copy, (K, k, d)."""
        return bounded_delta(self.A, self.Bt, self.bound)

    def forward(self, x: Tensor) -> Tensor:
        """(K * N, ..., d) in K blocks -> (K * N, ..., k)."""
        rows = x.reshape(len(self.A), -1, x.shape[-1])
        if self.bound.record.linear:
            base = F.linear(rows, self.weight, self.bias)
            scale = self.bound.amplitude * self.bound.frequency
            y = torch.baddbmm(base, rows @ self.Bt.mT, self.A.mT, alpha=scale)
        else:
            y = rows @ (self.weight + self.delta()).mT
            y = y if self.bias is None else y + self.bias
        return y.reshape(*x.shape[:-1], y.shape[-1])


CHANCES = ("p", "prob", "drop_prob", "dropout", "attention_dropout")
"""What layers call their chance to leave something out: dropout, stochastic depth, attention."""


def samples_are_independent(model: nn.Module) -> bool:
    """Whether no layer mixes the samples of a batch or draws at random: what batching needs."""
    batch_norm = nn.modules.batchnorm._BatchNorm
    return not any(isinstance(m, batch_norm) or _draws(m) for m in model.modules())


def _draws(module: nn.Module) -> bool:
    chances = (vars(module).get(name) for name in CHANCES)
    return any(isinstance(chance, float | int) and chance > 0 for chance in chances)


class BatchedTraining:
    """K runs of gradient difference on an adapted model, advanced together.

    Formula: run k minimises ``CE(B_r) + w_k forget_term(B_f)`` with AdamW of rate ``lr_k``.

    Args:
        model: With adapters attached; its adapted layers are replaced, in place.
        loaders: ``retain`` and ``forget``; every run sees the same batches.
        config: What the runs share; ``lr`` counts only through its schedule.
        forward: (model, batch) -> logits.
        rates: (K,) learning rates, as the optimizer takes them.
        weights: (K,) weights of the forget term.
        total: Optimizer steps in all (schedules need to know).
        ball: c of the Frobenius ball, or None.
        weight_clip: Projects every entry of A and B to [-c, c], or None.

    Attributes:
        guard: Its ``first_bad`` is (K,).
        losses: Name -> (K,), of the last step.
    """

    def __init__(
        self,
        model: nn.Module,
        loaders: Mapping[str, Loader],
        config: FitConfig,
        *,
        forward: ModelForward,
        rates: Sequence[float],
        weights: Sequence[float],
        total: int,
        forget_loss: ForgetLoss = "cross_entropy",
        ball: float | None = None,
        weight_clip: float | None = None,
    ):
        assert len(rates) == len(weights) > 0, "one rate and one weight per run"
        assert samples_are_independent(model), "batch statistics or dropout would join the runs"
        assert config.optimizer == "adamw" and config.accumulation == 1, "AdamW, whole batches"
        self.model, self.loaders, self.config = model, loaders, config
        self.forget_loss, self.total = forget_loss, total
        self.ball, self.weight_clip = ball, weight_clip
        self._forward = forward
        device = next(model.parameters()).device
        self.copies = len(rates)
        self.rates = torch.tensor(rates, dtype=torch.float64, device=device)
        self.weights = torch.tensor(weights, dtype=torch.float32, device=device)
        self.layers = {
            name: BatchedLinear(layer, self.copies) for name, layer in adapted_layers(model)
        }
        for name, batched in self.layers.items():
            model.set_submodule(name, batched)
        self._trained = [p for layer in self.layers.values() for p in (layer.A, layer.Bt)]
        self.optimizer = AdamW(self._trained, eps=config.eps, weight_decay=config.weight_decay)
        self.guard = DivergenceGuard(config.loss_cap, device, self.copies)
        self.steps = 0
        self.losses: dict[str, Tensor] = {}
        self._outside = torch.zeros(self.copies, device=device)

    @property
    def at_ball(self) -> list[float]:
        """Per run, the share of (step, layer) pairs that were projected."""
        return (self._outside / max(self.steps * len(self.layers), 1)).tolist()

    def shares_beyond(self, thresholds: Sequence[float]) -> list[list[float]]:
        """Per run and threshold, the share of entries with |frequency * A B^T| above it."""
        beyond, entries = torch.zeros(self.copies, len(thresholds)), 0
        with torch.no_grad():
            for layer in self.layers.values():
                z = (layer.bound.frequency * (layer.A @ layer.Bt)).abs()
                for index, threshold in enumerate(thresholds):
                    beyond[:, index] += (z > threshold).sum((-2, -1)).cpu()
                entries += z[0].numel()
        return (beyond / entries).tolist()

    def run_to(self, step: int) -> None:
        """Trains until ``step`` optimizer steps are done."""
        self.model.train()
        while self.steps < step and not bool((self.guard.first_bad > 0).all()):
            self._step()

    def finite(self, run: int) -> bool:
        """Whether a run's losses stayed finite and its factors are."""
        bad = int(self.guard.first_bad[run]) > 0
        return not bad and first_nonfinite(("factor", p[run]) for p in self._trained) is None

    @torch.no_grad()
    def write_(self, plain: nn.Module, run: int) -> None:
        """Writes run ``run``'s merged weights W0 + dW into a model without adapters."""
        for name, layer in self.layers.items():
            delta = bounded_delta(layer.A[run], layer.Bt[run], layer.bound)
            plain.get_submodule(name).get_parameter("weight").copy_(layer.weight + delta)

    def _step(self) -> None:
        retain, forget = self.loaders["retain"].next(), self.loaders["forget"].next()
        retain_logits, forget_logits = joint_logits(self._logits, [retain, forget])
        retain_loss = self._mean(cross_entropy, retain_logits, retain.labels)
        forget_loss = self._mean(cross_entropy, forget_logits, forget.labels)
        term = -forget_loss
        if self.forget_loss == "unlikelihood":
            term = self._mean(unlikelihood, forget_logits, forget.labels)
        totals = retain_loss + self.weights * term
        torch.autograd.backward(totals.sum())
        self.losses = {"retain_loss": retain_loss.detach(), "forget_loss": forget_loss.detach()}
        self.guard.watch(self.steps + 1, torch.stack([totals.detach(), *self.losses.values()]))
        factor = learning_rate(self.config, self.steps, self.total) / self.config.lr
        self.optimizer.step((self.rates * factor)[:, None, None])
        self._constrain()
        self.steps += 1

    def _logits(self, batch: Batch) -> Tensor:
        """(N, K, ..., C): the sample first, so that batches can be split."""
        inputs = {
            name: tensor.repeat(self.copies, *(1,) * (tensor.ndim - 1))
            for name, tensor in batch.inputs.items()
        }
        tiled = Batch(inputs, batch.labels, batch.indices)
        logits = self._forward(self.model, tiled)
        return logits.view(self.copies, -1, *logits.shape[1:]).transpose(0, 1)

    def _mean(self, loss: PositionLoss, logits: Tensor, labels: Tensor) -> Tensor:
        """(K,) mean losses of (N, K, ..., C) logits."""
        tiled = labels.repeat(self.copies, *(1,) * (labels.ndim - 1))
        values = loss(logits.transpose(0, 1).flatten(0, 1), tiled)
        runs = values.view(self.copies, *labels.shape)
        return torch.stack([average(run, labels, self.config.average) for run in runs])

    @torch.no_grad()
    def _constrain(self) -> None:
        for layer in self.layers.values():
            if self.weight_clip is not None:
                clip_layer_(layer, self.weight_clip)
            if self.ball is not None:
                self._outside += project_layer_(layer, ball_radius(layer, self.ball))
