"""Curves over the steps of unlearning: metrics of rows with ``evaluate_every``, and norms.

The last step is what a leaderboard reports; a trajectory shows what stopping earlier or later would
have reported instead.  Rows with ``probe_every`` have norms: gradients and weights are those of the
whole W0 + dW of MLPs, attention and head, frozen or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

from stable_forgetting.benchmarks.leaderboard.board import Leaderboard
from stable_forgetting.benchmarks.leaderboard.derive import compares
from stable_forgetting.benchmarks.pipeline.context import SCALARS
from stable_forgetting.benchmarks.pipeline.measuring import read_scores
from stable_forgetting.benchmarks.pipeline.stage import Placed
from stable_forgetting.benchmarks.pipeline.unlearning import TRAJECTORY
from stable_forgetting.benchmarks.report.curves import Panel, draw
from stable_forgetting.benchmarks.suite.suite import REFERENCES
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.measure.scores import load_scores
from stable_forgetting.common.store.stages import StageStore
from stable_forgetting.common.train.tracking import read_scalars

PREFIX = "evaluation/"
Trajectory = Mapping[int, Mapping[str, float]]
"""Steps done -> metric -> value."""
Trajectories = Mapping[str, Mapping[int, Trajectory]]
"""Row label -> seed -> trajectory."""


PROBES: Mapping[str, str] = {
    f"{probe}/{component}": f"{words}, {component}"
    for probe, words in (
        ("probe_grad_norm", "gradient norm"),
        ("effective_weight_norm", "weight norm"),
    )
    for component in ("mlp", "attention", "head")
} | {"logits/mean": "logits, mean", "logits/spread": "logits, spread"}
"""Scalar of the engine -> title of its panel."""


def read_trajectories(board: Leaderboard, store: StageStore) -> Trajectories:
    """What was evaluated in training, with the metrics that need Retrain's scores."""
    targets = {
        record.seed: board.stage(label, record)
        for label, record in board.records
        if (record.method, record.replicate, record.status) == ("retrain", 0, "ok")
    }
    return _of_rows(board, lambda model, seed: _trajectory(board, store, model, targets.get(seed)))


def read_dynamics(board: Leaderboard, store: StageStore) -> Trajectories:
    """What was probed in training: row -> seed -> step -> scalar of :data:`PROBES`."""

    def probed(model: Placed, seed: int) -> Trajectory:
        rows = read_log(store, model)
        if not any(name.startswith("probe_grad_norm/") for row in rows for name in row):
            return {}
        return {
            row["step"]: {name: row[name] for name in PROBES if row.get(name) is not None}
            for row in rows
        }

    return _of_rows(board, probed)


def _of_rows(board: Leaderboard, read: Callable[[Placed, int], Trajectory]) -> Trajectories:
    """Row -> seed -> what is read of its model, of the methods that have something."""
    found: dict[str, dict[int, Trajectory]] = {}
    for label, record in board.records:
        if record.method not in REFERENCES:
            trajectory = read(board.stage(label, record).parents["model"], record.seed)
            if trajectory:
                found.setdefault(label, {})[record.seed] = trajectory
    return found


def read_log(store: StageStore, model: Placed) -> list[dict[str, Any]]:
    """Rows that a training logged; none where its stage is not there."""
    if store.done(model.kind, model.key) is None:
        return []
    return read_scalars(store.checked(model.kind, model.key, SCALARS) / SCALARS)


def _trajectory(
    board: Leaderboard, store: StageStore, model: Placed, target: Placed | None
) -> dict[int, dict[str, float]]:
    steps: dict[int, dict[str, float]] = {}
    for row in read_log(store, model):
        values = {k.removeprefix(PREFIX): v for k, v in row.items() if k.startswith(PREFIX)}
        if values:
            steps[row["step"]] = {k: v for k, v in values.items() if v is not None}
    benchmark = BENCHMARKS[board.suite.spec.benchmark]
    if not steps or target is None or not compares(benchmark):
        return steps
    theirs = read_scores(store, target)
    for step, metrics in steps.items():
        name = f"{TRAJECTORY}/{step:06d}.safetensors"
        path = store.checked(model.kind, model.key, name) / name
        if path.is_file():
            compared = benchmark.compare(board.suite.protocol, load_scores(path), theirs)
            metrics |= {k: v for k, v in compared.items() if v is not None}
    return steps


def to_svg(board: Leaderboard, trajectories: Trajectories) -> str:
    """One panel per main column: the mean over seeds by step; Retrain's mean dashed.

    Where a training measures no main column, there is a panel for each metric that it does measure.
    """
    title = f"{board.suite.name}: metrics over steps (mean of seeds; dashed: Retrain)"
    titles = {name: spec.title for name, spec in board.specs.items()}
    main = {name: titles[name] for name in board.suite.spec.columns}
    panels = _panels(trajectories, main) or _panels(trajectories, titles)
    retrain = next((row.metrics for row in board.rows if row.target), {})
    dashed = [
        replace(panel, references={"4": dict.fromkeys(panel.ends, retrain[name].mean)})
        if name in retrain
        else panel
        for name, panel in panels.items()
    ]
    return draw(dashed, list(trajectories), title)


def dynamics_svg(board: Leaderboard, dynamics: Trajectories) -> str:
    """A panel per scalar: the mean over seeds by step, linear above and logarithmic below."""
    title = f"{board.suite.name}: norms over steps (mean of seeds; linear, then logarithmic)"
    linear = [*_panels(dynamics, PROBES).values()]
    logarithmic = [
        replace(panel, title=f"{panel.title} (log)", log=True)
        for panel in linear
        if any(value > 0 for line in panel.lines.values() for value in line.values())
    ]
    return draw([*linear, *logarithmic], list(dynamics), title)


def _panels(trajectories: Trajectories, titles: Mapping[str, str]) -> dict[str, Panel]:
    """Name -> its curves, where some row has one."""
    panels = {}
    for name, title in titles.items():
        lines = {label: mean_line(by_seed, name) for label, by_seed in trajectories.items()}
        drawn = {label: line for label, line in lines.items() if line}
        if drawn:
            last = max(step for line in drawn.values() for step in line)
            panels[name] = Panel(title, drawn, (0, last), f"step {last}")
    return panels


def mean_line(by_seed: Mapping[int, Trajectory], name: str) -> dict[int, float]:
    """Step -> mean over the seeds, for the steps at which every seed has the value."""
    steps = set.intersection(*(set(trajectory) for trajectory in by_seed.values()))
    line = {}
    for step in sorted(steps):
        values = [trajectory[step].get(name) for trajectory in by_seed.values()]
        measured = [value for value in values if value is not None]
        if len(measured) == len(values):
            line[step] = fmean(measured)
    return line
