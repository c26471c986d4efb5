"""Sweep -> JSON, for programs."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from stable_forgetting.benchmarks.sweeps.board import Sweep
from stable_forgetting.common.measure.gaps import summarise
from stable_forgetting.common.measure.metric import SweepAxes

CELLS = "cells.jsonl"
"""The file of all cells of a sweep."""


def cells_text(board: Sweep) -> str:
    """One line per cell."""
    return "".join(json.dumps(cell.line(), allow_nan=False) + "\n" for cell in board.cells)


def to_json(board: Sweep) -> dict[str, Any]:
    """Everything that was derived, as plain numbers."""
    rule = board.rule
    lines = []
    for line in board.lines:
        packed = _named(dataclasses.asdict(line), rule.axes)
        for name in ("by_lr", "by_lam", "by_step"):
            packed[name] = {f"{k:g}": v for k, v in packed[name].items()}
        for name in ("accepted", "strict", "loose", "band"):
            packed[f"{name}_summary"] = dataclasses.asdict(summarise(packed[name]))
        lines.append(packed)
    return {
        "complete": board.missing == 0,
        "grid": {
            **board.grid.model_dump(mode="json"),
            "rule": {**rule.tolerances, "two_sided": rule.two_sided},
        },
        "targets": {str(s): dict(t) for s, t in board.targets.items()},
        "ceiling": dataclasses.asdict(board.ceiling),
        "lines": lines,
        "comparisons": [dataclasses.asdict(c) for c in board.comparisons],
    }


def _named(line: dict[str, Any], axes: SweepAxes) -> dict[str, Any]:
    """A line's JSON under the names of the metrics: ``worst_ra``, ``best.ta``, ``ra_drop``."""
    for name in ("worst", "median"):
        line[f"{name}_{axes.retained}"] = line.pop(f"{name}_retained")
    if line["best"] is not None:
        line["best"][axes.utility] = line["best"].pop("utility")
    for square in line["squares"]:
        square[f"{axes.retained}_drop"] = square.pop("retained_drop")
    return line
