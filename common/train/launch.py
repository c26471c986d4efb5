"""Launched processes: accelerate, joining, sharding."""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.fsdp import CPUOffloadPolicy

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.train.config import FitConfig
from stable_forgetting.common.train.optimizer import BITSANDBYTES
from stable_forgetting.common.train.sharding import Sharded

FOREIGN = {DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM}
"""Launchers that bring a loop of their own."""


def join_processes(device: torch.device) -> None:
    """Joins the launcher's processes before training starts, for decisions that they share."""
    PartialState(cpu=device.type == "cpu")


def make_accelerator(config: FitConfig, device: torch.device) -> Accelerator:
    """An accelerator for this run; accelerate keeps one per process, so an old one is dropped.

    Its device goes too, unless processes are joined: the last run may have been elsewhere.

    Raises:
        ConfigError: The launcher brings a loop of its own (DeepSpeed, Megatron).
    """
    joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    AcceleratorState._reset_state(reset_partial_state=not joined)
    accelerator = Accelerator(
        mixed_precision=config.mixed_precision,
        gradient_accumulation_steps=config.accumulation,
        cpu=device.type == "cpu",
    )
    if accelerator.distributed_type in FOREIGN:
        raise ConfigError(
            f"accelerate is set to {accelerator.distributed_type.value}, which is not supported;"
            " launch plain data parallel or FSDP version 2"
        )
    return accelerator


def make_sharded(model: nn.Module, config: FitConfig) -> Sharded | None:
    """Splits the model where the launcher says FSDP; None where it does not.

    accelerate's own preparation would change the caller's model for good, and does not split on a
    CPU; its settings are read all the same: the classes to wrap, resharding after the forward.

    Raises:
        ConfigError: A setting that is not supported.
    """
    joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not joined or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise ConfigError("FSDP version 1 is not supported: launch with --fsdp_version 2")
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    names = plugin.transformer_cls_names_to_wrap or getattr(model, "_no_split_modules", None) or ()
    present = {type(module).__name__ for module in model.modules()}
    if missing := sorted(set(plugin.transformer_cls_names_to_wrap or ()) - present):
        raise ConfigError(f"FSDP: no layer of class '{missing[0]}' to wrap in this model")
    for wanted, mend in (
        (not hasattr(checkpoint, "HuggingFaceStorageWriter"), "checkpoints need torch 2.9"),
        (config.optimizer in BITSANDBYTES, "bitsandbytes takes whole parameters: optimizer: adamw"),
        (getattr(model, "is_quantized", False), "a quantised base stays whole on each card"),
        (plugin.activation_checkpointing, "switch on the model's own gradient checkpointing"),
        (plugin.min_num_params, "wrap by class: --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"),
        (getattr(model, "hf_device_map", None), "leave device_map out of the protocol"),
        (
            config.mixed_precision == "fp16",
            "the loss scale of fp16 is not supported: mixed_precision: bf16",
        ),
        (config.probe_every, "probes need whole gradients: probe_every: 0"),
    ):
        if wanted:
            raise ConfigError(f"FSDP: {mend}")
    return Sharded(
        model,
        set(names),
        reshard=bool(plugin.reshard_after_forward),
        low=config.mixed_precision == "bf16",
        offload=isinstance(plugin.cpu_offload, CPUOffloadPolicy),
    )
