"""What a run measures of itself: divergence, norms, probes, logits, adapter statistics."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from stable_forgetting.common.bounded.layer import BoundedLinear, adapted_layers, reuse_weights
from stable_forgetting.common.bounded.quantised import dense_weight
from stable_forgetting.common.bounded.statistics import adapter_statistics
from stable_forgetting.common.data.batch import Batch, Forward
from stable_forgetting.common.objectives.objectives import Objective
from stable_forgetting.common.train.precision import tensor_float
from stable_forgetting.common.train.sharding import whole_tensor

LOOKED_AT: set[int] = set()
"""Ids of frozen parameters that a probe differentiates by, while it does."""


class DivergenceGuard:
    """Remembers at which step a loss first was not finite or above a cap.

    Args:
        cap: Largest absolute value of a loss.
        device: Where the losses lie; nothing waits for it.
        runs: K where K runs advance together, each with a guard of its own; None for one run.

    Attributes:
        first_bad: int64, () or (K,): the step, counted from 1; -1 where no loss was bad.
    """

    def __init__(self, cap: float, device: torch.device, runs: int | None = None):
        self.cap = cap
        self.first_bad = torch.full(() if runs is None else (runs,), -1, device=device)

    def watch(self, step: int, losses: Tensor) -> None:
        """Looks at the losses, (n,) or (n, K), of a step counted from 1."""
        fine = losses.isfinite().all(0) & (losses.abs() <= self.cap).all(0)
        self.first_bad = torch.where(~fine & (self.first_bad < 0), step, self.first_bad)


def first_nonfinite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Name of the first tensor that holds an infinity or a NaN."""
    return next((name for name, tensor in tensors if not bool(tensor.isfinite().all())), None)


class Instruments:
    """Measures a model in training and keeps the last and the largest value of each scalar.

    Attributes:
        last: Name -> value, of the last logged step.
        peak: Name -> largest finite value so far.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Mapping[str, nn.Parameter],
        component_of: Callable[[str], str],
        device: torch.device,
    ):
        self.model, self.trained = model, trained
        self.component_of, self.device = component_of, device
        self.last: dict[str, float] = {}
        self.peak: dict[str, float] = {}
        self._logits: tuple[Tensor, Tensor] | None = None

    def note(self, scalars: Mapping[str, float]) -> None:
        """Keeps the scalars of a logged step."""
        self.last = dict(scalars)
        for name, value in scalars.items():
            if math.isfinite(value):
                self.peak[name] = max(self.peak.get(name, -math.inf), value)

    def see(self, logits: Tensor) -> None:
        """Keeps mean and spread of a forward's logits; nothing waits for them."""
        values = logits.detach().float()
        self._logits = (values.mean(), values.std(correction=0))

    def logits(self) -> dict[str, float]:
        """``logits/mean`` and ``logits/spread`` of the last forward that was seen."""
        if self._logits is None:
            return {}
        mean, spread = self._logits
        return {"logits/mean": float(mean), "logits/spread": float(spread)}

    def adapters(self) -> dict[str, float]:
        """``adapter/*`` of the model, whose parameters must be whole."""
        return {f"adapter/{key}": v for key, v in adapter_statistics(self.model).items()}

    def norms(self, scale: float) -> dict[str, float]:
        """Frobenius norms of gradients and weights of what is trained, by component."""
        squares: dict[str, Tensor] = {}
        for name, parameter in self.trained.items():
            group = self._group(name)
            for kind, tensor, unit in (
                ("grad_norm", parameter.grad, scale),
                ("weight_norm", parameter, 1.0),
            ):
                if tensor is None:
                    continue
                key = f"{kind}/{group}"
                square = whole_tensor(tensor.detach().float().square().sum()) / unit**2
                square = square.to(self.device)
                squares[key] = squares[key] + square if key in squares else square
        return {key: math.sqrt(max(float(value), 0.0)) for key, value in squares.items()}

    def _group(self, name: str) -> str:
        leaf = name.rpartition(".")[2]
        return {"A": "A", "Bt": "B"}.get(leaf, self.component_of(name))

    def probe(
        self, objective: Objective, forward: Forward, batches: Mapping[str, Batch]
    ) -> dict[str, float]:
        """Gradient norms with respect to every effective weight matrix, frozen or not.

        The gradient with respect to a frozen W0 under an adapter is the gradient with respect to
        the effective weight W0 + dW: what the paper's dynamics figures show.  Looking changes
        nothing: random streams and running statistics are put back, and the loop puts back what
        an objective remembers.  One that takes its own gradient says nothing of frozen weights.
        """
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        matrices = {
            n: p for n, p in self.model.named_parameters() if p.ndim == 2 and p.is_floating_point()
        }
        frozen = [p for p in matrices.values() if not p.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
            LOOKED_AT.add(id(parameter))
        try:
            weights = {n: p for n, p in matrices.items() if n.rpartition(".")[2] not in ("A", "Bt")}
            with fork_rng(self.device):
                total = objective(forward, batches).total
            grads = torch.autograd.grad(total, list(weights.values()), allow_unused=True)
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
                LOOKED_AT.discard(id(parameter))
        with torch.no_grad():
            for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(before)
        squares: dict[str, float] = {}
        for name, grad in zip(weights, grads, strict=True):
            if grad is not None:
                key = f"probe_grad_norm/{self.component_of(name)}"
                squares[key] = squares.get(key, 0.0) + float(grad.float().square().sum())
        return {key: math.sqrt(value) for key, value in squares.items()} | self._effective_norms()

    def _effective_norms(self) -> dict[str, float]:
        layers = dict(adapted_layers(self.model))
        squares: dict[str, float] = {}
        with torch.no_grad():
            for name, module in self.model.named_modules():
                if isinstance(module, BoundedLinear):
                    weight: Tensor | None = layers[name].weight + layers[name].delta()
                elif isinstance(module, nn.Linear) and name.removesuffix(".base") not in layers:
                    weight = dense_weight(module)
                else:
                    continue
                if weight is None:
                    continue
                key = f"effective_weight_norm/{self.component_of(name + '.weight')}"
                squares[key] = squares.get(key, 0.0) + float(weight.float().square().sum())
        return {key: math.sqrt(value) for key, value in squares.items()}


def has_adapters(model: nn.Module) -> bool:
    """Whether adapters are attached."""
    return any(True for _ in adapted_layers(model))


def fork_rng(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Puts torch's global streams, the device's too, back at the end."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


@contextlib.contextmanager
def looking(model: nn.Module, device: torch.device) -> Iterator[None]:
    """The model in eval mode, its weights built once; random streams and modes are put back."""
    with fork_rng(device), reuse_weights(model), evaluating(model), tensor_float(device):
        yield


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode for a while; every module gets its own mode back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
