"""The common body of the methods that put a term on forget data and one on retain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from stable_forgetting.common import data, objectives
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.numbers import Count, NonNegative, Positive
from stable_forgetting.common.bounded.config import FilaConfig
from stable_forgetting.common.data.parts import PadTo
from stable_forgetting.common.methods import tools
from stable_forgetting.common.methods.base import Length
from stable_forgetting.common.methods.gradient import AdaptedConfig, GradientMethod
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.train.config import LATER


class ForgetConfig(AdaptedConfig):
    """What is trained, plus a forget term.  The defaults suit tiny models trained from scratch.

    Attributes:
        forget_weight: Factor of the forget term, the sources' lambda (``lam`` means the same).
        average: As in every training; it does not touch sums of log-probabilities.
        fila: Start the adapters on what forget needs most; reads retain data.
    """

    aliases: ClassVar[Mapping[str, str]] = {"lam": "forget_weight"}
    later: ClassVar[Mapping[str, Any]] = {k: v for k, v in LATER.items() if k != "average"}
    epochs_of: str | None = "forget"
    batch_size: Count = 16
    lr: Positive = 1e-4
    forget_weight: NonNegative = 1.0
    average: Literal["samples", "tokens"] = "samples"
    fila: FilaConfig | None = None

    @model_validator(mode="after")
    def _fila_starts_adapters(self) -> ForgetConfig:
        if self.fila is not None and self.adapter is None:
            raise ValueError("fila sets where adapters start; give adapter too")
        if self.fila is not None and self.adapter is not None and self.adapter.peft:
            raise ValueError("fila starts our own adapters; leave it or adapter.peft out")
        for name in ("weight_clip", "ball", "penalty"):
            if self.fila is not None and getattr(self, name):
                raise ValueError(f"{name} takes adapters that start at zero; drop it or fila")
        return self


class RetainConfig(ForgetConfig):
    """A forget term and a retain term.

    Attributes:
        retain_weight: Factor of the retain term.
    """

    retain_weight: NonNegative = 1.0


class PaddedConfig(RetainConfig):
    """The same, where a ``compat`` counts padding.

    Attributes:
        compat: Whose code's padding is followed; ``none`` leaves padding out, as the formula does.
        pad_to: How far texts whose padding counts are padded with the tokenizer's padding or end
            token: to the longest of the ``batch``, or to ``data.max_length``.  ``compat`` sets it.
    """

    padding: ClassVar[Mapping[str, PadTo]] = {}
    """compat -> ``pad_to`` of that code."""
    later: ClassVar[Mapping[str, Any]] = {**RetainConfig.later, "pad_to": None}
    compat: str = "none"
    pad_to: PadTo | None = None

    @model_validator(mode="before")
    @classmethod
    def _padded_as_there(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("pad_to") is None:
            return {**data, "pad_to": cls.padding.get(data.get("compat", "none"))}
        return data

    @model_validator(mode="after")
    def _only_where_padding_counts(self) -> PaddedConfig:
        if self.pad_to is not None and self.compat not in self.padding:
            raise ValueError("pad_to: only where compat counts padding; leave it out")
        return self


class ForgetRetainMethod(GradientMethod):
    """Forget term + retain term -> method: gradient difference unless a subclass says otherwise.

    A ``Config`` without ``retain_weight`` makes a method that never reads retain data.
    """

    Config: ClassVar[type[Strict]] = RetainConfig
    unmasked: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """``compat`` -> the parts in whose texts that code counts every position, padding too."""

    @classmethod
    def within(cls, config: Any, unit: Length, amount: int) -> dict[str, Any]:
        """Where retain data only start the adapters, passes over them are no length."""
        if unit == "epochs" and not isinstance(config, RetainConfig):
            return {}
        return super().within(config, unit, amount)

    @property
    def over(self) -> Literal["samples", "tokens"]:
        """How positions are averaged: where a ``compat`` counts padding over tokens, as it does."""
        config: ForgetConfig = self.config
        counted = isinstance(config, PaddedConfig) and config.compat in config.padding
        return "tokens" if counted else config.average

    def forget_term(self, task: UnlearnTask) -> objectives.Term:
        """What is minimised on forget data: cross-entropy, ascended."""
        return objectives.pushed_away("cross_entropy", self.over)

    def retain_term(self, task: UnlearnTask) -> objectives.Term | None:
        """What is minimised on retain data: cross-entropy, where the config weighs it."""
        return (
            objectives.Mean(objectives.cross_entropy, self.over)
            if isinstance(self.config, RetainConfig)
            else None
        )

    def views(self, task: UnlearnTask) -> Mapping[str, Callable[[data.Batch], data.Batch]]:
        """Parts whose batches are seen in another way: with all positions, where a code does so."""
        parts = self.unmasked.get(getattr(self.config, "compat", "none"), ())
        if not parts:
            return {}
        pad_to = getattr(self.config, "pad_to", None)
        return dict.fromkeys(parts, data.every_position(task.source, pad_to))

    def prepare(self, task: UnlearnTask) -> objectives.Objective:
        """Both terms; a subclass may put more around them."""
        return self.terms(task)

    def terms(self, task: UnlearnTask) -> objectives.ForgetRetain:
        """Both, weighted."""
        config: ForgetConfig = self.config
        weight = config.retain_weight if isinstance(config, RetainConfig) else 1.0
        forget, retain = self.forget_term(task), self.retain_term(task)
        return objectives.ForgetRetain(
            forget, retain, config.forget_weight, weight, self.views(task)
        )

    def _attach(self, task: UnlearnTask) -> None:
        super()._attach(task)
        if self.config.fila is not None:
            tools.start_adapters(task, self.config.fila)
