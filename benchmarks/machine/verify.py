"""Published results recomputed by our own code: ``unlearn verify``."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stable_forgetting.benchmarks.report.section import Section, table
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.measure.gaps import ks_two_sample
from stable_forgetting.language.measure.logs import EvaluationLog, read_logs, read_reference_values
from stable_forgetting.language.metrics.rouge import rouge
from stable_forgetting.language.metrics.tofu import PARTS, tofu_compare, tofu_metrics

TOLERANCE = 1e-6
FQ_TOLERANCE = 1e-4
"""Relative: the published p-values have six digits."""

PAPER_ORIGINAL_FQ = 1.15e-17
"""The paper's forget quality of Original, Phi-1.5, in every one of its TOFU tables."""

_NAMES = {"forget": "forget", "retain": "retain", "ra": "real_authors", "wf": "world_facts"}
_RATES = {"prob": "probability", "rouge": "rouge", "truth_ratio": "truth_ratio"}
_AGAINST = "_vs_retain90"


@dataclass(frozen=True)
class LoggedValue:
    """One published value beside ours.

    Attributes:
        recomputed: By our code from the per-sample columns.
        error: What is compared with the limit: absolute, or relative for forget quality.
        limit: Largest error that passes.
    """

    log: str
    metric: str
    published: float
    recomputed: float
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        """Whether it is met; never for NaN."""
        return self.error <= self.limit


def verify_tofu_logs(data_root: Path) -> list[LoggedValue]:
    """Every value of ``reference_values.json`` whose logs are there, and each log's ROUGE.

    Raises:
        DataError: The folder, a log or the values are missing or damaged.
    """
    logs = read_logs(data_root)
    published = read_reference_values(data_root)
    values = []
    for name in sorted(set(logs) & set(published)):
        ours = _recomputed(logs[name], logs)
        values += [
            _compared(name, metric, value, ours.get(metric, math.nan))
            for metric, value in _flat(published[name]).items()
        ]
        values += _rouge_values(logs[name])
    if not values:
        raise DataError(
            f"{data_root}: no log here has a published value; give the logs that "
            f"reference_values.json names: {', '.join(sorted(published)[:3]) or 'none'}"
        )
    return values


def _flat(values: Mapping[str, Any]) -> dict[str, float]:
    """Numbers by name; those of a list get their place."""
    flat: dict[str, float] = {}
    for name, value in values.items():
        several = isinstance(value, list)
        flat |= {f"{name}[{k}]": v for k, v in enumerate(value)} if several else {name: value}
    return flat


def _recomputed(log: EvaluationLog, logs: Mapping[str, EvaluationLog]) -> dict[str, float]:
    """Our values under the published names; NaN where the retrained model's log is not there."""
    metrics = tofu_metrics(log.parts, style="tofu")
    values = {
        f"{published}_{_NAMES[prefix]}": _or_nan(metrics[f"{prefix}_{ours}"]) / 100
        for prefix in PARTS
        for ours, published in _RATES.items()
    }
    values["model_utility"] = _or_nan(metrics["mu"])
    retrained = logs.get(log.name.replace(f"_{log.split}_", "_retain90_"))
    compared: Mapping[str, Any] = {}
    if retrained is not None:
        compared = tofu_compare(log.parts, retrained.parts, style="tofu")
        for place, one in enumerate((log, retrained)):
            values[f"n_forget_rows[{place}]"] = len(one.parts["forget"]["answer_loss"])
    values[f"forget_quality{_AGAINST}"] = _or_nan(compared.get("fq"))
    values[f"ks_statistic{_AGAINST}"] = _or_nan(compared.get("ks"))
    return values


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _compared(log: str, metric: str, published: float, ours: float) -> LoggedValue:
    relative = metric.startswith("forget_quality")
    error = abs(ours - published) / (abs(published) if relative else 1.0)
    return LoggedValue(log, metric, published, ours, error, FQ_TOLERANCE if relative else TOLERANCE)


def _rouge_values(log: EvaluationLog) -> Iterator[LoggedValue]:
    """ROUGE of the logged texts against the logged scores, worst sample of each part."""
    for part, answers in log.answers.items():
        generated, truths = zip(*answers, strict=True)
        ours = rouge(truths, generated)
        for name, values in (("rouge_1_recall", ours.rouge_1), ("rouge_l_recall", ours.rouge_l)):
            logged = log.parts[part][name]
            worst = int(np.argmax(np.abs(values - logged)))
            yield _compared(
                log.name, f"{name} of {part}, worst row", float(logged[worst]), float(values[worst])
            )


@dataclass(frozen=True)
class Nearest:
    """The pair of published logs whose forget quality is nearest to the paper's Original.

    Attributes:
        statistic: Largest distance D of the two distributions.
        steps: D in steps of 1/rows that the paper's value would take, where both have ``rows``.
    """

    first: str
    second: str
    rows: tuple[int, int]
    statistic: float
    value: float
    steps: int
    at_steps: float

    @property
    def text(self) -> str:
        """What the command says about it."""
        n = self.rows[0]
        return (
            f"The paper's Original (Phi-1.5, forget quality {PAPER_ORIGINAL_FQ:.2e}) is not "
            f"reproduced by any published log.  Nearest: {self.value:.3e}, {self.first} against "
            f"{self.second} ({self.rows[0]} and {self.rows[1]} rows, D = "
            f"{round(self.statistic * n)}/{n}).  With as many rows D = {self.steps}/{n} gives "
            f"{self.at_steps:.3e}."
        )


def nearest_to_paper(data_root: Path, target: float = PAPER_ORIGINAL_FQ) -> Nearest | None:
    """Of the full models against every retrained model of their family, nearest in log p.

    None if there is no such pair.
    """
    logs = read_logs(data_root).values()
    pairs = [
        (full, other, tofu_compare(full.parts, other.parts, style="tofu"))
        for full in logs
        for other in logs
        if full.split == "full" and other.split != "full" and full.model == other.model
    ]
    if not pairs:
        return None
    full, other, test = min(pairs, key=lambda pair: _apart(_or_nan(pair[2]["fq"]), target))
    rows = tuple(len(log.parts["forget"]["answer_loss"]) for log in (full, other))
    steps = _steps(rows[0], target)
    return Nearest(
        full.name,
        other.name,
        (rows[0], rows[1]),
        _or_nan(test["ks"]),
        _or_nan(test["fq"]),
        steps,
        _p_value(rows[0], steps),
    )


def _apart(first: float, second: float) -> float:
    return abs(math.log(first) - math.log(second))


def _steps(n: int, target: float) -> int:
    """The D, in steps of 1/n, whose p-value is nearest to the target."""
    below = bisect_left(range(n), -target, lo=n // 10, key=lambda k: -_p_value(n, k))
    return min((below - 1, below), key=lambda k: _apart(_p_value(n, k), target))


def _p_value(n: int, steps: int) -> float:
    """Exact two-sided p of D = steps/n for n values against n."""
    first = [float(value) for value in range(n)]
    return ks_two_sample(first, [value + steps - 0.5 for value in first]).p_value


def sections(values: Sequence[LoggedValue], nearest: Nearest | None) -> list[Section]:
    """The table published | recomputed | difference, a verdict, and what the paper claims."""
    rows = [
        [
            value.log,
            value.metric,
            f"{value.published:.9g}",
            f"{value.recomputed:.9g}",
            f"{value.recomputed - value.published:+.1e}",
            "ok" if value.ok else "MISSED",
        ]
        for value in values
    ]
    heads = ["log", "value", "published", "recomputed", "difference", ""]
    met = sum(value.ok for value in values)
    verdict = (
        f"{met} of {len(values)} values met (to {TOLERANCE:g}; forget quality to "
        f"{FQ_TOLERANCE:g} of itself)"
    )
    text = (verdict, "" if nearest is None else nearest.text)
    return [Section("Published TOFU evaluation logs", text, table(heads, rows))]
