"""Writes the files of a map report."""

from __future__ import annotations

import json
import os
from pathlib import Path

from benchmarks.maps.report import MapBoard, to_json, to_markdown
from common.store.stages import write_json


def write_map(board: MapBoard, root: Path) -> Path:
    """MAP.md, map.json, map.svg and cells.jsonl below ``maps/<name>``; returns the folder."""
    from benchmarks.maps.draw import to_svg

    folder = root / "maps" / board.resolved.name
    folder.mkdir(parents=True, exist_ok=True)
    rows = (json.dumps(cell.line(), allow_nan=False) + "\n" for cell in board.cells)
    texts = {"MAP.md": to_markdown(board), "map.svg": to_svg(board), "cells.jsonl": "".join(rows)}
    for name, text in texts.items():
        temporary = folder / f".{name}.{os.getpid()}"
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, folder / name)
    write_json(folder / "map.json", to_json(board))
    return folder
