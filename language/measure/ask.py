"""One pass over all that is asked of a model: each request once, packed and batched.

Parts may overlap, metrics may ask the same and answers may coincide: the model never notices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from stable_forgetting.common.measure.scores import COLUMNS, ENTROPIES, Scores
from stable_forgetting.language.data.corpus import Encoded, Item
from stable_forgetting.language.data.source import TextSource
from stable_forgetting.language.measure.generation import generate
from stable_forgetting.language.measure.likelihood import teacher_forced
from stable_forgetting.language.measure.requests import (
    AnswerScores,
    Choose,
    Continue,
    Likelihood,
    Replies,
    Request,
    RequestConfig,
    TextMetric,
)

Prompt = tuple[int, ...]


def beginnings(requests: Sequence[Likelihood], scores: AnswerScores) -> dict[Prompt, Prompt]:
    """Prompt -> the tokens with which the greedy answer to it begins.

    While the argmax is the reference's next token, the greedy answer is the reference.  So the hits
    of a pass that is made anyway say where decoding has to start.  Of several answers to one prompt
    the one that is met furthest counts.
    """
    longest: dict[Prompt, Prompt] = {}
    rows = np.split(scores.hits, np.cumsum(scores.counts))[:-1]
    for request, hits in zip(requests, rows, strict=True):
        met = len(hits) if hits.all() else int(hits.argmin())
        prompt = request.ids[: request.start]
        if met > len(longest.get(prompt, ())):
            longest[prompt] = request.ids[request.start : request.start + met]
    return longest


def drafts(
    requests: Sequence[Continue], begun: dict[Prompt, Prompt], masked_id: int | None
) -> list[Prompt]:
    """A draft per request; none where its prompt was not asked, or has a token without a position,
    since a teacher-forced pass counts all positions."""
    return [() if masked_id in request.ids else begun.get(request.ids, ()) for request in requests]


def ask(
    model: nn.Module,
    source: TextSource,
    requests: Iterable[Request],
    config: RequestConfig,
    *,
    detailed: Iterable[Likelihood] = (),
    masked_id: int | None = None,
) -> Replies:
    """Asks each distinct request once; the model is put into eval mode.

    Args:
        detailed: Likelihoods whose ``means`` are wanted.
        masked_id: See :func:`language.measure.likelihood.teacher_forced`.

    Raises:
        Diverged: A scored logit is NaN or infinite.
    """
    distinct: dict[Likelihood | Continue, None] = {}
    for request in requests:
        several = request.likelihoods if isinstance(request, Choose) else (request,)
        distinct.update(dict.fromkeys(several))
    likelihoods = [request for request in distinct if isinstance(request, Likelihood)]
    rich = set(detailed)
    pairs = [Encoded(np.asarray(each.ids, dtype=np.int64), each.start) for each in likelihoods]
    scored = teacher_forced(
        model,
        pairs,
        token_budget=config.token_budget,
        share_prompts=config.share_prompts,
        detailed=np.asarray([request in rich for request in likelihoods], dtype=bool),
        masked_id=masked_id,
    )
    continued = [request for request in distinct if isinstance(request, Continue)]
    places = {request: place for place, request in enumerate(likelihoods)}
    begun = beginnings(likelihoods, scored)
    written = _written(model, source, continued, config, begun, masked_id)
    return Replies(places, scored, written)


def _written(
    model: nn.Module,
    source: TextSource,
    requests: Sequence[Continue],
    config: RequestConfig,
    begun: dict[Prompt, Prompt],
    masked_id: int | None,
) -> dict[Continue, np.ndarray]:
    """Requests with the same ends go together."""
    groups: dict[Any, list[Continue]] = {}
    for request in requests:
        groups.setdefault((request.stop, request.stop_text), []).append(request)
    written: dict[Continue, np.ndarray] = {}
    for (stop, stop_text), members in groups.items():
        texts = generate(
            model,
            [np.asarray(request.ids, dtype=np.int64) for request in members],
            stop=end_tokens(model, source) if stop is None else stop,
            stop_text=stop_text,
            decode=source.decode,
            max_new_tokens=[request.limit for request in members],
            batch_size=config.generation_batch,
            token_budget=config.token_budget,
            drafts=drafts(members, begun, masked_id),
            masked_id=masked_id,
        )
        written |= dict(zip(members, texts, strict=True))
    return written


def end_tokens(model: Any, source: TextSource) -> set[int]:
    """Tokens that end a text for the template, the tokenizer or the model."""
    own = {source.encoder.end, source.tokenizer.eos_token_id}
    return (own - {None}) | model_ends(model)


def model_ends(model: Any) -> set[int]:
    """Tokens that end a text for the model."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    tokens = configured if isinstance(configured, Iterable) else [configured]
    return {token for token in tokens if token is not None}


def score_rows(
    model: nn.Module,
    source: TextSource,
    parts: Mapping[str, np.ndarray],
    metrics: Mapping[str, Sequence[TextMetric]],
    config: RequestConfig,
    *,
    encode: Callable[[Item], Encoded] | None = None,
    masked_id: int | None = None,
) -> dict[str, Scores]:
    """Scores of every part, in the order of its indices, from one pass over all of them.

    Args:
        parts: Int64 index sets into the source's corpus.
        metrics: Part -> what to measure on its rows.
        encode: A row's tokens, when its question and answer are not the template's.
        masked_id: See :func:`language.measure.likelihood.teacher_forced`.

    Returns:
        Part -> scores, whose scalar columns are means over the tokens of each row's answer, without
        entropies and with the metrics' columns as ``extra``.

    Raises:
        Diverged: A scored logit is NaN or infinite.
        DataError: An answer has no label within the length limit.
    """
    items = {part: [source.corpus.items[i] for i in ids.tolist()] for part, ids in parts.items()}
    if encode is None:
        rows_of = itertools.chain(*items.values())
        source.encoder.prepare((row.question, row.answer) for row in rows_of)
    encode = encode or (lambda row: source.encode(row.question, row.answer))
    requests: list[Request] = []
    answers: dict[str, list[Likelihood]] = {}
    for part, rows in items.items():
        answers[part] = [Likelihood.of(encode(row)) for row in rows]
        requests += answers[part]
        for metric in metrics[part]:
            requests += metric.requests(source, rows)
    wanted = itertools.chain(*answers.values())
    replies = ask(model, source, requests, config, detailed=wanted, masked_id=masked_id)
    columns = [name for name in COLUMNS if name not in ENTROPIES]
    further: dict[Continue, None] = {}
    for part, rows in items.items():
        for metric in metrics[part]:
            further |= dict.fromkeys(metric.follow_up(source, rows, replies))
    written = _written(model, source, list(further), config, {}, masked_id)
    replies = replace(replies, written={**replies.written, **written})
    scores = {}
    for part, indices in parts.items():
        means = replies.scores(answers[part]).means.astype(np.float32)
        made = [metric.columns(source, items[part], replies) for metric in metrics[part]]
        extra = {name: column for columns in made for name, column in columns.items()}
        scores[part] = Scores(
            indices=np.asarray(indices, dtype=np.int64),
            **{name: means[:, COLUMNS.index(name)].copy() for name in columns},
            extra=extra,
        )
    return scores


def greedy_answers(
    model: nn.Module, source: TextSource, rows: Sequence[Encoded], masked_id: int | None = None
) -> list[str]:
    """What a model writes greedily after the prompts of rows, hardly longer than their answers."""
    texts = generate(
        model,
        [row.ids[: row.start] for row in rows],
        stop=end_tokens(model, source),
        max_new_tokens=[len(row.ids) - row.start + 4 for row in rows],
        masked_id=masked_id,
    )
    return [source.decode(text.tolist()).strip() for text in texts]
