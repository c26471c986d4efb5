"""Writes the files of a map report."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.maps.board import MapBoard
from benchmarks.maps.data import to_json
from benchmarks.maps.draw import picture
from benchmarks.maps.report import sections
from benchmarks.report import html, markdown
from benchmarks.report.files import json_text, write_files


def write_map(board: MapBoard, root: Path) -> Path:
    """MAP.md, map.html, map.json, map.svg and cells.jsonl below ``maps/<name>``: the folder."""
    listed = sections(board)
    cells = (json.dumps(cell.line(), allow_nan=False) + "\n" for cell in board.cells)
    folder = root / "maps" / board.resolved.name
    files = {
        "MAP.md": markdown.write(listed),
        "map.html": html.write(listed),
        "map.svg": picture(board).svg,
        "map.json": json_text(to_json(board)),
        "cells.jsonl": "".join(cells),
    }
    write_files(folder, files)
    return folder
