"""CoUn: contrastive learning on retain data, alone or added to another method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import model_validator

from stable_forgetting.common import data, objectives
from stable_forgetting.common.base.config import Strict, validate
from stable_forgetting.common.base.numbers import Amount, Count, NonNegative, Positive
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.methods.base import (
    BOTH,
    RETAIN,
    MethodInfo,
    UnlearningMethod,
    resolve_config,
)
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.train.config import FitConfig

if TYPE_CHECKING:
    from torch import nn

    from stable_forgetting.common.train.protocols import FitResult


class ContrastConfig(Strict):
    """Settings of the contrastive term.

    Attributes:
        weight: Of the term beside the cross-entropy, or the method's objective; .5 is ours.
        temperature: Divides cosine similarities; .1 is ours.
        shift: Pixels by which a view may be shifted; 1, as images are small.
        noise: Standard deviation of the noise on a view, in units of the normalised input; .1 is
            ours.
    """

    weight: NonNegative = 0.5
    temperature: Positive = 0.1
    shift: Amount = 1
    noise: NonNegative = 0.1


class CoUn(UnlearningMethod):
    """CoUn: supervised and contrastive learning on retain data; the forget set is never read.

    Formula: for two different augmentations x1, x2 of each retain image and h the normalised input
    of the classifier: minimise ``CE(f(x), y) + weight mean_i l_i`` over the 2N views,
    ``l_i = -s_{i,pos}/tau + logsumexp_{k != i} s_{ik}/tau``, s = h h^T (NT-Xent).
    x is the image as every other row of the suite trains on it: with the data's own augmentation,
    or clean where the protocol has none.  With CE on a view, CoUn alone would be regularised by
    shifts and noise there, and differ from Retrain for being better.
    Source: CoUn, 2025 (arXiv 2509.16391), from its abstract: weight, tau, lr, epochs, augmentation
    and the absence of a projection head are ours.  Sweep weight {0.1, 0.5, 1, 2} and tau {0.07,
    0.1, 0.2, 0.5}.  The views must differ: equal ones raise.
    """

    info = MethodInfo(2, "CoUn, 2025 (arXiv 2509.16391)", RETAIN, modality="vision")

    class Config(ContrastConfig, FitConfig):
        """Settings of CoUn: those of the contrastive term, and of a training."""

        epochs: Count | None = 5
        lr: Positive = 3e-4

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Fine-tunes on two views."""
        config: Any = self.config
        engine = FitConfig.of(config)
        Contrasting.around(task, config).fit(task.model, None, {}, engine)
        return task.model


class WithContrast(UnlearningMethod):
    """+CL: any method with CoUn's contrastive term added to each of its training steps.

    Formula: minimise ``base's objective + weight NT-Xent`` on two views of retain images.
    Source: CoUn, 2025 (arXiv 2509.16391), which reports gains for other methods.  ``base`` names
    the method, ``params`` are its own; it keeps its declared access, plus retain.  ``resolved`` and
    ``base_version`` are filled in.
    A row of a suite: ``salun+cl: {method: with_contrast, params: {base: salun}}``.
    """

    info = MethodInfo(
        1,
        "CoUn, 2025 (arXiv 2509.16391)",
        BOTH | {"initial", "validation", "validation_forget"},
        modality="vision",
    )
    quick: ClassVar[Mapping[str, Any]] = {"params": {"steps": 4}}

    class Config(ContrastConfig):
        """Settings of +CL.

        Attributes:
            base: The method to which the term is added.
            params: Settings of that method; its own defaults when empty.
            resolved: All settings of that method, which are filled in.
            base_version: Version of that method, which is filled in.
        """

        base: str = "finetune"
        params: dict[str, Any] = {}
        resolved: dict[str, Any] = {}
        base_version: Count | None = None

        @model_validator(mode="after")
        def _complete(self) -> WithContrast.Config:
            """Fills in the base's full config and version, so that both are hashed and recorded.

            Whatever was there is overwritten: a config is often merged into another one's dump.
            """
            if self.base == "with_contrast":
                raise ValueError("base: with_contrast cannot wrap itself")
            object.__setattr__(self, "resolved", self._whole().model_dump(mode="json"))
            object.__setattr__(self, "base_version", METHODS[self.base].info.version)
            return self

        def _whole(self) -> Strict:
            return resolve_config(self.base, None, self.params, origin=f"params of {self.base}")

        def identity(self) -> dict[str, Any]:
            """With what the base's own stage keys hash."""
            return {**super().identity(), "resolved": self._whole().identity()}

    @classmethod
    def access_of(cls, config: Any) -> frozenset[str]:
        """The base's, and retain."""
        base = METHODS[config.base]
        own = validate(base.Config, config.resolved, config.base)
        return base.access_of(own) | {"retain"}

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Runs the base on a task whose every fit has the term added."""
        config: Any = self.config
        base = METHODS[config.base]
        narrowed = task.data.narrowed(self.access_of(config))
        inner = Contrasting.around(task, config, data=narrowed)
        return base(validate(base.Config, config.resolved, config.base)).unlearn(inner)


@dataclass
class Contrasting(UnlearnTask):
    """A task that adds the contrastive term to whatever is fitted.

    Attributes:
        contrast: Its weight, temperature, shift and noise.
    """

    contrast: Any = None

    @classmethod
    def around(cls, task: UnlearnTask, contrast: Any, **changes: Any) -> Contrasting:
        """The same task (and list of results), contrasting."""
        same = {field.name: getattr(task, field.name) for field in fields(UnlearnTask)}
        return cls(**{**same, **changes}, contrast=contrast)

    def fit(
        self,
        model: nn.Module,
        objective: objectives.Objective | None,
        loaders: Mapping[str, data.Loader],
        config: FitConfig,
        **options: Any,
    ) -> FitResult:
        """Fits with the term added; epochs count passes over the first given loader, if any."""
        from stable_forgetting.vision.data.augment import TwoViews
        from stable_forgetting.vision.methods.contrast import VIEWS, Contrasted, HeadInputs

        contrast, features = self.contrast, HeadInputs()
        views = data.Loader(
            TwoViews(
                self.source,
                shift=contrast.shift,
                noise=contrast.noise,
                plain=objective is None,
            ),
            self.indices("retain"),
            config.micro_batch,
            self.generator("views", len(self.results)),
        )
        joint = Contrasted(
            objective, features, weight=contrast.weight, temperature=contrast.temperature
        )
        with features.watching(model, self.family.head):
            return super().fit(model, joint, {**loaders, VIEWS: views}, config, **options)
