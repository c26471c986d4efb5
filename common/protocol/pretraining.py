"""A pretraining: what Original and every Retrain of a suite start from, made here."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from pydantic import SerializeAsAny

from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.grown import Grown
from stable_forgetting.common.base.numbers import Amount
from stable_forgetting.common.data.splits import PretrainingSplit
from stable_forgetting.common.protocol.benchmark import Benchmark, Runtime, pick_device
from stable_forgetting.common.train.config import FitConfig

if TYPE_CHECKING:
    from torch import nn


class Pretraining(Strict):
    """A training of the suite's model on other data, before anything is learnt or forgotten.

    Attributes:
        data: Which data; none of the suite's own samples may be among them.
        train: Its recipe.
        seed: Of its weights and batches.  Not the seed of a run: all runs share one pretraining.
    """

    data: SerializeAsAny[Strict]
    train: FitConfig
    seed: Amount = 0


class TransferConfig(Grown):
    """A protocol whose Original and Retrain may start from a pretraining that is made here.

    Attributes:
        pretrain: The pretraining; they start from random or published weights when absent.
    """

    later = {"pretrain": None}
    pretrain: Pretraining | None = None

    @property
    def pretraining(self) -> Self | None:
        """The protocol of the pretraining; None without one."""
        if self.pretrain is None:
            return None
        changes = {"data": self.pretrain.data, "train": self.pretrain.train, "pretrain": None}
        return self.model_copy(update=changes)


class Pretrainable(Benchmark):
    """A benchmark that trains its models as its config, a :class:`TransferConfig`, says."""

    compared: ClassVar[str] = "samples"
    """What :meth:`fingerprints` are of, in words."""

    def __init__(self, config: Any, runtime: Runtime):
        super().__init__(config, runtime)
        import torch

        self.device = torch.device(pick_device(runtime.device))

    @property
    def scenario(self) -> str:
        """See :meth:`scenario_of`."""
        return self.scenario_of(self.config)

    @property
    def recipe(self) -> FitConfig:
        """The training recipe."""
        recipe: FitConfig = self.config.train
        return recipe

    @property
    def minimum_train_accuracy(self) -> float:
        """The gate."""
        return float(self.config.minimum_train_accuracy)

    @classmethod
    def pretraining(cls, config: Any) -> Any:
        """The protocol of the pretraining that trainings start from; None without one."""
        return config.pretraining if isinstance(config, TransferConfig) else None

    @abstractmethod
    def pretraining_split(self) -> PretrainingSplit:
        """What a pretraining on this protocol's data trains on, and what it holds out."""

    def transfer(self, model: nn.Module, weights: Path) -> None:
        """Puts the weights of a pretraining, a safetensors file, into a fresh model.

        Override it where the two have different heads.
        """
        from safetensors.torch import load_model

        load_model(model, str(weights))

    @abstractmethod
    def fingerprints(self, indices: np.ndarray) -> np.ndarray:
        """(M,) int64 hashes of what samples consist of, equal where two share it."""
