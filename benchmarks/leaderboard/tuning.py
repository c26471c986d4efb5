"""What reports say of tuning: where the trials came from, and what was chosen of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from stable_forgetting.benchmarks.audits.stored import StoredPlan
from stable_forgetting.benchmarks.leaderboard.board import BoardRow, Leaderboard, Trial
from stable_forgetting.benchmarks.pipeline.measuring import (
    read_record,
    read_split,
    references,
    trial_gap,
)
from stable_forgetting.benchmarks.report.cells import MISSING, settings
from stable_forgetting.benchmarks.report.columns import DOCS
from stable_forgetting.benchmarks.report.section import Column, Section, Table, table
from stable_forgetting.benchmarks.suite.resolve import ResolvedRow, ResolvedSuite
from stable_forgetting.benchmarks.suite.tune import SLACK, Tune
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.measure.goal import Role
from stable_forgetting.common.measure.rules import TargetRule
from stable_forgetting.common.store.records import RunRecord
from stable_forgetting.common.store.stages import StageStore

SAMPLERS = {
    "grid": "a grid",
    "qmc": "qmc (scrambled Sobol points of Optuna)",
    "random": "random (independent draws of Optuna)",
    "tpe": "tpe (Optuna; the first round is qmc)",
}


def skipped_lines(suite: ResolvedSuite) -> list[str]:
    """Which rows lack a parameter of the default space: they are tuned over the others."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for row in suite.rows:
        if row.search is not None and row.search.skipped:
            rows.setdefault(row.search.skipped, []).append(row.label)
    return [
        f"Without {', '.join(keys)} of the default space, which they do not have: "
        f"{', '.join(labels)}."
        for keys, labels in rows.items()
    ]


def sources(suite: ResolvedSuite) -> list[tuple[str, str, str]]:
    """(rows, sampler, grid or space) of every tuned row; rows that share theirs come together."""
    rows: dict[tuple[str, str], list[str]] = {}
    for row in suite.rows:
        if row.search is not None:
            rows.setdefault((row.search.sampler, str(row.search)), []).append(row.label)
    return [(", ".join(labels), *source) for source, labels in rows.items()]


def tuned_on(suite: ResolvedSuite, plan: StoredPlan, store: StageStore) -> str:
    """What the trials of a plan are scored on, in words, as far as its splits are there."""
    stages = {r.stage.parents["split"].key: r for r in plan.results if r.trial != -1}
    forgotten: dict[bool, set[int]] = {True: set(), False: set()}
    parts: dict[str, str] = {}
    role_of = BENCHMARKS[suite.spec.benchmark].role_of
    for result in stages.values():
        split, trial = read_split(store, result.stage.parents["split"]), result.trial is not None
        if split is None:
            continue
        forgotten[trial] |= set(split.parts["forget"].tolist())
        if trial:
            roles = {part: role_of(part).value for part in split.parts}
            parts |= {part: role for part, role in roles.items() if role != "report"}
    if not parts:
        return ""
    held_out = "select" in parts.values()
    nature = "" if held_out else " (Original was trained on all of it: no validation data)"
    count = len(forgotten[True] & forgotten[False])
    shared = f"{count} of its {len(forgotten[True])} forget samples are" if count else ""
    shared = shared or "none of its forget samples is"
    return f", scored on {', '.join(parts)}{nature}; {shared} forgotten on a seed above, too"


def tuning_sections(board: Leaderboard) -> list[Section]:
    """Budget, rule of the choice, where the trials came from, and what was chosen of them."""
    tune = board.suite.spec.tune
    assert tune is not None
    rule, against = board.suite.trial_rule, ""
    if isinstance(rule, TargetRule):
        against = f", without a Retrain ({rule.words})"
    budget = (
        f"{tune.budget} on seed {', '.join(map(str, tune.seeds))}, chosen by the smallest "
        f"{rule.title} there{by_attack(tune)}{against}{board.tuned_on}; test data was not scored. "
        "The chosen config was then frozen for the seeds above."
    )
    lines = [
        f"{rows}: {SAMPLERS[sampler]}, {space}" for rows, sampler, space in sources(board.suite)
    ]
    lines += skipped_lines(board.suite)
    edges = [f"{row.label} ({', '.join(row.edges)})" for row in board.rows if row.edges]
    if edges:
        lines.append(
            "Chosen at the edge of the grid or within a tenth of the range's end, where a wider "
            f"one may do better: {', '.join(edges)}"
        )
    open_ = close_calls(board.rows, board.trials)
    if open_:
        lines.append(
            "The next trial is within a standard deviation (of the distance over the seeds above) "
            f"of the chosen one, so that another tuning seed may choose it: {', '.join(open_)} "
            f"({len(open_)} of {len({trial.label for trial in board.trials})} rows)"
        )
    return [
        Section("Tuning", (budget,), lines=tuple(lines), level="full"),
        Section(content=_trial_table(board.trials), level="full"),
        Section(text=("Every trial is in `leaderboard.json`, under `tuning`.",), level="full"),
    ]


def by_attack(tune: Tune) -> str:
    """The rest of what chose a trial, where an attack had a say."""
    if not tune.after_attack:
        return ""
    return f", and by {tune.after_attack} among those within {SLACK:g} times the smallest"


def _trial_table(trials: Sequence[Trial]) -> Table:
    """A line per tuned row: what was chosen, how far it was, and how far the others were."""
    lines = []
    for label in dict.fromkeys(trial.label for trial in trials):
        own = [trial for trial in trials if trial.label == label]
        best = [trial for trial in own if trial.chosen]
        others = sorted(trial.gap for trial in own if not trial.chosen)
        chosen = [_choice(best[0]), _gap(best[0].gap)] if best else [MISSING, MISSING]
        ends = [_gap(others[0]), _gap(others[-1])] if others else [MISSING, MISSING]
        lines.append([label, *chosen, *ends])
    return table(
        ["row", Column("chosen", "words", DOCS["chosen"]), "tuning gap", "next", "last"], lines
    )


def _gap(gap: float) -> str:
    return f"{gap:.2f}" if math.isfinite(gap) else "diverged"


def close_calls(rows: Sequence[BoardRow], trials: Sequence[Trial]) -> list[str]:
    """Rows whose next trial is nearer to the chosen one than their distance spreads over seeds."""
    close = []
    for row in rows:
        own = [trial for trial in trials if trial.label == row.label]
        best = [trial.gap for trial in own if trial.chosen]
        others = [trial.gap for trial in own if not trial.chosen]
        distance = row.derived.get("ag")
        if not best or not others or distance is None or distance.std is None:
            continue
        if abs(min(others) - best[0]) < distance.std:
            close.append(row.label)
    return close


def _choice(trial: Trial) -> str:
    edges = f" ({', '.join(trial.edges)} at the edge)" if trial.edges else ""
    return settings(trial.params) + edges


def read_trials(
    suite: ResolvedSuite, plan: StoredPlan, store: StageStore
) -> tuple[list[Trial], int]:
    """Every trial of a plan whose records are there, and how many records are missing."""
    results = [result for result in plan.results if result.trial is not None]
    records = {result.stage.key: read_record(store, result.stage) for result in results}
    targets: dict[int, dict[Role, RunRecord | None]] = {}
    for result in results:
        if result.trial == -1:
            role: Role = "retrain" if result.label == "retrain" else "original"
            targets.setdefault(result.seed, {})[role] = records[result.stage.key]
    gaps: dict[tuple[str, int], list[float]] = {}
    for result in results:
        record, roles = records[result.stage.key], targets.get(result.seed, {})
        if record is None or result.trial is None or result.trial < 0:
            continue
        if roles and None not in roles.values():
            distance = trial_gap(record, references(roles), suite.trial_rule)
            gaps.setdefault((result.label, result.trial), []).append(distance)
    trials = [_trial(suite.row(label), plan, index, own) for (label, index), own in gaps.items()]
    return trials, sum(records[result.stage.key] is None for result in results)


def _trial(row: ResolvedRow, plan: StoredPlan, index: int, gaps: Sequence[float]) -> Trial:
    assert row.search is not None
    # a plan of an earlier version may have other words for the fields
    fields = row.config.by_field
    drawn = [{key: fields(of) for key, of in draw.items()} for draw in plan.trials[row.label]]
    own = tuple(f"{name}." for name in row.search.space)
    varied = _varied([draw["config"] for draw in drawn])
    params = {key: of[index] for key, of in varied.items() if f"{key}.".startswith(own)}
    chosen = plan.chosen.get(row.label) == index
    edges = row.search.edges(drawn[index]["values"]) if chosen else ()
    return Trial(row.label, params, math.fsum(gaps) / len(gaps), chosen, edges)


def _varied(configs: Sequence[Mapping[str, Any]], prefix: str = "") -> dict[str, list[Any]]:
    """Parameters that differ between configs -> their values, dots for nesting."""
    varied: dict[str, list[Any]] = {}
    for key in configs[0]:
        values = [config[key] for config in configs]
        if all(isinstance(value, Mapping) for value in values):
            varied |= _varied(values, f"{prefix}{key}.")
        elif any(value != values[0] for value in values):
            varied[prefix + key] = values
    return varied
