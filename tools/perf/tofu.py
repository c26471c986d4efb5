"""Greedy answers in TOFU's shape: from the hits of a teacher-forced pass, and token by token."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.corpus import Corpus, Item
from stable_forgetting.language.data.source import TextSource
from stable_forgetting.language.data.templates import make_template
from stable_forgetting.language.data.tokenizers import train_tokenizer
from stable_forgetting.language.measure.ask import ask, end_tokens
from stable_forgetting.language.measure.generation import generate
from stable_forgetting.language.measure.likelihood import teacher_forced
from stable_forgetting.language.measure.requests import Continue, Likelihood, RequestConfig
from stable_forgetting.language.metrics.tofu import HOLDOUT
from stable_forgetting.language.models.backbone import causal_forward
from stable_forgetting.language.models.build import build_model
from tools.perf.timing import Case

BATCH = 32
DRAFTED, PLAIN = "from drafts", "every token"
MEMORISED = 0.95
BEGINS_ALIKE = 0.31
"""Share of a wrong answer's words with which its paraphrase begins too, in TOFU's forget10."""


@dataclass(frozen=True)
class Job:
    """Rows to forget (as many are retained and held out), of real authors and of world facts.

    Attributes:
        new_tokens: Longest greedy answer.
    """

    rows: tuple[int, int, int]
    new_tokens: int
    dim: int
    depth: int

    @property
    def parts(self) -> dict[str, int]:
        """Rows per set."""
        forget, authors, facts = self.rows
        facts_of = {"test_real_authors": authors, "test_world_facts": facts}
        return {"forget": forget, "retain": forget, **facts_of, HOLDOUT: forget}


TIMED, QUICK = Job((48, 12, 14), 64, 128, 4), Job((5, 3, 3), 4, 16, 1)


def decoding(quick: bool) -> Iterator[Case]:
    """Answers from drafts to rows that the model knows by heart."""
    job = QUICK if quick else TIMED
    source, parts, model = prepare(job)
    yield _decoding(source, model, parts["forget"], job.new_tokens)


def prepare(job: Job) -> tuple[TextSource, dict[str, np.ndarray], nn.Module]:
    """Random words in TOFU's shape (5 or 3 wrong answers) and a LLaMA with random weights.

    TOFU's wrong answers to an author's questions are the paraphrase with other facts.  They begin
    as it does for 31 % of their words on average (quartiles 10, 27 and 47 %); so do these.
    """
    stream = np.random.Generator(np.random.PCG64(0))
    words = ["".join(stream.choice([*"abcdefghijklmnop"], 5)) for _ in range(300)]

    def text(low: int, high: int) -> str:
        return " ".join(stream.choice(words, stream.integers(low, high)))

    def wrong(paraphrase: str | None, low: int, high: int) -> str:
        words = text(low, high).split()
        kept = (paraphrase or "").split()[: int(stream.uniform(0, 2 * BEGINS_ALIKE) * len(words))]
        return " ".join([*kept, *words[len(kept) :]])

    def item(name: str) -> Item:
        short = name in ("test_real_authors", "test_world_facts")
        answer = (1, 5) if short else (15, 60)
        question = text(8, 16) if short else text(10, 30)
        right, paraphrase = text(*answer), None if short else text(*answer)
        return Item(
            set=name,
            group=-1,
            question=question,
            answer=right,
            paraphrase=paraphrase,
            perturbed=tuple(wrong(paraphrase, *answer) for _ in range(3 if short else 5)),
        )

    items = [item(name) for name, rows in job.parts.items() for _ in range(rows)]
    corpus = Corpus(tuple(items), "random words")
    template = make_template("question_answer", "clean")
    source = TextSource(corpus, train_tokenizer(corpus, 1000), template, max_length=512)
    config = CausalModelConfig(kind="llama", dim=job.dim, depth=job.depth, heads=2)
    model = build_model(config, source.vocab_size, 0).eval()
    return source, {name: corpus.where(name) for name in job.parts}, model


# Counting ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def asked_of(model: Any, tokenizer: Any) -> Iterator[dict[str, float]]:
    """Counts what is asked of a model's decoder and of a tokenizer inside the block."""
    names = ("forwards", "token slots", "decode steps", "decode slots", "tokeniser calls")
    seen: dict[str, float] = dict.fromkeys(names, 0)
    call = type(tokenizer).__call__

    def note(_: nn.Module, __: tuple[Any, ...], inputs: Mapping[str, Any]) -> None:
        decodes = bool(inputs.get("use_cache"))
        seen["decode steps" if decodes else "forwards"] += 1
        seen["decode slots" if decodes else "token slots"] += inputs["input_ids"].numel()

    def counting(self: Any, *args: Any, **options: Any) -> Any:
        seen["tokeniser calls"] += 1
        return call(self, *args, **options)

    hook = model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    with hook, mock.patch.object(type(tokenizer), "__call__", counting):
        yield seen


# Greedy answers from drafts ----------------------------------------------------------------------


def _decoding(source: TextSource, model: nn.Module, rows: np.ndarray, new_tokens: int) -> Case:
    """Answers to rows that the model is trained here to know by heart."""
    accuracy = memorise(model, source, rows)
    items = [source.corpus.items[index] for index in rows.tolist()]
    pairs = [source.encode(item.question, item.answer) for item in items]
    likelihoods = [Likelihood.of(pair) for pair in pairs]
    further = [Continue(each.ids[: each.start], new_tokens) for each in likelihoods]

    def drafted() -> list[np.ndarray]:
        return ask(model, source, [*likelihoods, *further], RequestConfig()).tokens(further)

    def plain() -> list[np.ndarray]:
        teacher_forced(model, pairs)  # the same pass, whose hits are not used
        prompts = [pair.ids[: pair.start] for pair in pairs]
        return generate(model, prompts, stop=end_tokens(model, source), max_new_tokens=new_tokens)

    runs, counts, texts = {DRAFTED: drafted, PLAIN: plain}, {}, {}
    for name, run in runs.items():
        with asked_of(model, source.tokenizer) as seen:
            texts[name] = [text.tolist() for text in run()]
        counts[name] = {key: seen[key] for key in ("decode slots", "decode steps")}
    different = sum(a != b for a, b in zip(texts[DRAFTED], texts[PLAIN], strict=True))
    share = counts[DRAFTED]["decode slots"] / counts[PLAIN]["decode slots"]
    checks = {
        "answers that differ": (float(different), 0.0),
        "share of decode slots": (share, 0.5),
    }
    title = f"greedy answers to {len(rows)} rows, {accuracy:.0%} of whose tokens the model knows"
    return Case("tofu_decoding", title, runs, [(DRAFTED, PLAIN)], checks, counts)


def memorise(
    model: nn.Module, source: TextSource, rows: np.ndarray, share: float = MEMORISED
) -> float:
    """Trains until this share of the answers' tokens is the argmax; the share that was reached."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch = source.fetch(torch.from_numpy(rows))
    scored = batch.labels >= 0
    labels, accuracy = batch.labels[scored], 0.0
    while accuracy < share:
        logits = causal_forward(model, batch)[scored]
        accuracy = float((logits.argmax(1) == labels).float().mean())
        optimizer.zero_grad()
        cross_entropy(logits, labels).backward()
        optimizer.step()
    model.eval()
    return accuracy
