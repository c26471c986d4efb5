"""Writes a suite's report, its records, and its TensorBoard runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from stable_forgetting.benchmarks.leaderboard import trajectory
from stable_forgetting.benchmarks.leaderboard.board import Leaderboard
from stable_forgetting.benchmarks.leaderboard.data import row_lines, run_lines, to_json
from stable_forgetting.benchmarks.leaderboard.events import export_events
from stable_forgetting.benchmarks.leaderboard.page import as_page
from stable_forgetting.benchmarks.leaderboard.picture import picture
from stable_forgetting.benchmarks.leaderboard.report import sections
from stable_forgetting.benchmarks.leaderboard.target import target
from stable_forgetting.benchmarks.pipeline.sweeping import CELLS
from stable_forgetting.benchmarks.report import html, markdown, tex
from stable_forgetting.benchmarks.report.files import csv_text, json_text, write_files
from stable_forgetting.benchmarks.report.section import Picture
from stable_forgetting.benchmarks.sweeps.draw import picture as sweep_picture
from stable_forgetting.common.store.stages import StageStore

FORMATS: Mapping[str, tuple[str, Callable[[Leaderboard], str]]] = {
    "md": ("LEADERBOARD.md", lambda board: markdown.write(sections(board))),
    "tex": ("leaderboard.tex", lambda board: tex.write(sections(board))),
    "csv": ("leaderboard.csv", lambda board: csv_text(row_lines(board))),
    "runs": ("runs.csv", lambda board: csv_text(run_lines(board))),
    "json": ("leaderboard.json", lambda board: json_text(to_json(board))),
    "html": (
        "leaderboard.html",
        lambda board: html.write(as_page(sections(board), board.rule.title), folded=True),
    ),
    "svg": ("leaderboard.svg", lambda board: picture_of(board).svg),
}
"""Name of a format -> its file, and what makes its text."""

RECORDS = "records.jsonl"
"""The file of all records of a suite."""


def picture_of(board: Leaderboard) -> Picture:
    """The first that the report shows: of a suite with a grid its cells."""
    return picture(board) if board.sweep is None else sweep_picture(board.sweep)


def write_report(board: Leaderboard, root: Path, *, events: bool) -> None:
    """A file per format, records.jsonl, pictures of what was logged, TensorBoard ``events``."""
    files = {file: text(board) for file, text in FORMATS.values()}
    pictures = (section.content for section in sections(board))
    files |= {shown.file: shown.svg for shown in pictures if isinstance(shown, Picture)}
    files.pop("", None)  # a picture that is only embedded
    files[RECORDS] = records_text(board)
    if board.sweep is not None:
        lines = (json.dumps(cell.line(), allow_nan=False) + "\n" for cell in board.sweep.cells)
        files[CELLS] = "".join(lines)
    store = StageStore(root)
    paths = trajectory.read_trajectories(board, store)
    seen = target(board, paths)
    if seen is not None:
        files["target.svg"] = seen.svg
    for name, curves, to_svg in (
        ("trajectory", paths, trajectory.to_svg),
        ("dynamics", trajectory.read_dynamics(board, store), trajectory.dynamics_svg),
    ):
        if curves:
            files[f"{name}.json"] = json_text(curves)
            files[f"{name}.svg"] = to_svg(board, curves)
    write_files(root / "suites" / board.suite.name, files)
    if events:
        export_events(board, root)


def records_text(board: Leaderboard) -> str:
    """One line per record: its suite, its row, and how many samples were to be forgotten."""
    return "".join(
        json.dumps(
            {
                "suite": board.suite.name,
                "row": label,
                "forget": board.sizes.get(record.seed),
                **record.model_dump(mode="json"),
            }
        )
        + "\n"
        for label, record in board.records
    )
