"""How numbers read in every report; a missing one is :data:`MISSING` everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stable_forgetting.common.measure.gaps import Summary

MISSING = "–"


def number(value: float | None, digits: int) -> str:
    """A fixed number of decimals."""
    return MISSING if value is None else f"{value:.{digits}f}"


def significant(value: float | None) -> str:
    """Three significant digits; whole numbers from 1000 on."""
    if value is None:
        return MISSING
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percent(value: float | None) -> str:
    """A share of 1 in percent."""
    return MISSING if value is None else f"{100 * value:.1f} %"


def spread(summary: Summary | None, digits: int = 2) -> str:
    """``mean±std``."""
    if summary is None:
        return MISSING
    text = f"{summary.mean:.{digits}f}"
    return text if summary.std is None else f"{text}±{summary.std:.{digits}f}"


def interval(summary: Summary | None, form: str) -> str:
    """``mean [low, high]``, each in the form of a format specification."""
    if summary is None:
        return MISSING
    text = format(summary.mean, form)
    if summary.low is None or summary.high is None:
        return text
    return f"{text} [{summary.low:{form}}, {summary.high:{form}}]"


def setting(value: Any) -> str:
    """The value of a parameter."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def settings(values: Mapping[str, Any]) -> str:
    """``lr=0.1, lam=1``."""
    return ", ".join(f"{key}={setting(value)}" for key, value in values.items())


def span(low: float, high: float) -> str:
    """``1.50-1.61``, or one number where both read the same."""
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f}-{high:.2f}"


def giga(value: float) -> str:
    """A count in units of 10^9."""
    return f"{value / 1e9:.4g}"


def size(count: float) -> str:
    """Bytes in decimal units."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.4g} GB"


def duration(seconds: float) -> str:
    """Seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
