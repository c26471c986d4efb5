"""Methods that minimise an objective by gradient steps, through adapters or not."""

from __future__ import annotations

import fnmatch
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator

from stable_forgetting.common import objectives
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.numbers import Count, NonNegative, Positive
from stable_forgetting.common.bounded.config import AdapterConfig, Placement
from stable_forgetting.common.bounded.phi import PHIS
from stable_forgetting.common.methods.base import UnlearningMethod
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.protocol.family import among
from stable_forgetting.common.train.config import FitConfig

if TYPE_CHECKING:
    from torch import nn

    from stable_forgetting.common.train.protocols import AfterStep


class AdaptedConfig(FitConfig):
    """What is trained and how far it may move: the engine's config, plus adapter and constraints.

    Attributes:
        adapter: None trains the whole model.
        lr_scaling: ``slope`` divides lr by omega * phi'(0) (squared under SGD), so that every
            adapter starts with the same step in weight space; ``none`` takes lr as it is.
        weight_clip: Project A and B to [-c, c] after each step.
        ball: Scale A and B after each step so that ||dW||_F <= c ||W0||_F (ours).
        penalty: mu of mu * sum ||A B^T||_F^2.
    """

    steps: Count | None = 100
    batch_size: Count = 32
    lr: Positive = 3e-3
    adapter: AdapterConfig | None = None
    lr_scaling: Literal["slope", "none"] = "slope"
    weight_clip: Positive | None = None
    ball: Positive | None = None
    penalty: NonNegative = 0.0

    @model_validator(mode="after")
    def _constraints_need_adapters(self) -> AdaptedConfig:
        for name in ("weight_clip", "ball", "penalty"):
            if getattr(self, name) and self.adapter is None:
                raise ValueError(f"{name} constrains adapters; give adapter too")
            if getattr(self, name) and self.adapter and self.adapter.peft:
                raise ValueError(f"{name} constrains our own adapters; leave it or peft out")
        if self.ball and self.adapter and PHIS[self.adapter.phi].start == "random":
            phi = self.adapter.phi
            raise ValueError(f"ball is no certificate for phi: {phi}; use identity or a bound")
        return self

    def engine(self) -> FitConfig:
        """The engine's part, with the rate scaled as configured."""
        engine = FitConfig.of(self)
        if self.adapter is None or self.lr_scaling == "none":
            return engine
        return engine.for_adapters(self.adapter.slope)


GONE: Mapping[str, Any] = {"reading": "weighted", "alpha_r": 1e-5, "alpha_f": 1e-4}
"""Fields that records and stage keys of earlier versions hold, at the values that mean nothing."""


class GradientConfig(AdaptedConfig):
    """Config of gradient difference and its kin: what is trained, plus the objective.

    Attributes:
        forget_weight: Factor of the forget term, the sources' lambda (``lam`` means the same).
        retain_weight: Factor of the retain term.
        forget_loss: ``cross_entropy`` is ascent; ``unlikelihood`` is the saturating loss
            -log(1 - p_y).
    """

    aliases: ClassVar[Mapping[str, str]] = {"lam": "forget_weight"}
    stored: ClassVar[Mapping[str, str]] = {"forget_weight": "lam"}
    epochs_of: str | None = "forget"
    forget_weight: NonNegative = 0.1
    retain_weight: NonNegative = 1.0
    forget_loss: Literal["cross_entropy", "unlikelihood"] = "cross_entropy"

    @model_validator(mode="before")
    @classmethod
    def _without_what_is_gone(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        return {k: v for k, v in data.items() if k not in GONE or v != GONE[k]}

    def identity(self) -> dict[str, Any]:
        """With the fields that the first stage keys were made with."""
        fields = super().identity()
        if fields["retain_weight"] == 1:
            del fields["retain_weight"]
        return {**fields, **GONE}


PAPER_LITERAL: Mapping[str, Mapping[str, Any]] = {
    "paper_literal": {
        "lr": 1e-5,
        "forget_weight": 10.0,
        "steps": 500,
        "batch_size": 128,
        "lr_scaling": "none",
    },
    "paper_two_rates": {
        "optimizer": "sgd",
        "lr": 1.0,
        "weight_decay": 0.0,
        "retain_weight": 1e-5,
        "forget_weight": 1e-4,
        "steps": 500,
        "batch_size": 128,
        "lr_scaling": "none",
    },
}
"""The paper's vision settings in both readings of its rates, alpha_r 1e-5 and alpha_f 1e-4: their
ratio as lambda, or the update rule literally, SGD of rate 1 on alpha_r L_r - alpha_f L_f (500
iterations, no clipping).  Its adapter dropout of 0.05 is not applied; see :data:`PAPER_ADAPTER`."""

PAPER_ADAPTER: Mapping[str, Mapping[str, Any]] = {
    **PAPER_LITERAL,
    "paper_dropout": {
        **PAPER_LITERAL["paper_literal"],
        "adapter": {"mode": "split", "dropout": 0.05},
    },
}
"""The same for methods with an adapter, and ``paper_literal`` with the paper's adapter dropout."""


def adapter_targets(
    task: UnlearnTask, placement: Placement, targets: Sequence[str] | None
) -> Sequence[str]:
    """Patterns of the layers that get an adapter: ``targets``, or the model's for a placement.

    Raises:
        ConfigError: The model has none for the placement.
    """
    of_model = task.family.targets
    patterns = targets or of_model.get(placement, ())
    if not patterns:
        others, layers = ", ".join(of_model), among(task.family.layers)
        ways = [f"choose another placement ({others})"] if others else []
        ways += [f"give adapter.targets{layers}", "or choose a method without an adapter"]
        raise ConfigError(
            f"adapter: this model has no layers for placement: {placement}; {', '.join(ways)}"
        )
    return patterns


class AdaptedMethod(UnlearningMethod):
    """A method whose config may put an adapter in the place of the whole model.

    Its ``unlearn`` calls :meth:`_attach` once, then ``task.fit`` with ``**self._constraints()``; so
    every such method crosses with every parametrisation in suite rows.
    """

    Config: ClassVar[type[Strict]] = AdaptedConfig

    def _attach(self, task: UnlearnTask) -> None:
        """Freezes ``task.model`` and attaches the configured adapter; without one, nothing."""
        from stable_forgetting.common.bounded.attach import attach

        adapter: AdapterConfig | None = self.config.adapter
        if adapter is None:
            return
        patterns = adapter_targets(task, adapter.placement, adapter.targets)
        head = tuple(task.family.head) if adapter.train_head else ()
        wanted: list[tuple[str, tuple[str, ...]]]
        wanted = [("trained", (pattern,)) for pattern in adapter.trained]
        if adapter.train_head:
            wanted.append(("train_head", head))
        names = [name for name, _ in task.model.named_parameters(remove_duplicate=False)]
        for key, either in wanted:
            if not any(fnmatch.filter(names, pattern) for pattern in either):
                raise ConfigError(
                    f"adapter.{key}: no parameter is called {' or '.join(either) or 'so'}; "
                    "leave it off"
                )
        trainable = (*head, *adapter.trained)
        attach(task.model, patterns, adapter, task.generator("adapter"), trainable=trainable)

    def _constraints(self, *after_step: AfterStep) -> dict[str, Any]:
        """What a fit takes of the config's constraints, and ``after_step`` behind them."""
        from stable_forgetting.common.bounded import attach as bounded

        config: AdaptedConfig = self.config
        hooks: list[AfterStep] = []
        if config.weight_clip is not None:
            threshold = config.weight_clip
            hooks.append(lambda model: bounded.clip_factors_(model, threshold))
        if config.ball is not None:
            c = config.ball
            hooks.append(lambda model: {"adapter/at_ball": bounded.project_ball_(model, c)})
        penalty = (
            (lambda model: config.penalty * bounded.factor_penalty(model))
            if config.penalty
            else None
        )
        return {"after_step": [*hooks, *after_step], "penalty": penalty}


class GradientMethod(AdaptedMethod):
    """Objective + parameters -> method: attach an adapter (or not), fit, constrain."""

    Config: ClassVar[type[Strict]] = GradientConfig

    @abstractmethod
    def prepare(self, task: UnlearnTask) -> objectives.Objective:
        """What is minimised; called while ``task.model`` still is Original, without adapters."""

    def loaders(self, task: UnlearnTask, parts: Sequence[str], config: FitConfig) -> Any:
        """One stream of batches per part that the objective reads."""
        return task.loaders(parts, config)

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Runs the objective on the parts that it names."""
        objective = self.prepare(task)
        config = self.config.engine()
        self._attach(task)
        loaders = self.loaders(task, objective.parts, config)
        task.fit(task.model, objective, loaders, config, **self._constraints())
        return task.model


class ShortConfig(AdaptedConfig):
    """A short run on a vision transformer, of the whole model or of an adapter.

    AdamW with weight decay 0.05, lr 1e-4 and a cosine are what the SFRon repository uses for
    fine-tuning, random labels, SalUn, SCRUB and Bad Teacher on a Swin-T (there: one epoch, batches
    of 128).  Sweep lr from 1e-5 to 1e-3; small models from scratch want more.
    """

    steps: Count | None = None
    epochs: Count | None = 3
    batch_size: Count = 64
    lr: Positive = 1e-4
    weight_decay: NonNegative = 0.05
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
