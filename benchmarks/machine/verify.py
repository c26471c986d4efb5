"""Published results recomputed by our own code: ``unlearn verify``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stable_forgetting.benchmarks.report.section import Section, table
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.language.measure.logs import EvaluationLog, read_logs, read_reference_values
from stable_forgetting.language.metrics.rouge import rouge
from stable_forgetting.language.metrics.tofu import PARTS, tofu_compare, tofu_metrics

TOLERANCE = 1e-6
FQ_TOLERANCE = 1e-4
"""Relative: the published p-values have six digits."""

_NAMES = {"forget": "forget", "retain": "retain", "ra": "real_authors", "wf": "world_facts"}
_RATES = {"prob": "probability", "rouge": "rouge", "truth_ratio": "truth_ratio"}
_AGAINST = "_vs_retain90"


@dataclass(frozen=True)
class LoggedValue:
    """One published value beside ours.

    Attributes:
        recomputed: By our code from the per-sample columns.
    """

    log: str
    metric: str
    published: float
    recomputed: float

    @property
    def ok(self) -> bool:
        """Whether both agree, relatively for forget quality; never for NaN."""
        error = abs(self.recomputed - self.published)
        if self.metric.startswith("forget_quality"):
            return error <= FQ_TOLERANCE * abs(self.published)
        return error <= TOLERANCE


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
            LoggedValue(name, metric, value, ours.get(metric, math.nan))
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


def _rouge_values(log: EvaluationLog) -> Iterator[LoggedValue]:
    """ROUGE of the logged texts against the logged scores, worst sample of each part."""
    for part, answers in log.answers.items():
        generated, truths = zip(*answers, strict=True)
        ours = rouge(truths, generated)
        for name, values in (("rouge_1_recall", ours.rouge_1), ("rouge_l_recall", ours.rouge_l)):
            logged = log.parts[part][name]
            worst = int(np.argmax(np.abs(values - logged)))
            pair = float(logged[worst]), float(values[worst])
            yield LoggedValue(log.name, f"{name} of {part}, worst row", *pair)


def sections(values: Sequence[LoggedValue]) -> list[Section]:
    """The table published | recomputed | difference, and a verdict."""
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
    return [Section("Published TOFU evaluation logs", (verdict,), table(heads, rows))]
