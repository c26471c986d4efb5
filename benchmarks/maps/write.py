"""Map -> JSON, for programs; and all files of a map report."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from stable_forgetting.benchmarks.audits.report import to_json as audits_json
from stable_forgetting.benchmarks.maps.board import MapBoard
from stable_forgetting.benchmarks.maps.report import sections
from stable_forgetting.benchmarks.report import html, markdown
from stable_forgetting.benchmarks.report.files import json_text, write_files
from stable_forgetting.benchmarks.report.section import Picture
from stable_forgetting.common.measure.gaps import summarise
from stable_forgetting.common.measure.metric import MapAxes


def write_map(board: MapBoard, root: Path) -> Path:
    """MAP.md, map.html, map.json, map.svg and cells.jsonl below ``maps/<name>``: the folder.

    And depth.svg, where the map tries several sizes of a bound.
    """
    listed = sections(board)
    cells = (json.dumps(cell.line(), allow_nan=False) + "\n" for cell in board.cells)
    folder = root / "maps" / board.resolved.name
    files = {
        "MAP.md": markdown.write(listed),
        "map.html": html.write(listed),
        "map.json": json_text(to_json(board)),
        "cells.jsonl": "".join(cells),
    }
    pictures = [section.content for section in listed if isinstance(section.content, Picture)]
    write_files(folder, {**files, **{picture.file: picture.svg for picture in pictures}})
    return folder


def to_json(board: MapBoard) -> dict[str, Any]:
    """Everything that was derived, as plain numbers."""
    spec, rule = board.resolved.spec, board.resolved.rule
    lines = []
    for line in board.lines:
        packed = _named(dataclasses.asdict(line), rule.axes)
        for name in ("by_lr", "by_lam", "by_step"):
            packed[name] = {f"{k:g}": v for k, v in packed[name].items()}
        for name in ("accepted", "strict", "loose", "band"):
            packed[f"{name}_summary"] = dataclasses.asdict(summarise(packed[name]))
        lines.append(packed)
    return {
        "map": board.resolved.name,
        "version": spec.version,
        "suite": spec.suite,
        "kind": "measured",
        "complete": board.missing == 0,
        "seeds": list(spec.seeds),
        "grid": {
            **spec.map.model_dump(mode="json"),
            "rule": {**rule.tolerances, "two_sided": rule.two_sided},
        },
        "targets": {str(s): dict(t) for s, t in board.targets.items()},
        "ceiling": dataclasses.asdict(board.ceiling),
        "lines": lines,
        "comparisons": [dataclasses.asdict(c) for c in board.comparisons],
        "probe": audits_json(board.probes),
    }


def _named(line: dict[str, Any], axes: MapAxes) -> dict[str, Any]:
    """A line's JSON under the names of the metrics: ``worst_ra``, ``best.ta``, ``ra_drop``."""
    for name in ("worst", "median"):
        line[f"{name}_{axes.retained}"] = line.pop(f"{name}_retained")
    if line["best"] is not None:
        line["best"][axes.utility] = line["best"].pop("utility")
    for square in line["squares"]:
        square[f"{axes.retained}_drop"] = square.pop("retained_drop")
    return line
