"""What a method is given: model, guarded data, engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from common.base.errors import AccessError
from common.base.seeding import derive, generator
from common.train.config import FitConfig

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn

    from common.data.batch import Batch, Forward, Source
    from common.data.loader import Loader
    from common.data.splits import ForgetSplit
    from common.objectives.objectives import Objective
    from common.train.protocols import (
        AfterStep,
        FitResult,
        ModelForward,
        ScalarSink,
        Stateful,
        Watch,
    )


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
        from common.data.loader import Loader

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
        """:func:`common.train.fit.fit` with this task's wiring; call it once or several times."""
        from common.train.fit import fit

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
