"""Norms over the steps of unlearning, for rows with ``probe_every``: the figures of training.

Gradients and weights are those of the whole W0 + dW of MLPs, attention and head, frozen or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from stable_forgetting.benchmarks.leaderboard.board import Leaderboard
from stable_forgetting.benchmarks.leaderboard.trajectory import (
    Trajectories,
    Trajectory,
    mean_line,
    read_log,
)
from stable_forgetting.benchmarks.report.curves import Panel, draw
from stable_forgetting.common.store.stages import StageStore

PROBES: Mapping[str, str] = {
    f"{probe}/{component}": f"{words}, {component}"
    for probe, words in (
        ("probe_grad_norm", "gradient norm"),
        ("effective_weight_norm", "weight norm"),
    )
    for component in ("mlp", "attention", "head")
} | {"logits/mean": "logits, mean", "logits/spread": "logits, spread"}
"""Scalar of the engine -> title of its panel."""


def read_dynamics(board: Leaderboard, store: StageStore) -> dict[str, dict[int, Trajectory]]:
    """Row -> seed -> what was probed in training."""
    dynamics: dict[str, dict[int, Trajectory]] = {}
    for label, record in board.records:
        model = board.stage(label, record).parents["model"]
        rows = read_log(store, model)
        if record.method in ("original", "retrain") or not any(map(_probed, rows)):
            continue
        dynamics.setdefault(label, {})[record.seed] = {
            row["step"]: {name: row[name] for name in PROBES if row.get(name) is not None}
            for row in rows
        }
    return dynamics


def _probed(row: Mapping[str, float | None]) -> bool:
    return any(name.startswith("probe_grad_norm/") for name in row)


def to_svg(board: Leaderboard, dynamics: Trajectories) -> str:
    """A panel per scalar: the mean over seeds by step, linear above and logarithmic below."""
    title = f"{board.suite.name}: norms over steps (mean of seeds; linear, then logarithmic)"
    linear = [*_panels(dynamics)]
    logarithmic = [
        replace(panel, title=f"{panel.title} (log)", log=True)
        for panel in linear
        if any(value > 0 for line in panel.lines.values() for value in line.values())
    ]
    return draw([*linear, *logarithmic], list(dynamics), title)


def _panels(dynamics: Trajectories) -> Iterator[Panel]:
    for name, title in PROBES.items():
        lines = {
            label: mean_line(_with(by_seed, name), name) for label, by_seed in dynamics.items()
        }
        drawn = {label: line for label, line in lines.items() if line}
        if drawn:
            last = max(step for line in drawn.values() for step in line)
            yield Panel(title, drawn, (0, last), f"step {last}")


def _with(by_seed: Mapping[int, Trajectory], name: str) -> dict[int, Trajectory]:
    """The steps at which a scalar was logged."""
    return {seed: {s: v for s, v in t.items() if name in v} for seed, t in by_seed.items()}
