"""A run as it stands: stages, trainings with their curves, and the rows so far, from the store.

Nothing here needs the process that runs: the page may be opened and closed at any time, and by
whoever sees the store's folder.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from stable_forgetting.benchmarks.leaderboard.derive import make_leaderboard
from stable_forgetting.benchmarks.leaderboard.page import as_page
from stable_forgetting.benchmarks.leaderboard.report import sections
from stable_forgetting.benchmarks.pipeline.context import SCALARS
from stable_forgetting.benchmarks.pipeline.kinds import KINDS
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.pipeline.position import Position, read_position
from stable_forgetting.benchmarks.pipeline.stage import Stage
from stable_forgetting.benchmarks.report import curves, html
from stable_forgetting.benchmarks.report.cells import duration
from stable_forgetting.benchmarks.report.section import Picture, Section, table
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.common.base.errors import ConfigError, UserError
from stable_forgetting.common.store.stages import StageStore
from stable_forgetting.common.train.tracking import read_scalars

HOST = "127.0.0.1"
RECENT = 120.0
"""Seconds without a step after which a training is shown as waiting."""
REFRESH = 5
"""Seconds between two looks of the page."""
MOST_CURVES = 8


def live_page(suite: ResolvedSuite, store: StageStore) -> str:
    """One page that looks again by itself until the run is complete."""
    board, stages = make_leaderboard(suite, store), list(make_plan(suite, store).stages())
    missing = [stage for stage in stages if store.done(stage.kind, stage.key) is None]
    running = under_way(missing, store)
    planned, left = (Counter(stage.kind for stage in own) for own in (stages, missing))
    done, rows = len(stages) - len(missing), []
    for stage, at in running:
        time_left = "" if at.left is None else duration(at.left)
        rows.append([stage.name, f"{at.step} of {at.total}", f"{at.loss:.3g}", time_left])
    trainings = "1 training runs" if len(rows) == 1 else f"{len(rows)} trainings run"
    text = f"{done} of {len(stages)} stages are complete, {trainings}."
    parts = [Section(f"{suite.name}: {done} of {len(stages)}", (text,), depth=1)]
    if rows:
        parts.append(Section("Running", content=table(["training", "step", "loss", "left"], rows)))
    lines = {s.name: read_losses(store.scratch(s.kind, s.key) / SCALARS) for s, _ in running}
    drawn = _curves({name: values for name, values in lines.items() if values})
    if drawn is not None:
        parts.append(Section(content=drawn))
    if board.records:
        parts += as_page(sections(board), board.rule.title)
    counts = [[kind, str(n - left[kind]), str(n)] for kind, n in sorted(planned.items())]
    parts.append(Section("Stages", content=table(["stage", "complete", "planned"], counts)))
    return html.write(parts, refresh=REFRESH if missing else None)


def under_way(
    stages: Iterable[Stage], store: StageStore, since: float | None = None
) -> list[tuple[Stage, Position]]:
    """Trainings among stages that took a step lately, or since a time, and how far they are."""
    trained = [stage for stage in stages if KINDS[stage.kind].trains]
    since = time.time() - RECENT if since is None else since
    positions = [read_position(store.scratch(s.kind, s.key), since) for s in trained]
    pairs = zip(trained, positions, strict=True)
    return [(stage, at) for stage, at in pairs if at is not None]


def read_losses(log: Path) -> dict[str, dict[int, float]]:
    """Name of a loss -> step -> value, from the log of a training; empty where there is none."""
    lines: dict[str, dict[int, float]] = {}
    for row in read_scalars(log):
        for name, value in row.items():
            if name.startswith("loss/") and value is not None:
                lines.setdefault(name.removeprefix("loss/"), {})[row["step"]] = value
    return lines


def _curves(read: Mapping[str, Mapping[str, Mapping[int, float]]]) -> Picture | None:
    """A panel per loss, a line per training."""
    names = [*read][:MOST_CURVES]
    losses = sorted({loss for name in names for loss in read[name]})
    panels = []
    for loss in losses:
        lines = {name: read[name][loss] for name in names if len(read[name].get(loss, ())) > 1}
        steps = [step for line in lines.values() for step in line]
        if steps:
            axis = f"steps {min(steps)} to {max(steps)}"
            panels.append(curves.Panel(loss, lines, (min(steps), max(steps)), axis))
    if not panels:
        return None
    title = "Losses of the trainings under way"
    return Picture(curves.draw(panels, names, title), title)


def serve(suite: ResolvedSuite, store: StageStore, port: int) -> ThreadingHTTPServer:
    """A server of the page on this machine alone; port 0 takes a free one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/":
                self.send_error(404)
                return
            try:
                body = live_page(suite, store).encode()
            except UserError as error:  # a stage that was just damaged or removed
                body = html.write([Section(str(error), depth=1)], refresh=REFRESH).encode()
            with suppress(ConnectionError):  # the page was closed meanwhile
                self.send_response(200)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise ConfigError(f"--port {port}: {error.strerror}; give another one") from None
