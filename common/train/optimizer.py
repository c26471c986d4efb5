"""Optimizers of the loop, and AdamW written out where they do not fit."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.train.config import FitConfig

BETAS = (0.9, 0.999)
"""Of AdamW, as torch's defaults, which the loop takes."""


BITSANDBYTES = {
    "adamw_8bit": "AdamW8bit",
    "paged_adamw_32bit": "PagedAdamW32bit",
    "paged_adamw_8bit": "PagedAdamW8bit",
}
"""Names in configs -> classes of the library.  Vectors keep 32 bits, as it decides itself."""


def make_optimizer(
    config: FitConfig, parameters: Mapping[str, nn.Parameter]
) -> torch.optim.Optimizer:
    """AdamW or SGD; weight decay on matrices only, the rates of ``lr_of`` where a name matches."""
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {
        (config.lr, True): [],
        (config.lr, False): [],
    }
    for name, parameter in parameters.items():
        matches = (lr for pattern, lr in config.lr_of.items() if fnmatch(name, pattern))
        rate = next(matches, config.lr)
        groups.setdefault((rate, parameter.ndim >= 2), []).append(parameter)
    options = [
        {"params": members, "lr": lr, "weight_decay": config.weight_decay if matrix else 0.0}
        for (lr, matrix), members in groups.items()
        if members
    ]
    if config.optimizer == "sgd":
        return torch.optim.SGD(options, lr=config.lr, momentum=config.momentum)
    if config.optimizer in BITSANDBYTES:
        made: torch.optim.Optimizer = _of_bitsandbytes(config.optimizer)(
            options, lr=config.lr, betas=BETAS, eps=config.eps
        )
        return made
    return torch.optim.AdamW(options, lr=config.lr, eps=config.eps, fused=True)


def check_patterns(config: FitConfig, names: Sequence[str]) -> None:
    """Refuses a pattern of ``lr_of`` that is the name of none of a model's parameters.

    One that names frozen parameters alone is not refused: the rows of a suite share its defaults.

    Raises:
        ConfigError: Naming the pattern, and names that there are.
    """
    for pattern in config.lr_of:
        if not any(fnmatch(name, pattern) for name in names):
            raise ConfigError(
                f"lr_of: no parameter matches '{pattern}'; the model's are called {names[0]} to "
                f"{names[-1]}"
            )


def _of_bitsandbytes(name: str) -> Any:
    """The class of an optimizer whose moments are small or paged."""
    try:
        optimizers = importlib.import_module("bitsandbytes.optim")
    except ImportError:
        raise ConfigError(
            f"optimizer: {name} needs bitsandbytes; install it, or take optimizer: adamw"
        ) from None
    return getattr(optimizers, BITSANDBYTES[name])


class AdamW:
    """AdamW with a rate per run, where torch's optimizer has one rate for all entries.

    It is also what small programs take that cannot wait for ``torch.optim`` to start.

    Formula: ``m <- b1 m + (1 - b1) g``, ``v <- b2 v + (1 - b2) g^2``; ``p <- (1 - lr decay) p -
    lr m / (1 - b1^t) / (sqrt(v) / sqrt(1 - b2^t) + eps)`` (Loshchilov and Hutter,
    arXiv 1711.05101).
    """

    def __init__(
        self, parameters: Sequence[Tensor], *, eps: float = 1e-8, weight_decay: float = 0.0
    ):
        self.parameters, self.eps, self.weight_decay = list(parameters), eps, weight_decay
        self.count = 0
        self._moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.parameters]

    @torch.no_grad()
    def step(self, rates: Tensor) -> None:
        """Moves every parameter and clears its gradient."""
        self.count += 1
        beta1, beta2 = BETAS
        correction = 1 - beta1**self.count, (1 - beta2**self.count) ** 0.5
        for parameter, (first, second) in zip(self.parameters, self._moments, strict=True):
            gradient = parameter.grad
            assert gradient is not None
            if self.weight_decay:
                parameter.mul_((1 - rates * self.weight_decay).to(parameter.dtype))
            first.lerp_(gradient, 1 - beta1)
            second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            scale = (second.sqrt() / correction[1]).add_(self.eps)
            parameter.sub_((rates / correction[0]).to(parameter.dtype) * first / scale)
            parameter.grad = None
