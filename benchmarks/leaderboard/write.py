"""Writes a suite's report, its records, and its TensorBoard runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

from benchmarks.leaderboard import picture as page
from benchmarks.leaderboard import report as render
from benchmarks.leaderboard.board import Leaderboard
from benchmarks.leaderboard.trajectory import read_trajectories, to_json, to_svg
from benchmarks.pipeline.worksite import SCALARS
from common.store.stages import StageStore, write_json


def write_report(board: Leaderboard, root: Path, *, boards: bool) -> None:
    """LEADERBOARD.md, .html, .svg, .csv, .json, records.jsonl; trajectories if there are some."""
    folder = root / "suites" / board.suite.name
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "LEADERBOARD.md": render.to_markdown(board),
        "leaderboard.html": page.to_html(board),
        "leaderboard.svg": page.to_svg(board),
        "leaderboard.csv": render.to_csv(board),
        "records.jsonl": "".join(
            json.dumps({"suite": board.suite.name, "row": label, **record.model_dump(mode="json")})
            + "\n"
            for label, record in board.records
        ),
    }
    for name, text in texts.items():
        _replace(folder / name, text)
    write_json(folder / "leaderboard.json", render.to_json(board))
    paths = read_trajectories(board, StageStore(root))
    if paths:
        write_json(folder / "trajectory.json", to_json(paths))
        _replace(folder / "trajectory.svg", to_svg(board, paths))
    if boards:
        export_boards(board, root)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def export_boards(board: Leaderboard, root: Path) -> None:
    """One TensorBoard run per row and seed, so that its HParams table is the leaderboard."""
    from common.train.tracking import export_run

    store = StageStore(root)
    for label, record in board.records:
        model = board.stage(label, record).parents["model"]
        name = label if record.replicate == 0 else f"{label}-{record.replicate + 1}"
        export_run(
            root / "tensorboard" / board.suite.name / name / f"seed-{record.seed}",
            {"": store.folder(model.kind, model.key) / SCALARS},
            {"row": label, "method": record.method, "seed": record.seed, **record.params},
            record.metrics,
        )
