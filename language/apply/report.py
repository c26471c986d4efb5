"""What is measured of a language model around an application, and what it says in plain words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from stable_forgetting.common.measure.metric import MetricSpec
from stable_forgetting.common.measure.scores import Scores
from stable_forgetting.language.measure.scoring import TofuEvaluation
from stable_forgetting.language.metrics.memorization import membership_auc

ANSWERED = "answers"
ANSWERS = 32
"""Questions of each part that are answered greedily."""

METRICS = (
    MetricSpec("probability", "target", "probability per token"),
    MetricSpec("loss", "target", "loss", "nats per token"),
    MetricSpec("exact_memorization", "target", "tokens predicted exactly"),
    MetricSpec("extraction_strength", "target", "end that follows word by word"),
    MetricSpec("rouge_l_recall", "target", "recall of greedy answers (ROUGE-L)"),
    MetricSpec("loss_auc", "target", "AUC of membership by loss"),
    MetricSpec("min_k_auc", "target", "AUC of membership by min-k"),
)
EVALUATION = TofuEvaluation(reference_cap=1.0)
"""An answer ends at its reference's length: that fits the context, and recall needs no more."""


def evaluated(scores: Mapping[str, Scores]) -> dict[str, float | None]:
    """Likelihood, memorisation, greedy answers and membership of one model.

    Args:
        scores: Of ``forget`` and, where given, ``retain``, ``test`` and ``validation``.

    Returns:
        Of each part ``part.rows``; ``part.loss``: nats per token, averaged within a row, then over
        rows; and in percent, averaged over rows: ``probability`` exp(-loss of the row),
        ``exact_memorization`` share of tokens that are the most likely ones,
        ``extraction_strength`` share of the row's end that follows word by word,
        ``rouge_l_recall`` of greedy answers (``answered``), None for plain texts.  And percent
        chances that a forget row looks more familiar than a test row (50: they cannot be told
        apart), None without test rows: ``loss_auc`` by loss, ``min_k_auc`` by the loss of the 40 %
        least likely tokens.
    """
    results: dict[str, float | None] = {}
    for name in scores:
        if not name.endswith(ANSWERED):
            values = _summary(scores[name], scores.get(f"{name}.{ANSWERED}"))
            results |= {f"{name}.{key}": value for key, value in values.items()}
    for key, column in (("loss_auc", "answer_loss"), ("min_k_auc", "min_k")):
        results[key] = None
        if "test" in scores:
            members, others = (scores[name].extra[column] for name in ("forget", "test"))
            results[key] = 100 * membership_auc(members, others)
    return results


def _summary(scores: Scores, answers: Scores | None) -> dict[str, float | None]:
    loss, extra = scores.extra["answer_loss"], scores.extra
    return {
        "rows": len(scores),
        "loss": float(loss.mean()),
        "probability": 100 * float(np.exp(-loss).mean()),
        "exact_memorization": 100 * float(extra["exact_memorization"].mean()),
        "extraction_strength": 100 * float(extra["extraction_strength"].mean()),
        "answered": 0 if answers is None else len(answers),
        "rouge_l_recall": None
        if answers is None
        else 100 * float(answers.extra["rouge_l_recall"].mean()),
    }


def outcome(statement: Mapping[str, Any]) -> list[str]:
    """What these measurements say, in plain words."""
    before, after = statement["before"], statement["after"]
    lines = []
    share = before["forget"]["exact_memorization"]
    if share < 50:
        lines.append(
            f"The given model predicted only {share:.1f} % of the forget tokens before: it may not "
            "know these texts, or know them in another prompt (--template)."
        )
    lines += [_change(part, before[part], after[part]) for part in statement["data"]]
    guessing = math.log(statement["input"]["vocabulary"])
    if after["forget"]["loss"] > guessing:
        lines.append(
            f"The forget loss is above that of guessing among all tokens ({guessing:.2f} nats): "
            "the model now avoids these texts, which betrays them, and may babble."
        )
    lines += _membership(before, after)
    lines.append(
        "Other wordings and languages, and what can be inferred from other texts, were not tried."
    )
    return lines


def _change(part: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    text = (
        f"On {part} rows the probability of the text went from {was['probability']:.1f} % to "
        f"{now['probability']:.1f} % per token (loss {was['loss']:.2f} to {now['loss']:.2f} nats), "
        f"tokens predicted exactly from {was['exact_memorization']:.1f} % to "
        f"{now['exact_memorization']:.1f} %"
    )
    if now["rouge_l_recall"] is None:
        return text + "."
    return text + (
        f", and recall of {now['answered']} greedy answers (ROUGE-L) from "
        f"{was['rouge_l_recall']:.1f} % to {now['rouge_l_recall']:.1f} %."
    )


def _membership(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    if after["min_k_auc"] is None:
        return [
            "Membership inference was not measured: it needs rows that the model never saw (test)."
        ]
    return [
        f"By the least likely tokens (min-k), an attack separates a forget row from a test row "
        f"with AUC {after['min_k_auc']:.1f} % (before: {before['min_k_auc']:.1f} %); 50 % is "
        "chance, far below 50 % betrays the forget set as much as far above, and stronger attacks "
        "exist; test rows of another kind or style would differ anyway."
    ]
