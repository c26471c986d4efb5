"""Causal language models: Hugging Face's by id or folder, or tiny ones from scratch.

Weights are drawn from a seed without touching the global random state, and read from safetensors
only; code that comes with a checkpoint is never run.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from stable_forgetting.common.base.errors import CheckpointError, ConfigError, DataError, one_line
from stable_forgetting.common.base.hub import prepare_client
from stable_forgetting.common.store.adapters import base_of, is_adapter, with_adapter
from stable_forgetting.common.train.telemetry import evaluating
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.models.backbone import device_of
from stable_forgetting.language.models.families import tiny_family

logger = logging.getLogger(__name__)


# -- building -------------------------------------------------------------------------------------


def build_model(
    config: CausalModelConfig, vocab_size: int, seed: int, *, end: int | None = None
) -> Any:
    """A causal language model; the same seed gives the same bits.

    Args:
        vocab_size: Entries of the tokenizer.
        seed: Of the weights that are not loaded.
        end: Id of the end-of-sequence token, for a tiny model's config.

    Returns:
        A ``PreTrainedModel`` on the CPU, or where ``device_map`` puts it.

    Raises:
        ConfigError: The architecture is not supported, or the vocabulary is too small.
        DataError: Config or weights cannot be fetched or read.
    """
    if config.name == "tiny":
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed % 2**63)
            model = _from_config(config, tiny_config(config, vocab_size, end))
    else:
        model = _load(config, config.name)
    return _prepared(model, config, vocab_size)


def blank_model(config: CausalModelConfig, vocab_size: int, *, end: int | None = None) -> Any:
    """The architecture with arbitrary weights and without fetching any, to load a state into."""
    if config.name == "tiny":
        return build_model(config, vocab_size, 0, end=end)
    with torch.random.fork_rng(devices=[]), _no_init():
        model = _from_config(config, fetch_config(config.name, config.revision))
    model.tie_weights()  # part of the initialisation that is left out
    return _prepared(model, config, vocab_size)


def _no_init() -> AbstractContextManager[Any]:
    """Leaves new weights as they lie in memory: drawing those of a large model takes minutes."""
    new = importlib.util.find_spec("transformers.initialization")  # its place since version 5
    where = "initialization" if new else "modeling_utils"
    return importlib.import_module(f"transformers.{where}").no_init_weights()


def load_published(config: CausalModelConfig, name: str, vocab_size: int) -> Any:
    """A published Original or Retrain (id or folder) in the settings of ``config``.

    ``config.revision`` is a commit of ``config.name``: of another repository the newest is read.
    """
    origin = base_of(Path(name)) if is_adapter(name) else name
    own = config if origin == config.name else config.model_copy(update={"revision": None})
    return _prepared(_load(own, name), config, vocab_size)


def claimed_training(folder: Path) -> str | None:
    """The digest of training indices that a folder's safetensors claim (metadata ``trained_on``).

    None unless every file of the folder claims the same.
    """
    from safetensors import SafetensorError, safe_open

    claims = set()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="np") as file:
                claims.add((file.metadata() or {}).get("trained_on"))
        except (SafetensorError, OSError):
            return None
    return claims.pop() if len(claims) == 1 else None


def _prepared(model: Any, config: CausalModelConfig, vocab_size: int) -> Any:
    entries = model.get_input_embeddings().num_embeddings
    if entries < vocab_size:
        raise ConfigError(
            f"model {config.name}: has {entries} embeddings for a tokenizer of {vocab_size};"
            " leave model.tokenizer out or give the model's own"
        )
    if config.gradient_checkpointing:
        # not re-entrant: adapters on a frozen model get gradients although its inputs need none
        old = model.gradient_checkpointing_enable  # its name before transformers 5
        getattr(model, "activation_checkpointing_enable", old)({"use_reentrant": False})
    return model


def tiny_config(config: CausalModelConfig, vocab_size: int, end: int | None) -> Any:
    """The transformers config of a tiny model, embeddings tied to the head.

    Raises:
        ConfigError: There is no tiny model of this kind.
    """
    from transformers import AutoConfig

    assert config.kind and config.dim and config.depth and config.heads and config.context
    family = tiny_family(config.kind)
    assert family.tiny is not None
    return AutoConfig.for_model(
        family.model_type,
        vocab_size=vocab_size,
        max_position_embeddings=config.context,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=None,
        tie_word_embeddings=True,
        **family.tiny(config.dim, config.depth, config.heads),
    )


def _from_config(config: CausalModelConfig, architecture: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(
        architecture,
        dtype=getattr(torch, config.dtype),
        attn_implementation=config.attention,
        trust_remote_code=False,
    )


def _load(config: CausalModelConfig, name: str) -> Any:
    from transformers import AutoModelForCausalLM

    if is_adapter(name):
        return with_adapter(_load(config, base_of(Path(name))), Path(name))
    packed = quantisation(config)
    fetch_config(name, config.revision)
    loader: Any = AutoModelForCausalLM
    try:
        model, report = loader.from_pretrained(
            name,
            revision=config.revision,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=getattr(torch, config.dtype),
            attn_implementation=config.attention,
            device_map=config.device_map,
            quantization_config=packed,
            ignore_mismatched_sizes=True,  # told below, by name
            output_loading_info=True,
        )
    except Exception as error:  # hub clients raise many unrelated types without a network
        raise CheckpointError(
            f"model {name}: its safetensors weights cannot be read ({one_line(error)}); give a"
            " folder with config.json and *.safetensors, or run once on a machine with a network"
        ) from None
    for key, stored, wanted in sorted(report["mismatched_keys"]):
        raise CheckpointError(
            f"model {name}: its safetensors hold {key} as {tuple(stored)}, and config.json makes it"
            f" {tuple(wanted)}; give the config.json that belongs to them"
        )
    if report["missing_keys"]:  # they would be drawn at random
        raise CheckpointError(
            f"model {name}: its safetensors lack {min(report['missing_keys'])} and"
            f" {len(report['missing_keys']) - 1} other(s); give weights that fit its config.json"
        )
    _tell_of_spare(model, name, report["unexpected_keys"])
    if getattr(model.config, "is_decoder", None) is False:  # BERT's kin look both ways then
        check_causal(model, name)
    return model


def _tell_of_spare(model: Any, name: str, spare: Collection[str]) -> None:
    """Warns of stored weights that are not read, as where a config has fewer blocks.

    Buffers that a model makes anew, such as causal masks, are stored in old checkpoints.
    """
    anew = {key for key, _ in model.named_buffers()}
    unread = [key for key in sorted(spare) if key not in anew and not key.endswith("masked_bias")]
    if unread:
        logger.warning(
            "model %s: its safetensors hold %s and %d other(s) that its config.json has no place"
            " for: they are left out",
            name,
            unread[0],
            len(unread) - 1,
        )


def check_causal(model: Any, name: str) -> None:
    """Tries a model on two texts that begin alike, where a causal one says the same first.

    Raises:
        CheckpointError: It gives no logits for tokens, or sees the tokens that it is to predict.
    """
    ids = torch.tensor([[0, 1], [0, 2]], device=device_of(model))
    try:
        with torch.no_grad(), evaluating(model):
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        one, other = logits[:, 0]
        _ = logits[:, 1, 0]
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"model {name}: is no causal language model ({one_line(error)}); give one"
        ) from None
    noise = max(1e-4, 8 * torch.finfo(logits.dtype).eps) * float(logits.abs().max())
    if float((one - other).abs().max()) > noise:
        raise CheckpointError(
            f"model {name}: sees the tokens that it is to predict, as masked language models do;"
            " give a causal one"
        )


def quantisation(config: CausalModelConfig) -> Any:
    """How transformers packs weights as it reads them; None where it does not.

    Raises:
        ConfigError: bitsandbytes is not there.
    """
    if config.quantised is None:
        return None
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"model.quantised: {config.quantised} needs bitsandbytes; install it, or leave it out"
        )
    from transformers import BitsAndBytesConfig

    if config.quantised == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, config.dtype),
    )


def fetch_config(name: str, revision: str | None) -> Any:
    """The transformers config of a hub id or folder.

    Raises:
        DataError: It cannot be read.
    """
    from transformers import AutoConfig

    prepare_client()
    name = base_of(Path(name)) if is_adapter(name) else name
    try:
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    except Exception as error:  # as above
        raise DataError(
            f"model {name}: its config cannot be read ({one_line(error)}); give a folder with"
            " config.json, name: tiny, or run once on a machine with a network"
        ) from None
