"""What brings knowledge back: training again, on the forgotten or on something else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from stable_forgetting.common import data, objectives
from stable_forgetting.common.audits.base import (
    NOT_NEGATIVE,
    AuditInfo,
    AuditTask,
    Measure,
    Measures,
    ModelAudit,
)
from stable_forgetting.common.audits.intervals import spread
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.numbers import Count, Positive
from stable_forgetting.common.base.seeding import derive, generator
from stable_forgetting.common.measure.scores import percent

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


BLOCKS = 8
"""In which the measured samples are read."""
ROUNDING = 1e-6
"""Percent: what sums in another order may differ by."""


class RelearnTime(ModelAudit):
    """Relearn time and anamnesis index.

    Formula: t = optimizer steps on the forget set (or ``shots`` samples of it) until its accuracy
    is at least ``share`` times Original's, 0 if it is so at once; AIN = t_U / t_R.  1 is ideal, far
    below 1 the knowledge was hidden and not removed, far above 1 the model was harmed.  The same
    batches for every model; a training that does not get there counts as ``max_steps`` and is said
    to be cut off.  On text accuracy is the share of right answer tokens, teacher forced.
    Source: Golatkar et al. 2020 (relearn time); Chundawat et al. 2023 (AIN, arXiv 2201.05629).
    """

    info = AuditInfo(3, "minutes", "steps", "AIN 1")
    budget: ClassVar[Mapping[str, str]] = {"samples": "shots", "steps": "max_steps"}
    part: ClassVar[str] = "forget"
    """What the model is trained on."""

    class Config(Strict):
        """Config of the relearning.

        Attributes:
            share: Of Original's accuracy on the forget set that counts as known again.
            max_steps: Where a training is cut off.
            batch_size: Samples per step.
            lr: Learning rate; that of the training recipe when absent.
            shots: Relearn on this many samples only; all when absent.
            measured: Accuracy is taken on at most this many forget samples, after every step.
            repeats: Trainings with other batch orders.
        """

        share: Annotated[float, Field(gt=0, le=1)] = 0.95
        max_steps: Count = 100
        batch_size: Count = 64
        lr: Positive | None = None
        shots: Count | None = None
        measured: Count = 500
        repeats: Count = 3

    def measure(self, task: AuditTask) -> Measures:
        """Steps over the repeats, with their range."""
        config = self.config
        measured = task.draw("forget", config.measured, "measured")
        wanted = config.share * percent(task.collect_correct(task.load_original(), measured))
        steps = [self._steps(task, repeat, measured, wanted) for repeat in range(config.repeats)]
        cut = sum(step is None for step in steps)
        counts = [float(config.max_steps if step is None else step) for step in steps]
        low, high, name = spread(counts, "batch orders")
        note = f"{cut} of {len(counts)} cut off at {config.max_steps}" if cut else ""
        mean = sum(counts) / len(counts)
        return {"steps": Measure(mean, low, high, name, len(counts), note, NOT_NEGATIVE)}

    def _steps(
        self, task: AuditTask, repeat: int, measured: np.ndarray, wanted: float
    ) -> int | None:
        """Steps until the accuracy is there; None if it never is."""
        from stable_forgetting.common.train.fit import fit
        from stable_forgetting.common.train.protocols import Hooks

        config, model = self.config, task.load()
        for parameter in model.parameters():  # who attacks trains every weight; codes are none
            parameter.requires_grad_(parameter.is_floating_point())
        if reaches(task, model, measured, wanted):
            return 0

        def knows(trained: nn.Module, _: int) -> str | None:
            return "known again" if reaches(task, trained, measured, wanted) else None

        result = fit(
            model,
            objectives.CrossEntropy(self.part),
            {self.part: self._loader(task, repeat)},
            task.recipe.briefly(config.max_steps, config.batch_size, config.lr),
            forward=task.family.forward,
            seed=derive(task.seed, "audit", "relearn-engine", repeat),
            hooks=Hooks(stop_when=knows),
        )
        return result.steps if result.stopped else None

    def _loader(self, task: AuditTask, repeat: int) -> data.Loader:
        order = generator(task.seed, "audit", "relearn", repeat)
        indices = task.draw(self.part, self.config.shots, "shots", str(repeat))
        source = self._source(task)
        return data.Loader(source, indices, self.config.batch_size, order, augment=False)

    def _source(self, task: AuditTask) -> Any:
        """Where the samples come from that are trained on."""
        return task.source

    def relate(self, row: Measures, retrain: Measures) -> Measures:
        """The anamnesis index; undefined where Retrain knows the forget set at once."""
        return {"AIN": anamnesis(row["steps"], retrain["steps"])}

    def advantage(self, row: Measures, retrain: Measures) -> float | None:
        """The share of Retrain's steps that the row saves, in percent."""
        index = anamnesis(row["steps"], retrain["steps"]).value
        return None if index is None else 100.0 * (1.0 - index)


def reaches(task: AuditTask, model: nn.Module, indices: np.ndarray, wanted: float) -> bool:
    """Whether the accuracy on some samples is at least ``wanted`` percent.

    They are read in blocks, until those that are left cannot change the answer.
    """
    right = 0.0
    found: list[np.ndarray] = []
    left = len(indices)
    for block in np.array_split(indices, min(BLOCKS, left)):
        found.append(task.collect_correct(model, block))
        right, left = right + float(found[-1].sum(dtype=np.float64)), left - len(block)
        least, most = (100.0 * value / len(indices) for value in (right, right + left))
        if least > wanted + ROUNDING or most < wanted - ROUNDING:
            return least > wanted
    return percent(np.concatenate(found)) >= wanted


class RelearnFromRetain(RelearnTime):
    """Relearn time from retain data alone: who attacks has no forgotten sample.

    Formula: as relearn, but the steps are on the retain set.  Knowledge that was hidden comes back
    all the same; what Retrain gets to without ever having known it is what retain data teach.
    Source: Siddiqui et al. 2025 (arXiv 2505.22310).
    """

    part: ClassVar[str] = "retain"


class RelearnFew(RelearnTime):
    """Relearn time from few forgotten samples: who attacks has kept 16 of them.

    Formula: as relearn, on the same ``shots`` forgotten samples for every model.
    Source: Siddiqui et al. 2025 (arXiv 2505.22310); Hu et al. 2024 (arXiv 2406.13356).
    """

    class Config(RelearnTime.Config):
        """Config of the relearning.

        Attributes:
            shots: Forgotten samples that the attacker has.
        """

        shots: Count | None = 16


class Elsewhere:
    """The same samples in another domain: moved by one fixed permutation of their entries.

    A source whose entries are names renames them itself (``renamed``).
    """

    def __init__(self, source: data.Source, seed: int):
        self.source, self.seed = source, seed

    @property
    def digest(self) -> str:
        """That of the samples."""
        return self.source.digest

    def fetch(self, indices: Tensor, *, augment: torch.Generator | None = None) -> data.Batch:
        """The samples at ``indices``, moved; labels stay where no name is changed."""
        batch = self.source.fetch(indices, augment=augment)
        renamed: Any = getattr(self.source, "renamed", None)
        if renamed is not None:
            moved: data.Batch = renamed(batch, self.seed)
            return moved
        inputs = {name: self._shuffled(value) for name, value in batch.inputs.items()}
        return data.Batch(inputs, batch.labels, batch.indices)

    def _shuffled(self, values: Tensor) -> Tensor:
        """(N, ...) with the entries of every sample in one other order."""
        import torch

        flat = values.flatten(1)
        stream = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(flat.shape[1], generator=stream).to(flat.device)
        return flat[:, order].view_as(values)


class RelearnElsewhere(RelearnTime):
    """Relearn time from data of another domain: who attacks has nothing of this one.

    Formula: as relearn_retain, but every sample is moved by one fixed permutation, of its entries
    or of their names (:class:`Elsewhere`).  Who trains on something else altogether
    and gets the forgotten back has found what was only hidden.
    Source: the finding that fine-tuning on other data recovers, arXiv 2510.07626; permuted inputs
    as another domain, Goodfellow et al. 2014 (arXiv 1312.6211).
    """

    part: ClassVar[str] = "retain"

    def _source(self, task: AuditTask) -> Any:
        return Elsewhere(task.source, derive(task.seed, "audit", "elsewhere"))


def anamnesis(ours: Measure, theirs: Measure) -> Measure:
    """t_U / t_R with the widest range that the two ranges allow; None where t_R is 0."""
    assert ours.value is not None and theirs.value is not None
    if theirs.value == 0:
        return Measure(None, n=ours.n, note="Retrain is there at once: nothing to relearn")
    bounds = (ours.low, ours.high, theirs.low, theirs.high)
    low = high = None
    if all(bound is not None for bound in bounds) and theirs.low:
        low, high = ours.low / theirs.high, ours.high / theirs.low  # type: ignore[operator]
    cut = [name for name, side in (("U", ours), ("Retrain", theirs)) if side.note]
    note = f"{' and '.join(cut)} cut off" if cut else ""
    return Measure(
        ours.value / theirs.value, low, high, "from both ranges", ours.n, note, NOT_NEGATIVE
    )
