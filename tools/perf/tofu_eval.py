"""The TOFU evaluation: one pass with shared prompts against a pass per metric.

The naive one does what open-unlearning does: a pass over a data set for every metric, samples
tokenised as they come, batches of 32 in the data's order, a padded batch for each wrong answer,
logits of every position, and answers from batches that run until their slowest row ends.  Where a
checkout of open-unlearning is given (``--peer``), its own code does it, too.  A second case counts
and times decoding from drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from stable_forgetting.common.measure.scores import Scores
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.corpus import Corpus, Encoded, Item
from stable_forgetting.language.data.source import TextSource
from stable_forgetting.language.data.templates import make_template
from stable_forgetting.language.data.tokenizers import train_tokenizer
from stable_forgetting.language.measure.scoring import TofuEvaluation, score_parts
from stable_forgetting.language.metrics.tofu import HOLDOUT
from stable_forgetting.language.models.build import build_model
from tools.perf.drafts import decoding
from tools.perf.measure import Case, Check, Size, Variant
from tools.perf.tofu_peer import Peer, load_peer
from tools.perf.watch import watched

BATCH = 32
PUBLISHED = "253 forwards, 669,326 slots, 6,800 decode steps, 8,685 samples tokenised"
"""What open-unlearning was counted to do on forget10-sized data."""

SLOTS_LIMIT, FORWARDS_LIMIT = 0.45, 1 / 3


@dataclass(frozen=True)
class Job:
    """A model and rows per set.

    Attributes:
        new_tokens: Longest greedy answer.
        token_budget: Slots per forward of ours: small where there is little data, so that rows of
            one batch are of one length.
    """

    rows: Mapping[str, int]
    new_tokens: int
    dim: int
    depth: int
    token_budget: int = 8192


def _rows(forget: int, authors: int, facts: int) -> dict[str, int]:
    return {
        "forget": forget,
        "retain": forget,
        "test_real_authors": authors,
        "test_world_facts": facts,
        HOLDOUT: forget,
    }


COUNTED: dict[Size, Job] = {
    "full": Job(_rows(400, 100, 117), 200, 16, 1),
    "quick": Job(_rows(100, 25, 29), 50, 16, 1),
    "tiny": Job(_rows(64, 12, 13), 5, 16, 1, 5120),
}
"""What the counts are of; "full" has forget10's sizes."""

TIMED: dict[Size, Job] = {
    "full": Job(_rows(48, 12, 14), 64, 128, 4),
    "quick": Job(_rows(12, 4, 4), 16, 32, 2),
    "tiny": Job(_rows(5, 3, 3), 4, 16, 1),
}


def evaluation(
    size: Size, *, peer: Path | None = None, data_root: Path | None = None
) -> Iterator[Case]:
    """Likelihoods and greedy answers for all default metrics of TOFU, and answers from drafts.

    Args:
        size: Of the data.
        peer: A checkout of open-unlearning, whose code is timed, too.
        data_root: Folder of local data with published logs, whose answers are counted.
    """
    counted, timed = COUNTED[size], TIMED[size]
    runs, pairs = dict(RUNS), [(OURS, NAIVE)]
    if peer is not None:
        own = load_peer(peer, _source(make_data(timed)[0]).tokenizer, BATCH)
        runs[PEER], pairs = partial(naive, peer=own), [*pairs, (OURS, PEER)]
    corpus, parts = make_data(counted)
    counts = {name: _counts(run, counted, corpus, parts) for name, run in runs.items()}
    corpus, parts = make_data(timed)
    source, model = _source(corpus), make_model(timed, corpus)
    bound = {name: partial(run, model, source, parts, timed) for name, run in runs.items()}
    variants = [Variant(name, run, counts[name]) for name, run in bound.items()]
    made = [run() for run in bound.values()]
    rows = [sum(job.rows.values()) for job in (counted, timed)]
    title = (
        f"TOFU evaluation; counts: {rows[0]:,} rows, answers of {counted.new_tokens} tokens"
        f" (published for a pass per metric at forget10's size: {PUBLISHED}); times: {rows[1]}"
        f" rows, dim {timed.dim} depth {timed.depth}"
    )
    checks = [*_same(*made[:2]), *_fewer(counts[OURS], counts[NAIVE])]
    if peer is not None:
        checks += _same(made[0], made[2], of=" as open-unlearning", limits=(1e-4, 1e-6))
    yield Case("tofu_evaluation", title, variants, pairs, checks)
    yield from decoding(source, model, parts["forget"], timed.new_tokens, data_root)


def make_data(job: Job) -> tuple[Corpus, dict[str, np.ndarray]]:
    """Random words in TOFU's shape: lengths as in TOFU (facts are short), 5 or 3 wrong answers."""
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

    items = [item(name) for name, rows in job.rows.items() for _ in range(rows)]
    corpus = Corpus(tuple(items), "random words")
    return corpus, {name: corpus.where(name) for name in job.rows}


def _source(corpus: Corpus) -> TextSource:
    tokenizer = train_tokenizer(corpus, 1000)
    template = make_template("question_answer", "clean")
    return TextSource(corpus, tokenizer, template, max_length=512)


def make_model(job: Job, corpus: Corpus) -> nn.Module:
    """A LLaMA with random weights, which hardly ever ends an answer."""
    config = CausalModelConfig(kind="llama", dim=job.dim, depth=job.depth, heads=2)
    return build_model(config, _source(corpus).vocab_size, 0).eval()


# The two ways ------------------------------------------------------------------------------------


def ours(
    model: nn.Module, source: TextSource, parts: Mapping[str, np.ndarray], job: Job
) -> dict[str, Scores]:
    """One pass over everything, each text tokenised once."""
    fresh = TextSource(source.corpus, source.tokenizer, source.template, max_length=512)
    settings = TofuEvaluation(max_new_tokens=job.new_tokens, token_budget=job.token_budget)
    return score_parts(model, fresh, parts, settings, trial=False)


def naive(
    model: nn.Module,
    source: TextSource,
    parts: Mapping[str, np.ndarray],
    job: Job,
    *,
    peer: Peer | None = None,
) -> dict[str, dict[str, np.ndarray]]:
    """A pass per metric: forget answers for their probability, for min-k and for ES.

    ``peer`` computes each instead of this file.
    """
    losses, rouge = partial(_losses, peer=peer), partial(_rouge, peer=peer)
    columns: dict[str, dict[str, np.ndarray]] = {}
    for part, indices in parts.items():
        items = [source.corpus.items[index] for index in indices.tolist()]
        answers = [item.answer for item in items]
        for _ in range(3 if part == "forget" else 1):
            loss = losses(model, source, items, answers)
        columns[part] = {"answer_loss": loss}
        if part == HOLDOUT:
            continue
        if items[0].paraphrase:
            texts = [item.paraphrase or "" for item in items]
            columns[part]["paraphrase_loss"] = losses(model, source, items, texts)
        wrong = [
            losses(model, source, items, [item.perturbed[k] for item in items])
            for k in range(len(items[0].perturbed))
        ]
        columns[part]["perturbed_loss"] = np.stack(wrong, axis=1)
        columns[part]["rouge_l_recall"] = rouge(model, source, items, job.new_tokens)
    return columns


OURS, NAIVE, PEER = "ours, one pass", "a pass per metric", "open-unlearning"
RUNS: dict[str, Callable[..., Any]] = {OURS: ours, NAIVE: naive}


def _tokenised(source: TextSource, item: Item, answer: str) -> Encoded:
    """Prompt and answer, tokenised anew."""
    prompt = source.tokenizer(source.template.prompt(item.question))["input_ids"]
    tokens = source.tokenizer(source.template.lead + answer)["input_ids"]
    return Encoded(np.asarray([*prompt, *tokens, source.tokenizer.eos_token_id]), len(prompt))


@torch.no_grad()
def _losses(
    model: nn.Module,
    source: TextSource,
    items: Sequence[Item],
    answers: Sequence[str],
    *,
    peer: Peer | None,
) -> np.ndarray:
    if peer is not None:
        rows = zip(items, answers, strict=True)
        return peer.losses(model, [_tokenised(source, item, answer) for item, answer in rows])
    losses = []
    for start in range(0, len(items), BATCH):
        rows = zip(items[start : start + BATCH], answers[start : start + BATCH], strict=True)
        pairs = [_tokenised(source, item, answer) for item, answer in rows]
        width = max(len(pair.ids) for pair in pairs)
        ids, mask = (torch.zeros(len(pairs), width, dtype=torch.int64) for _ in range(2))
        labels = torch.full_like(ids, -100)
        for row, pair in enumerate(pairs):
            tokens = torch.from_numpy(pair.ids)
            ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
            labels[row, pair.start : len(tokens)] = tokens[pair.start :]
        logits = model(input_ids=ids, attention_mask=mask, labels=labels).logits
        loss = cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
        losses.append((loss.sum(1) / (labels != -100).sum(1)).numpy())
    return np.concatenate(losses)


@torch.no_grad()
def _rouge(
    model: Any, source: TextSource, items: Sequence[Item], new_tokens: int, *, peer: Peer | None
) -> np.ndarray:
    from rouge_score.rouge_scorer import RougeScorer

    if peer is not None:
        whole = [_tokenised(source, item, item.answer) for item in items]
        return peer.rouge(model, whole, new_tokens)
    recalls = []
    for start in range(0, len(items), BATCH):
        rows = items[start : start + BATCH]
        scorer = RougeScorer(["rouge1", "rougeL"], use_stemmer=True)
        pairs = [_tokenised(source, item, item.answer) for item in rows]
        prompts = [pair.ids[: pair.start] for pair in pairs]
        width = max(map(len, prompts))
        ids, mask = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(2))
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.from_numpy(prompt)
            mask[row, width - len(prompt) :] = 1
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


# Counting ----------------------------------------------------------------------------------------


def _counts(
    run: Callable[..., Any], job: Job, corpus: Corpus, parts: Mapping[str, np.ndarray]
) -> dict[str, float]:
    source, model = _source(corpus), make_model(job, corpus)
    with watched(model, source.tokenizer) as seen:
        run(model, source, parts, job)
    return {
        "forwards": seen.forwards,
        "token slots": seen.slots,
        "decode steps": seen.steps,
        "tokeniser calls": seen.tokenised,
        "texts": len(_texts(corpus)),
    }


def _texts(corpus: Corpus) -> set[tuple[str, str]]:
    """Distinct questions, and distinct answers of every kind."""
    answers = {
        ("answer", text)
        for item in corpus.items
        for text in (
            (item.answer,)
            if item.set == HOLDOUT
            else (item.answer, item.paraphrase or item.answer, *item.perturbed)
        )
    }
    return answers | {("question", item.question) for item in corpus.items}


def _fewer(mine: Mapping[str, float], theirs: Mapping[str, float]) -> list[Check]:
    slots, forwards = (mine[name] / theirs[name] for name in ("token slots", "forwards"))
    return [
        Check("share of the naive token slots", slots, SLOTS_LIMIT),
        Check("share of the naive forwards", forwards, FORWARDS_LIMIT),
        Check("tokeniser calls beyond one per text", mine["tokeniser calls"] - mine["texts"], 1),
    ]


def _same(
    mine: Mapping[str, Scores],
    theirs: Mapping[str, Mapping[str, np.ndarray]],
    *,
    of: str = "",
    limits: tuple[float, float] = (1e-5, 1e-9),
) -> list[Check]:
    gaps: dict[str, float] = {}
    for part, columns in theirs.items():
        for name, values in columns.items():
            gap = float(np.abs(mine[part].extra[name] - values).max())
            kind = "rouge" if name.startswith("rouge") else "loss"
            gaps[kind] = max(gap, gaps.get(kind, 0.0))
    return [
        Check(f"same losses{of} (largest difference, nats)", gaps["loss"], limits[0]),
        Check(f"same ROUGE-L{of} (largest difference)", gaps["rouge"], limits[1]),
    ]
