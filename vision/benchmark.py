"""The vision benchmark: images, a classifier, a scenario, a recipe and the SalUn-lineage metrics.

LetheViT, CoUn, class deletion and the small settings are configs of this one benchmark, in
``benchmarks/suites``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from stable_forgetting.common.base.files import listing
from stable_forgetting.common.base.seeding import derive, hash_order
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.data.parts import Role
from stable_forgetting.common.data.splits import ForgetSplit, PretrainingSplit
from stable_forgetting.common.measure.answers import answer_distances
from stable_forgetting.common.measure.metric import MetricSpec, SweepAxes
from stable_forgetting.common.measure.rules import GapRule, TargetRule
from stable_forgetting.common.protocol.benchmark import Runtime, Versions
from stable_forgetting.common.protocol.pretraining import Pretrainable
from stable_forgetting.common.protocol.sizes import StandIn, Workload
from stable_forgetting.vision.config import CLASS_COUNTS, IMAGE_COUNTS, VisionConfig
from stable_forgetting.vision.data.folders import listing_digest
from stable_forgetting.vision.metrics import (
    ANSWERS,
    DOUBTED,
    GAP,
    METRICS,
    SWEEP_AXES,
    WITHOUT_RETRAIN,
    accuracy_metrics,
    redrawn_metrics,
    vision_metrics,
)
from stable_forgetting.vision.models.family import ImageClassifiers, family_of
from stable_forgetting.vision.models.sizes import count_adapters, positions_of, sizes_of
from stable_forgetting.vision.stand_in import stand_in

if TYPE_CHECKING:
    from torch import nn

    from stable_forgetting.common.measure.scores import Scores
    from stable_forgetting.vision.config import ModelConfig
    from stable_forgetting.vision.data.source import ImageSource, InputSpec


class VisionBenchmark(ImageClassifiers, Pretrainable):
    """Image classification under forgetting requests."""

    versions = Versions(measure=3)
    metrics: ClassVar[tuple[MetricSpec, ...]] = METRICS
    answer_metrics = ("js_forget", "changed_forget", "js_test", "changed_test")
    gap: ClassVar[GapRule] = GAP
    sweep_axes: ClassVar[SweepAxes | None] = SWEEP_AXES
    Config = VisionConfig
    config: VisionConfig
    modality = "vision"
    compared = "images"

    @classmethod
    def identity(cls, config: Any, kind: str) -> Mapping[str, Any]:
        """Data and scenario of a split; data, model and recipe of a training; the attacks."""
        if kind == "split":
            return {"data": config.data, "scenario": config.scenario}
        if kind == "train":
            return {"data": config.data, "model": config.model, "train": config.train}
        if kind == "score":
            return {"evaluation": config.evaluation.model_dump(exclude={"features"})}
        assert kind == "measure", kind
        return {"features": config.evaluation.features}

    @classmethod
    def stand_in(cls, config: Any, runtime: Runtime, folder: Path) -> StandIn:
        """See :mod:`vision.stand_in`."""
        return stand_in(config, runtime)

    @classmethod
    def listing(cls, config: Any, runtime: Runtime) -> str:
        """Of a folder of images, and of a file or folder of weights; empty for others."""
        folder, root = config.data.folder, runtime.data_root
        images = listing_digest(Path(root) / folder) if folder and root else ""
        return images + (
            listing([Path(config.model.checkpoint)]) if config.model.checkpoint else ""
        )

    @classmethod
    def scenario_of(cls, config: Any) -> str:
        """Kind of the scenario."""
        return config.scenario.kind

    @classmethod
    def adapter_share(cls, config: Any, adapter: AdapterConfig) -> tuple[int, int] | None:
        """None for folders, whose classes only the data tell."""
        classes = CLASS_COUNTS.get(config.data.name)
        if classes is None:
            return None
        return count_adapters(
            config.model,
            adapter,
            num_classes=classes,
            in_chans=config.data.channels,
            image_size=config.data.image_size,
        )

    @classmethod
    def workload(cls, config: Any) -> Workload | None:
        """Of plain ViTs on data sets of known sizes; a position is a patch or the class token."""
        data, model, scenario = config.data, config.model, config.scenario
        positions, classes = positions_of(model, data.image_size), CLASS_COUNTS.get(data.name)
        if positions is None or classes is None:
            return None
        shape = {"in_chans": data.channels, "image_size": data.image_size}
        sizes = sizes_of(model, num_classes=classes, **shape)
        assert sizes is not None
        official, tests = IMAGE_COUNTS[data.name]
        held_out = data.validation_images + (0 if tests else data.test_images or 0)
        train = data.train_images or official - held_out
        chosen = len(scenario.classes or ()) or scenario.num_classes
        forget = round(train * (scenario.fraction or (chosen or 0) / classes))
        retain = train - forget
        seen = min(config.evaluation.retain_samples or retain, retain)
        scored = forget + seen + data.validation_images + (data.test_images or tests)
        return Workload(
            sizes,
            {"forget": forget, "retain": retain},
            positions=positions,
            longest=positions,
            scored=scored * positions,
            decoded=0,
            targets=family_of(model.name).targets,
        )

    @classmethod
    def gap_of(cls, config: Any) -> GapRule:
        """It says which of its columns may not rank under the scenario."""
        return replace(cls.gap, doubted=DOUBTED.get(config.scenario.kind, ()))

    @classmethod
    def without_retrain(cls, config: Any) -> TargetRule | None:
        """For images of the distribution of the held-out ones, and for classes."""
        return WITHOUT_RETRAIN.get(config.scenario.kind) if config.data.validation_images else None

    @cached_property
    def spec(self) -> InputSpec:
        """How images become inputs; that of another model may be set before they are read."""
        from stable_forgetting.vision.models.build import input_spec

        data = self.config.data
        return input_spec(self.config.model, in_chans=data.channels, image_size=data.image_size)

    @cached_property
    def source(self) -> ImageSource:
        """The images, decoded once per process."""
        from stable_forgetting.vision.data.source import load_source

        return load_source(
            self.config.data, self.spec, data_root=self.runtime.data_root, device=self.device
        )

    @property
    def provenance(self) -> str:
        """Where the images came from."""
        return self.source.provenance

    @property
    def architecture(self) -> str:
        """``scratch`` or timm's name."""
        return self.config.model.name

    @property
    def num_classes(self) -> int:
        """Classes of the data set."""
        return self.source.num_classes

    @property
    def evaluation_batch(self) -> int:
        """Images per forward in evaluation."""
        return self.config.evaluation.batch_size

    def split(self, seed: int) -> ForgetSplit:
        """See :func:`vision.scenarios.make_split`."""
        from stable_forgetting.vision.scenarios import make_split

        return make_split(self.source, self.config.scenario, seed)

    def pretraining_split(self) -> PretrainingSplit:
        """The training pool, and the test images."""
        parts = {"train": self.source.train_pool, "test": self.source.test_pool}
        return PretrainingSplit(f"{self.source.name}/pretrain", parts, self.source.digest)

    def transfer(self, model: nn.Module, weights: Path) -> None:
        """Everything but the head."""
        from stable_forgetting.vision.models.checkpoint import load_checkpoint

        load_checkpoint(model, weights, new_head=self.family.head, keep_head=False)

    def fingerprints(self, indices: np.ndarray) -> np.ndarray:
        """Of the images' pixels at native size."""
        return self.source.fingerprints(indices)

    def build(self, seed: int) -> nn.Module:
        """A fresh model; pretrained or checkpoint weights are loaded if configured."""
        return self._build(self.config.model, seed)

    def blank(self) -> nn.Module:
        """The architecture, without fetching weights."""
        model = self.config.model.model_copy(update={"pretrained": False, "checkpoint": None})
        return self._build(model, 0)

    def _build(self, model: ModelConfig, seed: int) -> nn.Module:
        from stable_forgetting.vision.models.build import build_model

        built = build_model(
            model,
            num_classes=self.num_classes,
            in_chans=self.source.in_chans,
            generator_seed=derive(seed, "init"),
            image_size=self.config.data.image_size,
        )
        return built.to(self.device)

    def parts(self, split: ForgetSplit, *, trial: bool, seed: int) -> dict[str, np.ndarray]:
        """Everything, with retain subsampled if configured; a trial has no test parts."""
        chosen = dict(split.parts)
        if trial:
            chosen = {k: v for k, v in chosen.items() if self.role_of(k) is not Role.REPORT}
        limit = self.config.evaluation.retain_samples
        if limit is not None and len(chosen["retain"]) > limit:
            chosen["retain"] = np.sort(hash_order(chosen["retain"], seed, "retain-eval")[:limit])
        return {name: indices for name, indices in chosen.items() if len(indices)}

    def evaluate(
        self, scores: Mapping[str, Scores], *, trial: bool, seed: int
    ) -> dict[str, float | None]:
        """See :func:`vision.metrics.vision_metrics`."""
        return vision_metrics(
            scores, trial=trial, seed=derive(seed, "mia"), features=self.config.evaluation.features
        )

    def redrawn(self, scores: Mapping[str, Scores], *, seed: int) -> dict[str, float | None]:
        """See :func:`vision.metrics.redrawn_metrics`."""
        return redrawn_metrics(scores, derive(seed, "mia"))

    @classmethod
    def compare(
        cls, config: Any, scores: Mapping[str, Scores], target: Mapping[str, Scores]
    ) -> dict[str, float | None]:
        """How far the answers lie from Retrain's, image by image."""
        return answer_distances(scores, target, ANSWERS, cls.choices)

    def sweep_metrics(self, scores: Mapping[str, Scores], *, seed: int) -> dict[str, float | None]:
        """Accuracies and forget loss, without the attacks."""
        metrics = accuracy_metrics(scores)
        return {name: metrics[name] for name in SWEEP_AXES.metrics}
