"""A small classifier of the same architecture, and images that are there."""

from __future__ import annotations

from typing import Any

from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.protocol.sizes import StandIn
from stable_forgetting.vision.config import DataConfig, ModelConfig
from stable_forgetting.vision.models.family import VIT, family_of


def stand_in(config: Any, runtime: Runtime) -> StandIn:
    """The protocol with a small model; with invented images where the real ones are absent."""
    model, data, notes = _model(config.model), _data(config.data, runtime), []
    if data.source == "invented":
        notes.append(f"images: {data.name}, invented")
    if model != config.model:
        notes.append(f"model: {config.model.name}, narrow and with few blocks, random")
    changes: dict[str, Any] = {"model": model, "data": data, "minimum_train_accuracy": 0.0}
    if config.pretrain is not None:
        other = _data(config.pretrain.data, runtime)
        changes["pretrain"] = config.pretrain.model_copy(update={"data": other})
        if other.source == "invented":
            notes.append(f"images of the pretraining: {other.name}, invented")
    return StandIn(config.model_copy(update=changes), tuple(notes))


def _model(config: ModelConfig) -> ModelConfig:
    if config.name == "scratch":
        small = VIT.shrunk
        names = {"dim": "embed_dim", "depth": "depth", "heads": "num_heads"}
        return config.model_copy(update={ours: small[timms] for ours, timms in names.items()})
    shrunk = bool(family_of(config.name).shrunk)
    return config.model_copy(update={"pretrained": False, "checkpoint": None, "shrunk": shrunk})


def _data(config: DataConfig, runtime: Runtime) -> DataConfig:
    if not config.name.startswith("cifar"):
        return config
    root = runtime.data_root
    local = root is not None and any((root / config.name).glob("**/train*.parquet"))
    return config.model_copy(update={"source": "parquet" if local else "invented"})
