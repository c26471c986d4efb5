"""Formats of numbers in every report."""

from __future__ import annotations

from common.measure.gaps import Summary


def plain(summary: Summary, digits: int = 2) -> str:
    """``mean±std``."""
    text = f"{summary.mean:.{digits}f}"
    return text if summary.std is None else f"{text}±{summary.std:.{digits}f}"


def _interval(summary: Summary | None, form: str) -> str:
    if summary is None:
        return "–"
    text = format(summary.mean, form)
    if summary.low is None or summary.high is None:
        return text
    return f"{text} [{summary.low:{form}}, {summary.high:{form}}]"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"
