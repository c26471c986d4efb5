"""What an unlearning method is, what it is given, and the gradient methods' common body.

This module and :mod:`common.baselines` import torch only inside functions: listing and planning
read classes and configs, and must answer at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from common.config import Strict, did_you_mean, merge, validate
from common.errors import AccessError, ConfigError
from common.registry import METHODS
from common.schemas import AdapterConfig, FitConfig, NonNegative, Positive
from common.seeding import derive, generator

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn

    from common.engine import AfterStep, FitResult, ModelForward, ScalarSink, Stateful, Watch
    from common.loading import Batch, Forward, Loader, Source
    from common.objectives import Objective
    from common.splits import ForgetSplit


@dataclass(frozen=True)
class MethodInfo:
    """Facts about a method that the harness enforces or prints.

    Attributes:
        version: Raised whenever the same config would give other numbers.
        paper: Where the method comes from.
        access: Parts that it may read (``forget``, ``retain``; rarely ``validation`` and the
            ``validation_forget`` of class forgetting); ``initial`` allows a fresh model.
            Asking for anything else raises.
        scenarios: Scenarios it applies to; empty means all.
        changes_model: False for Original.
        modality: The benchmarks that it understands, such as ``vision``; empty means all.
    """

    version: int
    paper: str
    access: frozenset[str]
    scenarios: frozenset[str] = frozenset()
    changes_model: bool = True
    modality: str = ""

    def inapplicable(self, *, scenario: str, modality: str) -> str | None:
        """Why the method says nothing about a benchmark, in words; None where it applies.

        A scenario or a modality that is not known (empty) rules nothing out.
        """
        if self.modality and modality and self.modality != modality:
            return f"for {self.modality} benchmarks only"
        if self.scenarios and scenario and scenario not in self.scenarios:
            return f"for {', '.join(sorted(self.scenarios))} forgetting only"
        return None


@dataclass(frozen=True)
class _Offset:
    """A sink whose steps go on where the method's last fit ended."""

    sink: ScalarSink
    steps: int

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Records at the step counted over all fits."""
        self.sink.scalars(step + self.steps, values)


@dataclass
class UnlearnTask:
    """Everything a method gets: a model, guarded data, and the engine's wiring.

    Attributes:
        model: A copy of Original that the method may change and return.
        source: The modality's data source.
        split: The frozen index sets.
        access: What the method declared.
        forward: (model, batch) -> logits.
        recipe: How Original was trained.
        num_classes: Width of the logits.
        targets: Adapter target patterns by placement.
        head: Parameter-name patterns of the classifier head.
        component_of: Parameter name -> component (mlp, attention, head, other).
        build: Makes a fresh, seeded, untrained (or pretrained) model; needs ``initial``.
        seed: Of this run.
        replicate: 0, or which further Retrain this is.
        tracker: Where scalars go.
        checkpoint: File for mid-run checkpoints.
        progress: Called with (steps done, steps in all).
        watch: Evaluates the model in training, for configs with ``evaluate_every``.
    """

    model: nn.Module
    source: Source
    split: ForgetSplit
    access: frozenset[str]
    forward: ModelForward
    recipe: FitConfig
    num_classes: int
    targets: Mapping[str, Sequence[str]]
    head: Sequence[str]
    component_of: Callable[[str], str]
    build: Callable[[], nn.Module]
    seed: int
    replicate: int = 0
    tracker: ScalarSink | None = None
    checkpoint: Path | None = None
    progress: Callable[[int, int], None] | None = None
    watch: Watch | None = None
    results: list[FitResult] = field(default_factory=list)

    def _guard(self, *wanted: str) -> None:
        for part in wanted:
            if part not in self.access:
                raise AccessError(
                    f"the method asked for '{part}' but declares only "
                    f"{sorted(self.access)}; add it to info.access"
                )

    def indices(self, *parts: str) -> np.ndarray:
        """The union of parts, sorted; only declared parts are given out."""
        import numpy as np

        self._guard(*parts)
        return np.sort(np.concatenate([self.split.parts[part] for part in parts]))

    def generator(self, *names: str | int) -> torch.Generator:
        """An independent random stream of this run."""
        return generator(self.seed, "method", self.replicate, *names)

    def loader(self, *parts: str, batch_size: int, augment: bool = True) -> Loader:
        """An endless shuffled stream over the union of parts, with its own generator."""
        from common.loading import Loader

        return Loader(
            self.source,
            self.indices(*parts),
            batch_size,
            self.generator("batches", *parts),
            augment=augment,
        )

    def loaders(self, parts: Sequence[str], config: FitConfig) -> dict[str, Loader]:
        """One loader per part, with the config's micro-batch size."""
        micro = max(1, config.batch_size // config.accumulation)
        return {part: self.loader(part, batch_size=micro) for part in parts}

    def frozen_copy(self) -> nn.Module:
        """A copy of the model as it is now: in eval mode, without gradients."""
        import copy

        return copy.deepcopy(self.model).requires_grad_(False).eval()

    def reference(self) -> Forward:
        """Batch -> logits of a frozen copy of the model as it is now, without gradients.

        Call it before training: the copy is Original.  It is in eval mode, so that a teacher does
        not depend on dropout.
        """
        import torch

        frozen = self.frozen_copy()

        @torch.no_grad()
        def forward(batch: Batch) -> torch.Tensor:
            return self.forward(frozen, batch)

        return forward

    def fresh_model(self) -> nn.Module:
        """A model as it was before it saw any training data of the task."""
        self._guard("initial")
        return self.build()

    def fit(
        self,
        model: nn.Module,
        objective: Objective,
        loaders: Mapping[str, Loader],
        config: FitConfig,
        *,
        after_step: Sequence[AfterStep] = (),
        penalty: Callable[[nn.Module], torch.Tensor] | None = None,
        stateful: Mapping[str, Stateful] | None = None,
    ) -> FitResult:
        """:func:`common.engine.fit` with this task's wiring; call it once or several times."""
        from common.engine import fit

        stage = len(self.results)
        path = self.checkpoint
        if path is not None and stage:
            path = path.with_name(f"{path.stem}-{stage}{path.suffix}")
        result = fit(
            model,
            objective,
            loaders,
            config,
            forward=self.forward,
            seed=derive(self.seed, "engine", self.replicate, stage),
            tracker=self.tracker and _Offset(self.tracker, sum(r.steps for r in self.results)),
            after_step=after_step,
            penalty=penalty,
            checkpoint=path,
            stateful=stateful,
            component_of=self.component_of,
            progress=self.progress,
            watch=self._watch(),
        )
        self.results.append(result)
        return result

    def _watch(self) -> Watch | None:
        """The watch with steps counted over all fits."""
        watch, before = self.watch, sum(result.steps for result in self.results)
        return watch and (lambda model, step: watch(model, before + step))


class UnlearningMethod(ABC):
    """A baseline: one class, one file or less.

    Its ``Config`` is the only place for defaults; ``presets`` are named sets of overrides;
    ``quick`` overrides make the checks' runs short where ``steps`` or ``epochs`` alone do not.
    """

    info: ClassVar[MethodInfo]
    Config: ClassVar[type[Strict]] = Strict
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    quick: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, config: Strict):
        self.config: Any = config

    @abstractmethod
    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Returns the unlearned model: ``task.model`` changed in place, or another one.

        A model returned with adapters attached is stored as an adapter and merged for evaluation.
        """


def train_reference(task: UnlearnTask, parts: Sequence[str]) -> nn.Module:
    """Trains a fresh model on the union of parts with the task's recipe (Original, Retrain)."""
    from common.loading import Loader
    from common.objectives import CrossEntropy

    model = task.fresh_model()
    micro = max(1, task.recipe.batch_size // task.recipe.accumulation)
    loader = Loader(task.source, task.indices(*parts), micro, task.generator("train"))
    task.fit(model, CrossEntropy("train"), {"train": loader}, task.recipe)
    return model


def resolve_config(
    name: str, preset: str | None, params: Mapping[str, Any], *, origin: str
) -> Strict:
    """A method's full config: its defaults, then a preset, then ``params``.

    Where a later one gives ``steps`` or ``epochs`` alone, the other of an earlier one is dropped.
    """
    cls = METHODS[name]
    overrides: Mapping[str, Any] = {}
    if preset is not None:
        if preset not in cls.presets:
            hint = did_you_mean(preset, list(cls.presets)) or "; it has none"
            raise ConfigError(f"{origin}: method '{name}' has no preset '{preset}'{hint}")
        overrides = cls.presets[preset]
    config = cls.Config().model_dump()
    for layer in (overrides, params):
        config = merge(config, layer)
        for given, other in (("epochs", "steps"), ("steps", "epochs")):
            if layer.get(given) is not None and other not in layer and other in config:
                config[other] = None
    return validate(cls.Config, config, origin)


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

    steps: Annotated[int, Field(ge=1)] | None = 100
    batch_size: Annotated[int, Field(ge=1)] = 32
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
        if self.ball and self.adapter and self.adapter.phi == "relu":
            raise ValueError("ball is no certificate for phi: relu; use identity or a bound")
        return self

    def engine(self) -> FitConfig:
        """The engine's part, with the rate scaled as configured."""
        fields = {name: getattr(self, name) for name in FitConfig.model_fields}
        if self.adapter is not None and self.lr_scaling == "slope":
            power = 2 if self.optimizer == "sgd" else 1
            fields["lr"] = self.lr / self.adapter.slope**power
        return FitConfig(**fields)


class GradientConfig(AdaptedConfig):
    """Config of gradient difference and its kin: what is trained, plus the objective.

    Attributes:
        lam: Weight lambda of the forget term; the retain weight alpha_r is normalised to 1.
        forget_loss: ``cross_entropy`` is ascent; ``unlikelihood`` is -log(1 - p_y), which
            saturates.
        reading: ``weighted``: one optimizer on L_r - lambda L_f.  ``two_rates``: the paper's
            update rule literally, SGD of rate 1 on alpha_r L_r - alpha_f L_f.
        alpha_r: Retain rate of ``two_rates``.
        alpha_f: Forget rate of ``two_rates``.
    """

    lam: NonNegative = 0.1
    forget_loss: Literal["cross_entropy", "unlikelihood"] = "cross_entropy"
    reading: Literal["weighted", "two_rates"] = "weighted"
    alpha_r: Positive = 1e-5
    alpha_f: Positive = 1e-4

    def engine(self) -> FitConfig:
        """The engine's part, with the rate scaled as configured."""
        if self.reading == "weighted":
            return super().engine()
        fields = {name: getattr(self, name) for name in FitConfig.model_fields}
        fields |= {"optimizer": "sgd", "lr": 1.0, "momentum": 0.0, "weight_decay": 0.0}
        return FitConfig(**fields)


PAPER_LITERAL: Mapping[str, Mapping[str, Any]] = {
    "paper_literal": {
        "lr": 1e-5,
        "lam": 10.0,
        "steps": 500,
        "batch_size": 128,
        "lr_scaling": "none",
    },
    "paper_two_rates": {
        "reading": "two_rates",
        "alpha_r": 1e-5,
        "alpha_f": 1e-4,
        "steps": 500,
        "batch_size": 128,
    },
}
"""The paper's vision settings in both readings of its rates (alpha_r 1e-5, alpha_f 1e-4, 500
iterations, no clipping).  Its adapter dropout of 0.05 is not applied; see :data:`PAPER_ADAPTER`."""

PAPER_ADAPTER: Mapping[str, Mapping[str, Any]] = {
    **PAPER_LITERAL,
    "paper_dropout": {
        **PAPER_LITERAL["paper_literal"],
        "adapter": {"mode": "split", "dropout": 0.05},
    },
}
"""The same for methods with an adapter, and ``paper_literal`` with the paper's adapter dropout."""


class AdaptedMethod(UnlearningMethod):
    """A method whose config may put an adapter in the place of the whole model.

    Its ``unlearn`` calls :meth:`_attach` once, then :meth:`_train` once or several times; so every
    such method crosses with every parametrisation in suite rows.
    """

    Config: ClassVar[type[Strict]] = AdaptedConfig

    def _attach(self, task: UnlearnTask) -> None:
        """Freezes ``task.model`` and attaches the configured adapter; without one, nothing."""
        from common.adapters import attach

        adapter: AdapterConfig | None = self.config.adapter
        if adapter is None:
            return
        patterns = adapter.targets or task.targets.get(adapter.placement, ())
        if not patterns:
            known = ", ".join(task.targets)
            raise ConfigError(
                f"adapter: this model has no layers for placement: {adapter.placement} (known: "
                f"{known}); choose another or give targets"
            )
        head = task.head if adapter.train_head else ()
        attach(task.model, patterns, adapter, task.generator("adapter"), trainable=head)

    def _train(
        self,
        task: UnlearnTask,
        objective: Objective,
        loaders: Mapping[str, Loader],
        *,
        config: FitConfig | None = None,
        after_step: Sequence[AfterStep] = (),
        stateful: Mapping[str, Stateful] | None = None,
    ) -> FitResult:
        """Fits ``task.model`` under the configured constraints.

        Args:
            task: Holds the model.
            objective: What is minimised.
            loaders: One stream per part of the objective.
            config: Replaces the config's own engine part (another length or batch size).
            after_step: Called after the constraints.
            stateful: Further states for checkpoints.
        """
        return task.fit(
            task.model,
            objective,
            loaders,
            config or self.config.engine(),
            after_step=[*self._constraints(), *after_step],
            penalty=self._penalty(),
            stateful=stateful,
        )

    def _constraints(self) -> list[AfterStep]:
        from common.adapters import clip_factors_, project_ball_

        config: AdaptedConfig = self.config
        hooks: list[AfterStep] = []
        if config.weight_clip is not None:
            threshold = config.weight_clip
            hooks.append(lambda model: clip_factors_(model, threshold))
        if config.ball is not None:
            c = config.ball
            hooks.append(lambda model: {"adapter/at_ball": project_ball_(model, c)})
        return hooks

    def _penalty(self) -> Callable[[nn.Module], torch.Tensor] | None:
        from common.adapters import factor_penalty

        mu = self.config.penalty
        return (lambda model: mu * factor_penalty(model)) if mu else None


class GradientMethod(AdaptedMethod):
    """Objective + parameters -> method: attach an adapter (or not), fit, constrain."""

    Config: ClassVar[type[Strict]] = GradientConfig

    def objective(self) -> Objective:
        """What is minimised, where that follows from the config alone."""
        raise NotImplementedError(f"{type(self).__name__} needs objective() or prepare(task)")

    def prepare(self, task: UnlearnTask) -> Objective:
        """What is minimised; called while ``task.model`` still is Original, without adapters.

        Override it instead of :meth:`objective` where the objective needs Original's outputs.
        """
        return self.objective()

    def initialise(self, task: UnlearnTask) -> None:
        """Called when adapters are attached; a method may set where they start."""

    def loaders(self, task: UnlearnTask, parts: Sequence[str], config: FitConfig) -> Any:
        """One stream of batches per part that the objective reads."""
        return task.loaders(parts, config)

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Runs the objective on the parts that it names."""
        objective = self.prepare(task)
        config = self.config.engine()
        self._attach(task)
        if self.config.adapter is not None:
            self.initialise(task)
        self._train(task, objective, self.loaders(task, objective.parts, config), config=config)
        return task.model
