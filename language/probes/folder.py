"""A Hugging Face folder as a model that probes can ask."""

from __future__ import annotations

import sys
from pathlib import Path

from stable_forgetting.common.protocol.benchmark import pick_device
from stable_forgetting.language.probes.base import ProbedModel


def read_model(path: Path, *, data_root: Path | None = None, device: str = "auto") -> ProbedModel:
    """The model of a folder with config.json, safetensors and tokenizer, or of a hub id.

    Args:
        path: The folder or id.
        data_root: Folder of the probes' files.
        device: ``auto``, ``cpu``, ``cuda``, ...

    Raises:
        UserError: Something is missing, pickled, malformed, or of an architecture that is unknown.
    """
    from stable_forgetting.language.apply.checkpoint import load_causal, read_causal
    from stable_forgetting.language.config import CausalModelConfig
    from stable_forgetting.language.data.corpus import Corpus
    from stable_forgetting.language.data.source import TextSource
    from stable_forgetting.language.data.templates import make_template
    from stable_forgetting.language.data.tokenizers import load_tokenizer
    from stable_forgetting.language.measure.evaluation import RequestConfig

    place = pick_device(device)
    checkpoint = read_causal(path)
    tokenizer = load_tokenizer(CausalModelConfig(name=str(checkpoint.folder)))
    model = load_causal(checkpoint, len(tokenizer)).to(place).eval()
    template = make_template("question_answer", "clean")
    nothing = Corpus((), "no texts of its own")
    source = TextSource(nothing, tokenizer, template, max_length=sys.maxsize, device=place)
    return ProbedModel(model, source, RequestConfig(), data_root)
