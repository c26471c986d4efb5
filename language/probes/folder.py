"""A Hugging Face folder as a model that probes can ask."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from stable_forgetting.common.protocol.benchmark import pick_device
from stable_forgetting.language.probes.base import ProbedModel

if TYPE_CHECKING:
    from stable_forgetting.language.apply.checkpoint import CausalCheckpoint
    from stable_forgetting.language.apply.memory import GivenCausal


def read_model(path: Path, *, data_root: Path | None = None, device: str = "auto") -> ProbedModel:
    """The model of a folder with config.json, safetensors and tokenizer, or of a hub id.

    Args:
        path: The folder or id.
        data_root: Folder of the probes' files.
        device: ``auto``, ``cpu``, ``cuda``, ...

    Raises:
        UserError: Something is missing, pickled, malformed, or of an architecture that is unknown.
    """
    from stable_forgetting.language.apply.checkpoint import read_causal

    return as_probed(read_causal(path), data_root=data_root, device=device)


def as_probed(
    given: CausalCheckpoint | GivenCausal, *, data_root: Path | None, device: str
) -> ProbedModel:
    """A model as probes ask it.

    Args:
        given: On disk or in memory.
        data_root: Folder of the probes' files.
        device: ``auto``, ``cpu``, ``cuda``, ...

    Raises:
        UserError: Its weights or its tokenizer cannot be used.
    """
    from stable_forgetting.language.data.corpus import Corpus
    from stable_forgetting.language.data.source import TextSource
    from stable_forgetting.language.data.templates import make_template
    from stable_forgetting.language.measure.evaluation import RequestConfig

    place = pick_device(device)
    model, tokenizer = given.load()
    template = make_template("question_answer", "clean")
    nothing = Corpus((), "no texts of its own")
    source = TextSource(nothing, tokenizer, template, max_length=sys.maxsize, device=place)
    return ProbedModel(model.to(place).eval(), source, RequestConfig(), data_root)
