"""RMU and adaptive RMU: steer hidden states of forget data to a random direction."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from stable_forgetting.common import objectives
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.numbers import NonNegative, Positive
from stable_forgetting.common.methods.base import BOTH, MethodInfo
from stable_forgetting.common.methods.gradient import AdaptedConfig, GradientMethod
from stable_forgetting.common.methods.task import UnlearnTask

if TYPE_CHECKING:
    from torch import nn


class RMU(GradientMethod):
    """RMU: hidden states of forget go to a random vector, those of retain stay Original's.

    Formula: minimise w_f mean ||h(B_f) - c u||^2 / H + w_r mean ||h(B_r) - h_ref(B_r)||^2 / H over
    positions, h the output of ``layer`` (H wide; a glob pattern that matches one module; default:
    the lower middle block), u a random unit vector of the run with non-negative entries.  Layers
    behind ``layer`` get no gradient; ``parameters`` limits further what is trained.
    ``positions: scored`` averages over the positions that predict the labels, ``all`` over every
    real token.  ``coefficient: relative`` takes c as a multiple of the mean norm of h on forget
    data, as hidden states of different models differ by orders of magnitude in size.
    ``compat: openunlearning`` takes the hidden states of the answers' tokens themselves, one later
    than those that predict them, and divides the sum over each sample's tokens by the number of
    every sample's, as a broadcast in that code does.
    Source: WMDP, arXiv 2403.03218 and its repository (c 6.5, w_r 1200, all tokens); open-unlearning
    (trainer/unlearn/rmu.py: c 2).
    """

    info = MethodInfo(1, "RMU, Li et al. 2024 (arXiv 2403.03218)", BOTH)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "openunlearning": {"compat": "openunlearning", "coefficient": "absolute", "c": 2.0},
        "wmdp": {"coefficient": "absolute", "c": 6.5, "positions": "all", "retain_weight": 1200.0},
    }

    class Config(AdaptedConfig):
        """Settings of RMU.

        Attributes:
            forget_weight: Weight of the forget distance; 1, as published.
            retain_weight: Weight of the retain distance; 1, as both are relative to the width.
            layer: Glob pattern of the one module that is steered; the lower middle block when
                absent.
            parameters: Glob patterns of the weights that are trained; all up to the layer.
            coefficient: Whether ``c`` is a multiple of the hidden states' norm or absolute; a
                multiple, as norms of models differ.
            c: Length of the random direction; 2, open-unlearning's.
            positions: Which positions count: those that predict labels (the default), or all
                tokens.
            compat: ``openunlearning``: as its code computes it.
        """

        later: ClassVar[Mapping[str, Any]] = {**AdaptedConfig.later, "compat": "none"}
        epochs_of: str | None = "forget"
        batch_size: int = 16
        lr: Positive = 3e-4
        forget_weight: NonNegative = 1.0
        retain_weight: NonNegative = 1.0
        layer: str | None = None
        parameters: tuple[str, ...] = ("*",)
        coefficient: Literal["relative", "absolute"] = "relative"
        c: Positive = 2.0
        positions: Literal["scored", "all"] = "scored"
        compat: Literal["none", "openunlearning"] = "none"

    def prepare(self, task: UnlearnTask) -> objectives.Objective:
        """Both distances, at one layer of the model and of a frozen copy."""
        from stable_forgetting.language.methods.hidden import (
            Positions,
            Steering,
            hidden_size,
            middle_block,
            random_direction,
        )

        config: Any = self.config
        layer = only(task.model, config.layer) if config.layer else middle_block(task.model)
        there = config.compat == "openunlearning"
        positions: Positions = "answers" if there else config.positions
        width, norm = hidden_size(task, layer, positions, config.micro_batch)
        c = config.c * (norm if config.coefficient == "relative" else 1.0)
        target = c * random_direction(width, task.generator("direction"))
        frozen = task.frozen_copy()
        if config.adapter is None:
            _train_only(task.model, config.parameters)
        device = next(task.model.parameters()).device
        return Steering(
            task.model,
            frozen,
            layer,
            task.forward,
            target.to(device),
            positions,
            config.forget_weight,
            config.retain_weight,
            "crossed" if there else config.average,
            config.coefficient == "adaptive",
        )


class AdaptiveRMU(RMU):
    """Adaptive RMU: RMU whose random vector is as long as Original's hidden state, times a factor.

    Formula: RMU's with c = beta ||h_ref||, h_ref Original's hidden state at the position.  The
    published code takes the mean norm on the first batch for all positions: RMU's ``coefficient:
    relative`` does so with that on all forget data.
    Source: Dang et al. 2024 (arXiv 2408.06223); RebelsNLU-jaist/llm-unlearning
    (baselines/adap_rmu/unlearn.py: beta 5, w_r 1200, all tokens).
    """

    info = MethodInfo(
        1, "Adaptive RMU, Dang et al. 2024 (arXiv 2408.06223)", BOTH, modality="language"
    )
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "published": {"positions": "all", "retain_weight": 1200.0},
    }

    class Config(RMU.Config):
        """Settings of adaptive RMU.

        Attributes:
            coefficient: ``c`` is a multiple of the norm at each position.
            c: beta; 5, as published.
            compat: Nobody's code is followed where it differs from the formula.
        """

        coefficient: Literal["adaptive"] = "adaptive"  # type: ignore[assignment]
        c: Positive = 5.0
        compat: Literal["none"] = "none"


def only(model: nn.Module, pattern: str) -> str:
    """Name of the one module that a glob pattern matches.

    Raises:
        ConfigError: It matches none, or several.
    """
    modules = fnmatch.filter([name for name, _ in model.named_modules() if name], pattern)
    if len(modules) != 1:
        raise ConfigError(
            f"layer: '{pattern}' matches {len(modules)} modules, not one; give a name such as "
            f"'{modules[0] if modules else 'transformer.h.3'}'"
        )
    return modules[0]


def _train_only(model: nn.Module, patterns: tuple[str, ...]) -> None:
    trained = 0
    for name, parameter in model.named_parameters():
        chosen = any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
        parameter.requires_grad_(chosen)
        trained += chosen
    if not trained:
        raise ConfigError(f"parameters: none of this model matches {', '.join(patterns)}")
