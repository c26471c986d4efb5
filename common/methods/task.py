"""What a method is given: model, guarded data, engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stable_forgetting.common.base.seeding import derive, generator
from stable_forgetting.common.protocol.family import ModelFamily
from stable_forgetting.common.train.config import FitConfig
from stable_forgetting.common.train.rehearsal import Ends

if TYPE_CHECKING:
    import torch
    from torch import nn

    from stable_forgetting.common.data.access import DataAccess, GuardedSource, GuardedSplit
    from stable_forgetting.common.data.batch import Batch, Forward
    from stable_forgetting.common.data.loader import Loader
    from stable_forgetting.common.objectives.objectives import Objective
    from stable_forgetting.common.train.protocols import (
        AfterStep,
        FitResult,
        ScalarSink,
        Stateful,
        Telemetry,
    )


@dataclass(frozen=True)
class _Offset:
    """A sink whose steps go on where the method's last fit ended."""

    sink: ScalarSink
    steps: int

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Records at the step counted over all fits."""
        self.sink.scalars(step + self.steps, values)

    def rewind(self, step: int) -> None:
        """Drops what was recorded after the step counted over all fits."""
        self.sink.rewind(step + self.steps)


@dataclass
class UnlearnTask:
    """Everything a method gets: a model, guarded data, and the engine's wiring.

    Attributes:
        model: A copy of Original that the method may change and return.
        data: Source and split, as far as the method declares them.
        family: What is known of the model: forward, logits, adapter targets, head, components.
        recipe: How Original was trained.
        build: Makes a fresh, seeded, untrained (or pretrained) model; needs ``initial``.
        replicate: 0, or which further Retrain this is.
        paired_with: Part -> the part whose batches its own go beside, sample by sample.
        telemetry: Tracker, progress and evaluation in training; nobody looks when absent.
        checkpoint: File for mid-run checkpoints.
        keeps_last: Whether the end of the last training is kept as a checkpoint, too; not where its
            weights are stored next.
        results: One per finished :meth:`fit`.
        ends: In a rehearsal: what every training does.
        trained: Parameters that the last :meth:`fit` trained.
    """

    model: nn.Module
    data: DataAccess
    family: ModelFamily
    recipe: FitConfig
    build: Callable[[], nn.Module]
    seed: int
    replicate: int = 0
    paired_with: Mapping[str, str] = field(default_factory=dict)
    telemetry: Telemetry | None = None
    checkpoint: Path | None = None
    keeps_last: bool = True
    results: list[FitResult] = field(default_factory=list)
    ends: Ends | None = None
    trained: int = 0

    @property
    def source(self) -> GuardedSource:
        """The data source; samples of undeclared parts are refused."""
        return self.data.source

    @property
    def split(self) -> GuardedSplit:
        """The index sets; undeclared parts are refused."""
        return self.data.split

    def forward(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Logits aligned with the batch's labels."""
        return self.family.forward(model, batch)

    def indices(self, *parts: str) -> np.ndarray:
        """The union of declared parts, sorted.

        Raises:
            AccessError: The method does not declare one of them.
        """
        return np.sort(np.concatenate([self.split.parts[part] for part in parts]))

    def generator(self, *names: str | int) -> torch.Generator:
        """An independent random stream of this run."""
        return generator(self.seed, "method", self.replicate, *names)

    def loader(
        self, *parts: str, batch_size: int, augment: bool = True, stream: str = "batches"
    ) -> Loader:
        """An endless shuffled stream over the union of parts, with its own generator."""
        from stable_forgetting.common.data.loader import Loader

        return Loader(
            self.source,
            self.indices(*parts),
            batch_size,
            self.generator(stream, *parts),
            augment=augment,
        )

    def loaders(self, parts: Sequence[str], config: FitConfig) -> dict[str, Loader]:
        """One loader per part, with the config's micro-batch size; a part that is led is paired."""
        from stable_forgetting.common.data.loader import PairedLoader

        loaders: dict[str, Loader] = {}
        for part in sorted(parts, key=lambda part: self.paired_with.get(part) in parts):
            leader = loaders.get(self.paired_with.get(part, ""))
            if leader is None:
                loaders[part] = self.loader(part, batch_size=config.micro_batch)
            else:
                loaders[part] = PairedLoader(leader, self.source, self.indices(part))
        return {part: loaders[part] for part in parts}

    def drawn(self, part: str, count: int, *names: str) -> np.ndarray:
        """At most ``count`` random samples of a part, by the stream of the names."""
        import torch

        indices = self.indices(part)
        order = torch.randperm(len(indices), generator=self.generator(*names))
        chosen: np.ndarray = indices[order[:count].numpy()]
        return chosen

    def frozen_copy(self) -> nn.Module:
        """A copy of the model as it is now: in eval mode, without gradients."""
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
        self.data.require("initial")
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
        more: bool = False,
    ) -> FitResult:
        """:func:`common.train.fit.fit` with this task's wiring; call it once or several times.

        ``more`` says that another training follows, before which the end of this one is kept.
        """
        from stable_forgetting.common.train.checkpoint import of_training
        from stable_forgetting.common.train.fit import fit
        from stable_forgetting.common.train.protocols import Hooks

        stage, reads = len(self.results), self.data.reads
        before = reads.counts.clone()
        self.trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        path = None if self.checkpoint is None else of_training(self.checkpoint, stage)
        result = fit(
            model,
            objective,
            loaders,
            config,
            forward=self.family.forward,
            seed=derive(self.seed, "engine", self.replicate, stage),
            hooks=Hooks(after_step, penalty, {**(stateful or {}), "reads": reads}),
            telemetry=self._telemetry(),
            checkpoint=path,
            keeps_last=more or self.keeps_last,
            ends=self.ends,
            lr_scaling="none",  # a method's config has scaled the rate
        )
        reads.join(before)
        self.results.append(result)
        return result

    def train(self, objective: Objective, config: FitConfig, **how: Any) -> FitResult:
        """:meth:`fit` of :attr:`model` on the parts that an objective reads."""
        loaders = self.loaders(objective.parts, config)
        return self.fit(self.model, objective, loaders, config, **how)

    def _telemetry(self) -> Telemetry:
        """With steps counted over all fits."""
        from stable_forgetting.common.train.protocols import Telemetry

        before = sum(result.steps for result in self.results)
        telemetry = self.telemetry or Telemetry()
        tracker, evaluate = telemetry.tracker, telemetry.evaluate_during
        return replace(
            telemetry,
            tracker=tracker and _Offset(tracker, before),
            evaluate_during=evaluate and (lambda model, step: evaluate(model, before + step)),
            component_of=self.family.component_of,
        )
