"""A suite in TensorBoard: a run per row with means, and a run per row and seed.

TensorBoard shows no curve by itself where there are more than 40 runs, so the rows and their seeds
lie in folders of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from stable_forgetting.benchmarks.leaderboard.board import Leaderboard
from stable_forgetting.benchmarks.leaderboard.judge import Judge, finals_of
from stable_forgetting.benchmarks.pipeline.context import SCALARS
from stable_forgetting.benchmarks.pipeline.schedule import EVENTS, SEEDS
from stable_forgetting.benchmarks.report.section import Sample
from stable_forgetting.common.measure.gaps import gap
from stable_forgetting.common.store.records import RunRecord
from stable_forgetting.common.store.stages import StageStore
from stable_forgetting.common.train.tracking import Run, events_writer, export_runs, timed_rows

SUMMARY = "summary"
"""The folder of the runs with means."""

SHOWN = 20
"""Samples that TensorBoard gets; the page of samples has more."""


def export_events(board: Leaderboard, root: Path) -> None:
    """Writes both folders; HParams is the leaderboard, ordered by its distance.

    Processes that run one suite together end together, so they write one after the other.
    """
    store, folder = StageStore(root), root / EVENTS / board.suite.name
    runs = read_runs(board, store)
    rows: dict[str, list[Run]] = {}
    for name, run in runs.items():
        rows.setdefault(name.rpartition("/")[0], []).append(run)
    means = {name: _mean(name, of_row) for name, of_row in rows.items()}
    with store.lease(EVENTS, board.suite.name, wait=True):
        export_runs(folder / SEEDS, runs)
        export_runs(folder / SUMMARY, means)


def read_runs(board: Leaderboard, store: StageStore) -> dict[str, Run]:
    """``ROW/seed-N`` -> the finished run, with its curves and final values."""
    judge = Judge(board.suite, finals_of(board.records), board.noisy)
    runs: dict[str, Run] = {}
    for label, record in board.records:
        model = board.stage(label, record).parents["model"]
        done = store.done(model.kind, model.key) or {}
        seconds = done.get("cost", {}).get("seconds") or done.get("stage_seconds") or 0.0
        log = store.folder(model.kind, model.key) / SCALARS
        name = label if record.replicate == 0 else f"{label}-{record.replicate + 1}"
        about = {"row": label, "seed": record.seed, "method": record.method, **record.params}
        runs[f"{name}/seed-{record.seed}"] = Run(
            about, _finals(board, judge, record), timed_rows(log, seconds)
        )
    return runs


def export_samples(board: Leaderboard, root: Path, chosen: Sequence[Sample]) -> None:
    """Writes samples beside the means: the image or the question, and what every row answers."""
    from PIL import Image

    folder = root / EVENTS / board.suite.name / SUMMARY / "samples"
    with StageStore(root).lease(EVENTS, board.suite.name, wait=True):
        writer = events_writer(folder)
        for sample in chosen[:SHOWN]:
            tag = f"sample {sample.index}"
            writer.add_text(tag, _card(sample))
            if sample.picture:
                pixels = np.asarray(Image.open(BytesIO(sample.picture)).convert("RGB"))
                writer.add_image(tag, pixels, dataformats="HWC")
        writer.close()


def _card(sample: Sample) -> str:
    """A sample in Markdown."""
    head = [sample.question, f"True answer: {sample.truth}"]
    lines = ["| row | answer | probability |", "|---|---|---:|"]
    for row, answer in sample.answers.items():
        text = answer.text.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {row} | {text} | {answer.probability:.3f} |")
    return "\n\n".join([*filter(None, head), "\n".join(lines)])


def _finals(board: Leaderboard, judge: Judge, record: RunRecord) -> dict[str, float | None]:
    """The distance, the gaps to Retrain and the metrics of one run; none where it diverged."""
    if record.status != "ok":
        return {}
    goals = judge.references[record.seed]
    finals = {"final/distance": board.rule.distance(record.metrics, goals, trial=False)}
    if goals.retrain is not None:
        for name in record.metrics:
            finals[f"gap/{name}"] = gap(record.metrics, goals.retrain, name)
    return finals | {f"final/{name}": value for name, value in record.metrics.items()}


def _mean(name: str, runs: Sequence[Run]) -> Run:
    """The mean over seeds: of final values, and of curves at the steps that all seeds logged."""
    about = {key: value for key, value in runs[0].config.items() if key != "seed"}
    finished = [run.metrics for run in runs if run.metrics]
    return Run(
        {**about, "row": name, "seeds": len(finished)},
        {} if not finished else {tag: _average(finished, tag) for tag in finished[0]},
        _mean_curves([run.curves for run in runs]),
    )


def _mean_curves(curves: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    by_step = [{row["step"]: row for row in rows} for rows in curves]
    shared = sorted(set.intersection(*(set(rows) for rows in by_step)))
    means = []
    for step in shared:
        rows = [rows[step] for rows in by_step]
        tags = [tag for tag in rows[0] if tag not in ("step", "time")]
        mean = {tag: _average(rows, tag) for tag in tags}
        means.append({"step": step, "time": rows[0]["time"], **mean})
    return means


def _average(rows: Sequence[Mapping[str, Any]], tag: str) -> float | None:
    """None where a row lacks the value."""
    values = [row[tag] for row in rows if row.get(tag) is not None]
    return math.fsum(values) / len(values) if len(values) == len(rows) else None
