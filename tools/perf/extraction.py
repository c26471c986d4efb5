"""Extraction likelihood: greedy continuations of all prefixes against those that tell something."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from stable_forgetting.common.measure.scores import Scores
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.corpus import Corpus, Item
from stable_forgetting.language.data.source import TextSource
from stable_forgetting.language.data.tdec import notes
from stable_forgetting.language.data.templates import make_template
from stable_forgetting.language.data.tokenizers import train_tokenizer
from stable_forgetting.language.measure.ask import score_rows
from stable_forgetting.language.measure.extraction import Extraction
from stable_forgetting.language.measure.requests import RequestConfig
from stable_forgetting.language.models.backbone import causal_forward
from stable_forgetting.language.models.build import build_model
from tools.perf.measure import Case, Check, Size, Variant

OURS, NAIVE = "wrong prefixes", "all prefixes"
MEMORISED, STEPS_LIMIT, GRAM = 0.76, 1 / 3, 10


@dataclass(frozen=True)
class Job:
    """Texts and a model that knows most of them by heart.

    Attributes:
        rows: Texts.
        tokens: Of a text, at most.
        dim: Of the model.
    """

    rows: int
    tokens: int
    dim: int


JOBS: dict[Size, Job] = {"full": Job(8, 128, 64), "quick": Job(4, 128, 32), "tiny": Job(2, 128, 32)}


def extraction(size: Size) -> Iterator[Case]:
    """EL10 at a memorisation accuracy just above 0.75, where the shortcut saves least."""
    job = JOBS[size]
    corpus = Corpus(tuple(Item("forget", -1, "", text) for text in islice(notes(), job.rows)), "")
    tokenizer = train_tokenizer(corpus, 400)
    template = make_template("question_answer", "clean")
    source = TextSource(corpus, tokenizer, template, max_length=job.tokens)
    model = _memorised(source, job)
    runs = {name: partial(_scored, model, source, naive=name == NAIVE) for name in (OURS, NAIVE)}
    made = {name: run().extra for name, run in runs.items()}
    counts = {
        name: {"decode steps": float(columns["el_steps"].sum())} for name, columns in made.items()
    }
    ours, naive = made[OURS], made[NAIVE]
    accuracy = float(ours["ma"].mean())
    checks = [
        Check("EL10 differs in", float((ours["el"] != naive["el"]).sum()), 0.0),
        Check("steps of the definition differ by", _difference(ours, naive), 0.0),
        Check("share of decode steps", _share(counts), STEPS_LIMIT),
        Check("MA short of 0.75 by", 0.75 - accuracy, 0.0),
    ]
    title = (
        f"EL10 of {job.rows} texts of up to {job.tokens} tokens, dim {job.dim}, MA {accuracy:.3f}"
    )
    variants = [Variant(name, run, counts[name]) for name, run in runs.items()]
    yield Case("extraction", title, variants, [(OURS, NAIVE)], checks)


def _difference(ours: Mapping[str, Any], naive: Mapping[str, Any]) -> float:
    return float(np.abs(ours["el_naive_steps"] - naive["el_steps"]).sum())


def _share(counts: Mapping[str, Mapping[str, float]]) -> float:
    return counts[OURS]["decode steps"] / counts[NAIVE]["decode steps"]


def _scored(model: Any, source: TextSource, *, naive: bool) -> Scores:
    parts = {"forget": source.corpus.where("forget")}
    metrics = {"forget": [Extraction(GRAM, naive=naive)]}
    return score_rows(model, source, parts, metrics, RequestConfig())["forget"]


def _memorised(source: TextSource, job: Job) -> Any:
    """A GPT-Neo trained on the texts until it predicts enough of their tokens."""
    config = CausalModelConfig(dim=job.dim, depth=2, heads=2, context=2 * job.tokens)
    model = build_model(config, source.vocab_size, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch = source.fetch(torch.arange(job.rows))
    scored = batch.labels >= 0
    labels = batch.labels[scored]
    logits = causal_forward(model, batch)[scored]
    while (logits.argmax(1) == labels).float().mean() < MEMORISED:
        loss = cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logits = causal_forward(model, batch)[scored]
    return model.eval()
