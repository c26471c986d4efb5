"""What most tests of text make: a benchmark of a protocol, a source of items, a sharp model."""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from stable_forgetting import benchmarks  # noqa: F401 - registers
from stable_forgetting.common.base.config import validate
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.corpus import Corpus
from stable_forgetting.language.data.source import TextSource
from stable_forgetting.language.data.templates import make_template
from stable_forgetting.language.data.tokenizers import train_tokenizer
from stable_forgetting.language.models.build import build_model

CPU = Runtime(device="cpu")
TINY = {"name": "tiny", "dim": 16, "depth": 1, "heads": 2, "context": 256, "tokenizer": 300}


def benchmark(name: str, root=None, **protocol) -> Any:
    """The benchmark of a protocol, on a tiny model and one step of training unless told."""
    cls = BENCHMARKS[name]
    config = validate(cls.Config, {"model": TINY, "train": {"steps": 1}, **protocol}, "test")
    return cls(config, Runtime(device="cpu", data_root=root))


def source_of(items, vocabulary=300, *, refusals=(), style="clean", tokenizer=None, max_length=64):
    """Items as token ids of a tokenizer that is trained on them."""
    corpus = items if isinstance(items, Corpus) else Corpus(tuple(items), "made", refusals)
    template = make_template("question_answer", style)
    tokenizer = tokenizer or train_tokenizer(corpus, vocabulary)
    return TextSource(corpus, tokenizer, template, max_length=max_length)


class Wrapped(nn.Module):
    """A model as DDP looks from outside."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, **inputs: Any) -> Any:
        return self.module(**inputs)


def sharper(model, factor: float = 6.0):
    """The model, in place, with larger matrices: an untrained one has no opinions."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(factor)
    return model.eval()


def peers_model(kind: str, weights, vocabulary: int, *, end: int | None = None, **fields):
    """The model whose numbers a peer gave, with the weights that are kept in half precision."""
    config = CausalModelConfig(kind=kind, dim=32, depth=2, heads=2, **fields)
    model = build_model(config, vocabulary, 0, end=end)
    stored = {name: tensor.float() for name, tensor in load_file(weights).items()}
    missing, unknown = model.load_state_dict(stored, strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}
    assert all(tensor.isfinite().all() for tensor in stored.values())
    model.tie_weights()
    return model


def log_p(z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """log p of each label; of ignored ones, of the first entry."""
    return z.log_softmax(-1).gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
