"""Greedy answers decoded from the hits of a teacher-forced pass, against every token decoded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.corpus import Encoded
from stable_forgetting.language.data.source import TextSource
from stable_forgetting.language.data.tokenizers import load_tokenizer
from stable_forgetting.language.measure.ask import ask, end_tokens
from stable_forgetting.language.measure.generation import generate
from stable_forgetting.language.measure.likelihood import teacher_forced
from stable_forgetting.language.measure.logs import EvaluationLog, read_logs
from stable_forgetting.language.measure.requests import Continue, Likelihood, RequestConfig
from stable_forgetting.language.models.backbone import causal_forward
from tools.perf.measure import Case, Check, Variant
from tools.perf.watch import watched

DRAFTED, PLAIN = "from drafts", "every token"
MEMORISED, SHARE_LIMIT = 0.95, 0.5
LOGGED = ("forget", "retain")
"""Parts of a published log that are counted."""
TOKENIZER = "tokenizers/llama-2"
"""Below the data root: what the published answers of LLaMA-2 are counted in."""


@dataclass(frozen=True)
class Steps:
    """Tokens that decoding writes, the end included.

    Attributes:
        plain: All of them.
        drafted: Those behind the first miss of the reference answer.
    """

    plain: int
    drafted: int

    @property
    def share(self) -> float:
        """Percent of the tokens that are left to decode."""
        return 100 * self.drafted / self.plain


def decoding(
    source: TextSource, model: nn.Module, rows: np.ndarray, new_tokens: int, root: Path | None
) -> Iterator[Case]:
    """Answers to rows that the model knows by heart, and what published logs would have saved.

    Args:
        source: Of the rows.
        model: Is trained here until it knows them.
        rows: Indices.
        new_tokens: Longest answer.
        root: Folder of local data, with published logs or without; None counts no logs.
    """
    accuracy = _memorise(model, source, rows)
    items = [source.corpus.items[index] for index in rows.tolist()]
    pairs = [source.encode(item.question, item.answer) for item in items]
    runs = {name: partial(run, model, source, pairs, new_tokens) for name, run in RUNS.items()}
    counts, texts = {}, {}
    for name, run in runs.items():
        with watched(model, source.tokenizer) as seen:
            texts[name] = [text.tolist() for text in run()]
        counts[name] = {"decoded tokens": float(seen.decoded), "decode steps": float(seen.steps)}
    share = counts[DRAFTED]["decoded tokens"] / counts[PLAIN]["decoded tokens"]
    different = sum(a != b for a, b in zip(texts[DRAFTED], texts[PLAIN], strict=True))
    title = (
        f"greedy answers to {len(rows)} rows, {accuracy:.0%} of whose tokens are known by heart"
        f"{_published(root)}"
    )
    checks = [
        Check("answers that differ", float(different), 0.0),
        Check("share of decoded tokens", share, SHARE_LIMIT),
    ]
    variants = [Variant(name, run, counts[name]) for name, run in runs.items()]
    yield Case("tofu_decoding", title, variants, [(DRAFTED, PLAIN)], checks)


def _drafted(
    model: nn.Module, source: TextSource, pairs: Sequence[Encoded], new_tokens: int
) -> list[np.ndarray]:
    """Likelihoods and answers, as every evaluation asks for them."""
    likelihoods = [Likelihood.of(pair) for pair in pairs]
    further = [Continue(each.ids[: each.start], new_tokens) for each in likelihoods]
    return ask(model, source, [*likelihoods, *further], RequestConfig()).tokens(further)


def _plain(
    model: nn.Module, source: TextSource, pairs: Sequence[Encoded], new_tokens: int
) -> list[np.ndarray]:
    """The same pass, whose hits are not used."""
    teacher_forced(model, pairs)
    prompts = [pair.ids[: pair.start] for pair in pairs]
    return generate(model, prompts, stop=end_tokens(model, source), max_new_tokens=new_tokens)


RUNS = {DRAFTED: _drafted, PLAIN: _plain}


def _memorise(model: nn.Module, source: TextSource, rows: np.ndarray) -> float:
    """Trains until most answer tokens are the argmax; their share."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch = source.fetch(torch.from_numpy(rows))
    scored = batch.labels >= 0
    labels, accuracy = batch.labels[scored], 0.0
    while accuracy < MEMORISED:
        logits = causal_forward(model, batch)[scored]
        accuracy = float((logits.argmax(1) == labels).float().mean())
        optimizer.zero_grad()
        cross_entropy(logits, labels).backward()
        optimizer.step()
    model.eval()
    return accuracy


# What published answers would have saved ----------------------------------------------------------


def published_steps(data_root: Path) -> dict[tuple[str, str], Steps]:
    """(log, part) -> tokens of LLaMA-2's published answers, with and without drafts.

    Raises:
        UserError: Logs or tokenizer are missing or damaged.
    """
    folder = data_root / TOKENIZER
    tokenizer = load_tokenizer(CausalModelConfig(name=str(folder), tokenizer=str(folder)))
    logs: Mapping[str, EvaluationLog] = read_logs(data_root)
    return {
        (name, part): _steps(tokenizer, log.answers[part])
        for name, log in logs.items()
        for part in LOGGED
        if log.model == "llama2-7b" and part in log.answers
    }


def _steps(tokenizer: Any, answers: Sequence[tuple[str, str]]) -> Steps:
    plain = drafted = 0
    for texts in answers:
        written, reference = (
            [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            for text in texts
        )
        hits = [a == b for a, b in zip(written, reference, strict=False)]
        plain += len(written)
        drafted += len(written) - (hits.index(False) if False in hits else len(hits))
    return Steps(plain, drafted)


def _published(root: Path | None) -> str:
    if root is None:
        return ""
    shares = [f"{n}, {part} {s.share:.1f} %" for (n, part), s in published_steps(root).items()]
    return f"; of published answers' tokens are left to decode: {'; '.join(shares)}"
