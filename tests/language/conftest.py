"""Tiny causal models from configs, and pairs of token ids."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stable_forgetting.language.data.corpus import Encoded
from tests.language.made import sharper

VOCAB = 61
COMMON = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


LLAMA = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 512,
}
SHARED_KEYS = {**LLAMA, "num_key_value_heads": 1}
SIZES = {
    "mistral": SHARED_KEYS,
    "qwen2": SHARED_KEYS,
    "lfm2": SHARED_KEYS,
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 512},
    "gpt_neo": {
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 64,
        "max_position_embeddings": 256,
    },
}


def make_model(kind: str, seed: int = 0, **fields):
    """A tiny model whose every bit follows from the seed; sharper than an untrained one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **COMMON, **{**SIZES.get(kind, LLAMA), **fields})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return sharper(AutoModelForCausalLM.from_config(config))


def make_pairs(questions: int = 6, answers: int = 4, seed: int = 0, *, longest: int = 12):
    """Pairs of a few questions, the answers of one question behind the same prompt."""
    stream = np.random.Generator(np.random.PCG64(seed))
    pairs = []
    for _ in range(questions):
        prompt = stream.integers(1, VOCAB, stream.integers(2, longest))
        for _ in range(answers):
            answer = stream.integers(1, VOCAB, stream.integers(1, longest))
            ids = np.concatenate([prompt, answer, [0]]).astype(np.int64)
            pairs.append(Encoded(ids, len(prompt)))
    return pairs


@pytest.fixture(scope="session")
def tiny_text() -> SimpleNamespace:
    """Models, pairs, vocabulary."""
    return SimpleNamespace(model=make_model, pairs=make_pairs, vocab=VOCAB)


@pytest.fixture
def offline(monkeypatch, tmp_path_factory):
    """Nothing is asked of the hub, and nothing is left in a cache."""
    import datasets
    import huggingface_hub.constants

    cache = tmp_path_factory.getbasetemp() / "datasets"
    for module in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE", "DISABLE_MULTIPROC"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(cache))
