"""What text metrics cannot say; beside this module, in ``limits.toml``."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterable
from pathlib import Path

from stable_forgetting.common.measure.metric import MetricSpec

LIMITS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""Metric -> ``collapsed`` and ``silent``."""


def limited(specs: Iterable[MetricSpec]) -> tuple[MetricSpec, ...]:
    """The metrics with their limits; every one of them has an entry."""
    return tuple(dataclasses.replace(spec, **LIMITS[spec.name]) for spec in specs)
