"""A small model of a published one's family, as a folder like those of the hub.

Whatever reads a published checkpoint reads this one: its config, its safetensors, its tokenizer.
Its weights are drawn at random.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.files import json_digest
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.protocol.sizes import StandIn
from stable_forgetting.common.store.adapters import is_adapter
from stable_forgetting.common.store.packages import PACKAGE
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.corpus import Corpus
from stable_forgetting.language.data.readers import load_corpus
from stable_forgetting.language.data.templates import make_template
from stable_forgetting.language.data.tokenizers import tokenizer_digest, train_tokenizer
from stable_forgetting.language.models.families import Fields, family_of, published_sizes

DIM, DEPTH, HEADS = 64, 2, 4
VOCABULARY = 1000
NEW_TOKENS = 16
"""Longest greedy answer: a model with random weights never ends one."""


def stand_in(config: Any, runtime: Runtime, folder: Path, depth: int = DEPTH) -> StandIn:
    """The protocol with texts that are there and a model that is small, written to ``folder``.

    Raises:
        ConfigError: The model's family is not known without fetching its config.
        DataError: Data are damaged, or cannot be invented.
    """
    data, notes = config.data.stand_in(runtime.data_root), []
    if data != config.data:
        notes.append(f"texts: {data.name}, invented")
    model = config.model
    if model.name == "tiny":
        model = model.model_copy(update={"dim": DIM, "depth": depth, "heads": HEADS})
        notes.append(f"model: tiny, at width {DIM} with {depth} blocks")
    else:
        corpus = load_corpus(data, runtime.data_root)
        words = data.vocabulary(corpus)
        model = write_stand_in(model, words, folder, depth)
        notes.append(f"model: {config.model.name} at width {DIM} with {depth} blocks, random")
    short = {"max_new_tokens": NEW_TOKENS}
    evaluation = {k: v for k, v in short.items() if k in type(config.evaluation).model_fields}
    changes: dict[str, Any] = {
        "data": data,
        "model": model,
        "evaluation": config.evaluation.model_copy(update=evaluation),
        "minimum_train_accuracy": 0.0,
    }
    if config.pretrain is not None:
        other = config.pretrain.data
        passages = other.stand_in(runtime.data_root)
        if passages != other:
            notes.append(f"texts of the pretraining: {passages.name}, invented")
        changes["pretrain"] = config.pretrain.model_copy(update={"data": passages})
    return StandIn(config.model_copy(update=changes), tuple(notes))


def write_stand_in(
    config: CausalModelConfig, words: Corpus, folder: Path, depth: int = DEPTH
) -> CausalModelConfig:
    """Writes the model, and one more for each published Original and Retrain.

    Args:
        words: What the tokenizer is trained on.

    Returns:
        The config with folders in the place of names.
    """
    if config.template == "chat":  # of a tokenizer that is not at hand
        config = config.model_copy(update={"template": "question_answer"})
    kind, sizes = _architecture(config)
    named = dict.fromkeys([config.name, config.original, *(config.retrain or {}).values()])
    tokenizer = _tokenizer(config, kind, words)
    fields = {**sizes, **_shrunk(kind, sizes, depth)}
    about = {**fields, "kind": kind, "words": tokenizer_digest(tokenizer)}
    stem = json_digest(about)[:12]  # equal models of several suites are one
    places = {name: folder / f"{stem}-{n}" for n, name in enumerate(filter(None, named))}
    for seed, place in enumerate(places.values()):
        if not (place / "config.json").is_file():
            tokenizer.save_pretrained(place)
            _model(kind, fields, len(tokenizer), tokenizer.eos_token_id, seed).save_pretrained(
                place
            )
    folders = {name: str(place) for name, place in places.items()}
    return config.model_copy(
        update={
            "name": folders[config.name],
            "revision": None,
            "tokenizer": None,
            "device_map": None,
            "quantised": None,
            "original": config.original and folders[config.original],
            "retrain": config.retrain and {k: folders[v] for k, v in config.retrain.items()},
        }
    )


def _architecture(config: CausalModelConfig) -> tuple[str, Fields]:
    """Model type and sizes: known ones, or those of a folder."""
    if config.name.startswith(PACKAGE):
        raise ConfigError(f"model {config.name}: its suites are for a CPU; run them as they are")
    sizes = published_sizes(config.name)
    if sizes is not None:
        return sizes
    if not is_adapter(config.name) and not (Path(config.name) / "config.json").is_file():
        raise ConfigError(
            f"model {config.name}: the family of its stand-in is not known; add its sizes to"
            " language/models/published.yaml, or give a folder with config.json"
        )
    from stable_forgetting.language.models.build import fetch_config

    fields = fetch_config(config.name, None).to_dict()
    return fields["model_type"], fields


def _model(kind: str, sizes: Fields, vocabulary: int, end: int, seed: int) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {**sizes, "vocab_size": vocabulary}
    ends = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": None}
    config = AutoConfig.for_model(**{**fields, **ends, "model_type": kind})
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def _shrunk(kind: str, sizes: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """Sizes of the stand-in; attention keeps its kinds and whether heads share keys."""
    family = family_of(kind)
    if family.tiny is None:
        raise ConfigError(f"model type {kind}: its family has no tiny model to stand in for it")
    fields = dict(family.tiny(DIM, depth, HEADS))
    if "attention_types" in sizes:
        kinds = sizes["attention_types"][0][0]
        fields["attention_types"] = [[kinds, max(1, depth // len(kinds))]]
    shared = sizes.get("num_key_value_heads", 0)
    if shared:
        fields["num_key_value_heads"] = (
            HEADS if shared == sizes["num_attention_heads"] else HEADS // 2
        )
    if sizes.get("head_dim") is not None:
        fields["head_dim"] = DIM // HEADS
    return fields


def _tokenizer(config: CausalModelConfig, kind: str, words: Corpus) -> Any:
    """A small byte-level one with the template's tokens, and LLaMA's start token."""
    from tokenizers.processors import TemplateProcessing
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = train_tokenizer(words, VOCABULARY)
    required = list(make_template(config.template, config.style).required_tokens)
    start = required[0] if required else "<s>"
    if kind == "llama":
        tokenizer.add_special_tokens({"additional_special_tokens": required, "bos_token": start})
        place = tokenizer.convert_tokens_to_ids(start)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{start} $A", special_tokens=[(start, place)]
        )
    return tokenizer
