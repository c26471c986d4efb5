"""The TOFU evaluation: one pass with shared prompts against a pass per metric.

The naive one does what open-unlearning does: a pass over a data set for every metric, samples
tokenised as they come, batches of 32 in the data's order, a padded batch for each wrong answer,
logits of every position, and answers from batches that run until their slowest row ends.  A second
case decodes greedy answers from the hits of a teacher-forced pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from rouge_score.rouge_scorer import RougeScorer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stable_forgetting.common.data.batch import IGNORE
from stable_forgetting.common.measure.scores import Scores
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.corpus import Corpus, Encoded, Item
from stable_forgetting.language.data.source import TextSource
from stable_forgetting.language.data.templates import make_template
from stable_forgetting.language.data.tokenizers import train_tokenizer
from stable_forgetting.language.measure.ask import ask, end_tokens
from stable_forgetting.language.measure.generation import generate
from stable_forgetting.language.measure.likelihood import teacher_forced
from stable_forgetting.language.measure.requests import Continue, Likelihood, RequestConfig
from stable_forgetting.language.measure.scoring import TofuEvaluation, score_parts
from stable_forgetting.language.metrics.tofu import HOLDOUT
from stable_forgetting.language.models.backbone import causal_forward
from stable_forgetting.language.models.build import build_model
from tools.perf.timing import Case

BATCH = 32
OURS, NAIVE = "ours, one pass", "a pass per metric"
DRAFTED, PLAIN = "from drafts", "every token"
MEMORISED = 0.95


@dataclass(frozen=True)
class Job:
    """Rows to forget (as many are retained and held out), of real authors and of world facts.

    Attributes:
        new_tokens: Longest greedy answer.
        token_budget: Slots per forward of ours: small where there is little data, so that rows of
            one batch are of one length.
    """

    rows: tuple[int, int, int]
    new_tokens: int
    dim: int
    depth: int
    token_budget: int = 8192

    @property
    def parts(self) -> dict[str, int]:
        """Rows per set."""
        forget, authors, facts = self.rows
        facts_of = {"test_real_authors": authors, "test_world_facts": facts}
        return {"forget": forget, "retain": forget, **facts_of, HOLDOUT: forget}


COUNTED, QUICK_COUNTED = Job((400, 100, 117), 200, 16, 1), Job((64, 12, 13), 5, 16, 1, 5120)
TIMED, QUICK_TIMED = Job((48, 12, 14), 64, 128, 4), Job((5, 3, 3), 4, 16, 1)
"""The counts are of forget10's sizes, the times of fewer rows and a larger model."""


def evaluation(quick: bool) -> Iterator[Case]:
    """Likelihoods and greedy answers for all default metrics of TOFU, and answers from drafts."""
    counted, timed = (QUICK_COUNTED, QUICK_TIMED) if quick else (COUNTED, TIMED)
    ways = {OURS: one_pass, NAIVE: pass_per_metric}
    counts = {name: _counts(way, counted) for name, way in ways.items()}
    source, parts, model = prepare(timed)
    runs = {name: partial(way, model, source, parts, timed) for name, way in ways.items()}
    given = (model, source, parts, timed)
    checks = _same(one_pass(*given), pass_per_metric(*given))
    for name, limit in (("token slots", 0.46), ("forwards", 0.45), ("tokeniser calls", 0.5)):
        checks[f"share of the naive {name}"] = (counts[OURS][name] / counts[NAIVE][name], limit)
    rows = [sum(job.parts.values()) for job in (counted, timed)]
    title = (
        f"TOFU evaluation; counts: {rows[0]:,} rows, answers of {counted.new_tokens} tokens; times:"
        f" {rows[1]} rows, dim {timed.dim} depth {timed.depth}"
    )
    yield Case("tofu_evaluation", title, runs, [(OURS, NAIVE)], checks, counts)
    yield _decoding(source, model, parts["forget"], timed.new_tokens)


def prepare(job: Job) -> tuple[TextSource, dict[str, np.ndarray], nn.Module]:
    """Random words in TOFU's shape (5 or 3 wrong answers) and a LLaMA with random weights."""
    stream = np.random.Generator(np.random.PCG64(0))
    words = ["".join(stream.choice([*"abcdefghijklmnop"], 5)) for _ in range(300)]

    def text(low: int, high: int) -> str:
        return " ".join(stream.choice(words, stream.integers(low, high)))

    def item(name: str) -> Item:
        short = name in ("test_real_authors", "test_world_facts")
        answer = (1, 5) if short else (15, 60)
        return Item(
            set=name,
            group=-1,
            question=text(8, 16) if short else text(10, 30),
            answer=text(*answer),
            paraphrase=None if short else text(*answer),
            perturbed=tuple(text(*answer) for _ in range(3 if short else 5)),
        )

    items = [item(name) for name, rows in job.parts.items() for _ in range(rows)]
    corpus = Corpus(tuple(items), "random words")
    source = _source(corpus)
    config = CausalModelConfig(kind="llama", dim=job.dim, depth=job.depth, heads=2)
    model = build_model(config, source.vocab_size, 0).eval()
    return source, {name: corpus.where(name) for name in job.parts}, model


def _source(corpus: Corpus, tokenizer: Any = None) -> TextSource:
    template = make_template("question_answer", "clean")
    return TextSource(corpus, tokenizer or train_tokenizer(corpus, 1000), template, max_length=512)


# The two ways ------------------------------------------------------------------------------------


def one_pass(
    model: nn.Module, source: TextSource, parts: Mapping[str, np.ndarray], job: Job
) -> dict[str, Scores]:
    """One pass over everything, each text tokenised once."""
    fresh = _source(source.corpus, source.tokenizer)
    settings = TofuEvaluation(max_new_tokens=job.new_tokens, token_budget=job.token_budget)
    return score_parts(model, fresh, parts, settings, trial=False)


def pass_per_metric(
    model: nn.Module, source: TextSource, parts: Mapping[str, np.ndarray], job: Job
) -> dict[str, dict[str, np.ndarray]]:
    """A pass per metric: forget answers for their probability, for min-k and for ES."""
    columns: dict[str, dict[str, np.ndarray]] = {}
    for part, indices in parts.items():
        items = [source.corpus.items[index] for index in indices.tolist()]
        for _ in range(3 if part == "forget" else 1):
            loss = _losses(model, source, items, [item.answer for item in items])
        columns[part] = {"answer_loss": loss}
        if part == HOLDOUT:
            continue
        if items[0].paraphrase:
            texts = [item.paraphrase or "" for item in items]
            columns[part]["paraphrase_loss"] = _losses(model, source, items, texts)
        wrong = [
            _losses(model, source, items, [item.perturbed[k] for item in items])
            for k in range(len(items[0].perturbed))
        ]
        columns[part]["perturbed_loss"] = np.stack(wrong, axis=1)
        columns[part]["rouge_l_recall"] = _rouge(model, source, items, job.new_tokens)
    return columns


def _tokenised(source: TextSource, item: Item, answer: str) -> Encoded:
    """Prompt and answer, tokenised anew."""
    prompt = source.tokenizer(source.template.prompt(item.question))["input_ids"]
    tokens = source.tokenizer(source.template.lead + answer)["input_ids"]
    return Encoded(np.asarray([*prompt, *tokens, source.tokenizer.eos_token_id]), len(prompt))


@torch.no_grad()
def _losses(
    model: nn.Module, source: TextSource, items: Sequence[Item], answers: Sequence[str]
) -> np.ndarray:
    losses = []
    for start in range(0, len(items), BATCH):
        rows = zip(items[start : start + BATCH], answers[start : start + BATCH], strict=True)
        pairs = [_tokenised(source, item, answer) for item, answer in rows]
        width = max(len(pair.ids) for pair in pairs)
        ids, mask = (torch.zeros(len(pairs), width, dtype=torch.int64) for _ in range(2))
        labels = torch.full_like(ids, IGNORE)
        for row, pair in enumerate(pairs):
            tokens = torch.from_numpy(pair.ids)
            ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
            labels[row, pair.start : len(tokens)] = tokens[pair.start :]
        logits = model(input_ids=ids, attention_mask=mask, labels=labels).logits
        loss = cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
        losses.append((loss.sum(1) / (labels != IGNORE).sum(1)).numpy())
    return np.concatenate(losses)


@torch.no_grad()
def _rouge(model: Any, source: TextSource, items: Sequence[Item], new_tokens: int) -> np.ndarray:
    recalls: list[float] = []
    for start in range(0, len(items), BATCH):
        rows = items[start : start + BATCH]
        scorer = RougeScorer(["rouge1", "rougeL"], use_stemmer=True)
        prompts = [_prompt(_tokenised(source, item, item.answer)) for item in rows]
        width = max(map(len, prompts))
        ids, mask = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(2))
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, 1
        end = source.tokenizer.eos_token_id
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": new_tokens}
        options |= {"eos_token_id": end, "pad_token_id": end}
        out = model.generate(ids, attention_mask=mask, **options)
        texts = source.tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
        recalls += [
            scorer.score(item.answer, text.strip())["rougeL"].recall
            for item, text in zip(rows, texts, strict=True)
        ]
    return np.asarray(recalls)


def _prompt(pair: Encoded) -> Tensor:
    return torch.from_numpy(pair.ids[: pair.start])


def _same(
    mine: Mapping[str, Scores], theirs: Mapping[str, Mapping[str, np.ndarray]]
) -> dict[str, tuple[float, float]]:
    gaps = {"loss": 0.0, "rouge": 0.0}
    for part, columns in theirs.items():
        for name, values in columns.items():
            kind = "rouge" if name.startswith("rouge") else "loss"
            gaps[kind] = max(gaps[kind], float(np.abs(mine[part].extra[name] - values).max()))
    return {
        "same losses (largest difference, nats)": (gaps["loss"], 1e-5),
        "same ROUGE-L (largest difference)": (gaps["rouge"], 1e-9),
    }


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

    handle = model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with mock.patch.object(type(tokenizer), "__call__", counting):
            yield seen
    finally:
        handle.remove()


def _counts(way: Any, job: Job) -> dict[str, float]:
    source, parts, model = prepare(job)
    with asked_of(model, source.tokenizer) as seen:
        way(model, source, parts, job)
    return {name: value for name, value in seen.items() if name != "decode slots"}


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
