"""Configs of text data, causal language models and forgetting requests.

They live apart from the code that uses them because that code needs torch, and listing, planning
and reporting must not wait for torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from common.base.config import Strict
from common.base.numbers import Count

Amount = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Style = Literal["clean", "openunlearning", "tofu"]
Family = Literal["question_answer", "llama2_chat", "llama3_chat"]
NamedRequest = Literal["forget01", "forget05", "forget10"]

SHARES: Mapping[str, float] = {"forget01": 0.01, "forget05": 0.05, "forget10": 0.10}
"""Which share of the authors, the last ones, TOFU's named splits forget."""

_FICTITIOUS_DEFAULTS: dict[str, Any] = {
    "authors": 36,
    "forget_authors": 4,
    "questions": 20,
    "train_on_facts": True,
}
_TINY_DEFAULTS: dict[str, Any] = {
    "kind": "gpt_neo",
    "dim": 128,
    "depth": 2,
    "heads": 4,
    "context": 512,
    "tokenizer": 4000,
}


class TextDataConfig(Strict):
    """Which questions and answers, how many.

    Attributes:
        name: ``fictitious`` generates authors (no files, no network); ``tofu`` is locuslab/TOFU;
            ``jsonl`` reads files of questions and answers, or of plain texts.
        source: Where TOFU comes from: its files below the data root (``folder``), or the ``hub`` of
            the datasets library.  ``auto`` takes the folder where there is one.
        authors: Keep this many authors from the start.  TOFU: all 200 when absent; fictitious: 36.
        forget_authors: Keep this many more from the end: who ``scenario.kind: authors`` forgets.
            Goes with ``authors``.  Fictitious: 4.
        questions: Questions per fictitious author, at most 20.
        data_seed: Seed of the fictitious authors.  Not the seed of a run: all runs share the text.
        train_on_facts: Put the questions of real_authors and world_facts into the training text
            too.  A model that was trained from scratch knows nothing of them otherwise.  On for
            fictitious.
        facts: Keep this many questions of real_authors and this many of world_facts, from the
            start (name: tofu); all of them when absent.
        files: Set name -> path below the data root (name: jsonl), such as {forget: f.jsonl,
            retain: r.jsonl}.
        max_length: Longer sequences are cut at the end, in tokens.
    """

    name: Literal["fictitious", "tofu", "jsonl"] = "fictitious"
    source: Literal["auto", "folder", "hub"] = "auto"
    authors: Count | None = None
    forget_authors: Count | None = None
    questions: Annotated[int, Field(ge=1, le=20)] | None = None
    data_seed: int = 0
    train_on_facts: bool = False
    facts: Count | None = None
    files: Mapping[str, str] | None = None
    max_length: Annotated[int, Field(ge=8)] = 512

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_data_set(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("name", "fictitious") == "fictitious":
            return {**_FICTITIOUS_DEFAULTS, **data}
        return data

    @model_validator(mode="after")
    def _fits_the_data_set(self) -> TextDataConfig:
        if (self.authors is None) != (self.forget_authors is None):
            raise ValueError("authors and forget_authors belong together: give both or none")
        if self.name != "tofu" and self.source != "auto":
            raise ValueError(f"source: {self.source} is only for name: tofu; leave it out")
        if self.name != "fictitious" and self.questions is not None:
            raise ValueError("questions is only for name: fictitious; leave it out")
        if self.name != "tofu" and self.facts is not None:
            raise ValueError("facts is only for name: tofu; leave it out")
        if self.name == "fictitious" and None in (self.authors, self.questions):
            raise ValueError("name: fictitious needs authors, forget_authors and questions")
        if (self.name == "jsonl") != (self.files is not None):
            raise ValueError("name: jsonl and files: {SET: PATH} belong together")
        if self.name == "jsonl" and self.authors is not None:
            raise ValueError("authors is not for name: jsonl; leave it out")
        for path in (self.files or {}).values():
            if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
                raise ValueError(f"files: {path}: must be a path below the data root")
        return self


class CausalModelConfig(Strict):
    """A causal language model: any of Hugging Face's, or a tiny one from scratch.

    Attributes:
        name: ``tiny``, a hub id such as ``microsoft/phi-1_5``, or a folder with config.json and
            safetensors.  Pickled weights and remote code are never loaded.
        revision: Commit or tag of a hub id.
        kind: Family of a tiny model: ``gpt_neo``, ``phi``, ``llama``, or another that has one in
            :data:`language.models.families.FAMILIES`.  Its sizes: ``dim`` (hidden width),
            ``depth`` (blocks), ``heads`` (attention heads) and ``context`` (longest sequence).
            Embeddings are tied.
        tokenizer: A number trains a byte-level BPE of that size on the data's own text; else a
            folder or hub id.  The model's own when absent; tiny: 4000.
        template: How a question becomes a prompt: ``Question: .. Answer: ..`` (GPT-Neo, Phi,
            LLaMA base), ``[INST] .. [/INST]`` (LLaMA-2-chat), or LLaMA-3's chat headers.
        style: ``clean`` keeps the first answer token and one end token in the labels; the other
            two reproduce published code (:mod:`language.data.templates`).
        dtype: Of the weights.
        attention: Implementation that transformers should use; its own choice when absent.
        gradient_checkpointing: Recompute activations in the backward pass.
        device_map: Of ``from_pretrained``: ``auto`` spreads one model over several devices.
        original: Published checkpoint (id or folder) to take as Original instead of training it.
        retrain: Scenario label -> published checkpoint to take as Retrain.
    """

    name: str = "tiny"
    revision: str | None = None
    kind: str | None = None
    dim: Count | None = None
    depth: Count | None = None
    heads: Count | None = None
    context: Count | None = None
    tokenizer: Annotated[int, Field(ge=260)] | str | None = None
    template: Family = "question_answer"
    style: Style = "clean"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    attention: Literal["eager", "sdpa", "flash_attention_2"] | None = None
    gradient_checkpointing: bool = False
    device_map: str | Mapping[str, int | str] | None = None
    original: str | None = None
    retrain: Mapping[str, str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_tiny(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("name", "tiny") == "tiny":
            return {**_TINY_DEFAULTS, **data}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> CausalModelConfig:
        if self.name != "tiny":
            for field in _TINY_DEFAULTS.keys() - {"tokenizer"}:
                if getattr(self, field) is not None:
                    raise ValueError(f"{field}: only for name: tiny; {self.name} has its own")
            return self
        missing = [field for field in _TINY_DEFAULTS if getattr(self, field) is None]
        if missing:
            raise ValueError(f"{missing[0]}: name: tiny needs a value here")
        assert self.dim and self.heads
        if self.dim % (2 * self.heads):
            raise ValueError("dim must be a multiple of 2 * heads")
        if self.original or self.retrain or self.revision or self.device_map:
            raise ValueError("original, retrain, revision and device_map are not for name: tiny")
        return self


class TextScenarioConfig(Strict):
    """What is forgotten.

    Attributes:
        kind: ``forget01``, ``forget05`` and ``forget10`` forget the last 1, 5 and 10 % of the
            authors; ``authors`` the last ``forget_authors``; ``requests`` several groups one after
            the other; ``files`` the set named forget of name: jsonl.
        forget_authors: How many (kind: authors); 4 when absent.
        draw: Draw the authors by the run's seed among those that have perturbed answers, instead
            of taking the last ones (kind: authors, or requests given as numbers).
        requests: One entry per request: a number of authors, or named splits, each less the
            earlier ones.  Three groups of three authors when absent.
        request: Which of ``requests`` this is, from 1 on (kind: requests); 1 when absent.
        used: Share of the request's rows that is unlearned (kind: requests); the others tell
            whether forgetting reaches rows of the same authors that no request showed.
    """

    kind: Literal["forget01", "forget05", "forget10", "authors", "requests", "files"] = "authors"
    forget_authors: Count | None = None
    draw: bool = False
    requests: tuple[Count, ...] | tuple[NamedRequest, ...] | None = None
    request: Count | None = None
    used: Share = 1.0

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_kind(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        kind = data.get("kind", "authors")
        defaults: dict[str, dict[str, Any]] = {
            "authors": {"forget_authors": 4},
            "requests": {"requests": (3, 3, 3), "request": 1},
        }
        return {**defaults.get(kind, {}), **data} if isinstance(kind, str) else data

    @model_validator(mode="after")
    def _fits_the_kind(self) -> TextScenarioConfig:
        if (self.kind == "authors") != (self.forget_authors is not None):
            raise ValueError("forget_authors and kind: authors belong together")
        if (self.kind == "requests") != (self.requests is not None):
            raise ValueError("requests and kind: requests belong together")
        if (self.kind == "requests") != (self.request is not None):
            raise ValueError("request and kind: requests belong together")
        if self.request is not None and self.request > len(self.requests or ()):
            raise ValueError(f"request: there are only {len(self.requests or ())} requests")
        if self.used < 1 and self.kind != "requests":
            raise ValueError("used is only for kind: requests; leave it out")
        named = bool(self.requests) and isinstance((self.requests or (0,))[0], str)
        if self.draw and (self.kind not in ("authors", "requests") or named):
            raise ValueError("draw: needs kind: authors, or requests given as numbers")
        return self

    @property
    def label(self) -> str:
        """A short name, such as ``forget10``, ``4-authors``, ``request-2-of-3-3-3``."""
        if self.kind == "authors":
            return f"{self.forget_authors}-authors" + ("-drawn" if self.draw else "")
        if self.requests is not None:
            parts = [f"request-{self.request}-of", *(str(request) for request in self.requests)]
            return "-".join(parts) + ("-drawn" if self.draw else "")
        return self.kind
