"""Leaderboard -> sections."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stable_forgetting.benchmarks.audits.after import sections as after_sections
from stable_forgetting.benchmarks.audits.report import sections as audit_sections
from stable_forgetting.benchmarks.leaderboard.board import Leaderboard, info_of
from stable_forgetting.benchmarks.leaderboard.folds import fold_sections
from stable_forgetting.benchmarks.leaderboard.picture import picture
from stable_forgetting.benchmarks.leaderboard.settings import details_section, settings_sections
from stable_forgetting.benchmarks.leaderboard.tables import (
    cost_table,
    dynamics_table,
    further_table,
    gap_table,
    main_table,
)
from stable_forgetting.benchmarks.leaderboard.target import target
from stable_forgetting.benchmarks.leaderboard.tuning import by_attack, tuning_sections
from stable_forgetting.benchmarks.leaderboard.verdicts import (
    comparison_line,
    order_lines,
    verdict_sections,
)
from stable_forgetting.benchmarks.paper.report import published_sections
from stable_forgetting.benchmarks.pipeline.stage import ASSUMED, PRETRAINED
from stable_forgetting.benchmarks.report.cells import spread
from stable_forgetting.benchmarks.report.section import Section, filled
from stable_forgetting.benchmarks.suite.goals import rule_sets
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.benchmarks.suite.suite import FLOOR, REFERENCES
from stable_forgetting.benchmarks.sweeps.report import sections as sweep_sections
from stable_forgetting.common.measure.ranking import shares
from stable_forgetting.common.measure.rules import TargetRule


def sections(board: Leaderboard) -> list[Section]:
    """Everything that a leaderboard says, in order."""
    spec = board.suite.spec
    title = f"{board.suite.name} (v{spec.version}, {board.digest}, measured)"
    missing = "" if board.complete else f"Incomplete: {board.missing} records are missing."
    if board.sweep and board.sweep.missing:
        missing = f"Incomplete; missing blocks of the grid: {board.sweep.missing}."
    body = _of_rows(board) if board.sweep is None else sweep_sections(board.sweep)
    if board.sweep is not None:
        body.append(Section(lines=tuple(inapplicable_lines(board))))
    return filled(
        Section(title, (spec.title,), depth=1),
        Section(text=(_provenance(board),), level="full"),
        Section(text=(pretraining_line(board), assumption_line(board))),
        Section(text=(missing,), tone="warning"),
        *body,
        Section(text=(f"Notes: {spec.notes}" if spec.notes else "",), level="full"),
        *published_sections(spec.published, "full"),
    )


def _of_rows(board: Leaderboard) -> list[Section]:
    seeds = ", ".join(map(str, board.suite.spec.seeds))
    gaps = "Signed gaps to Retrain" if any(row.gaps for row in board.rows) else "Distance"
    return [
        Section(content=picture(board), level="full"),
        Section(content=target(board), level="full"),
        Section(text=(f"Seeds {seeds}. {legend(board)}",), content=main_table(board), tone="muted"),
        Section(
            text=(
                floor_line(board),
                *calibration_lines(board),
                noise_line(board),
                share_line(board),
                saturation_line(board),
                *order_lines(board),
            )
        ),
        *after_sections(board.suite.name, board.attacked),
        *fold_sections(board),
        _list(
            "Paired comparisons (p corrected for them, Holm):",
            [comparison_line(board, c) for c in board.comparisons],
        ),
        _list("Diverged:", divergence_lines(board)),
        Section(
            lines=(
                *inapplicable_lines(board),
                *composite_lines(board),
                *budget_lines(board.suite),
                *choice_lines(board),
            )
        ),
        *verdict_sections(board),
        *(
            Section(title, content=content, level="full")
            for title, content in (
                (f"{gaps}, with 95 % CIs (t)", gap_table(board)),
                ("Did the bound act?", dynamics_table(board)),
                ("What did it cost?", cost_table(board)),
                ("Further measurements", further_table(board)),
            )
            if content.rows
        ),
        *settings_sections(board),
        details_section(board),
        *([Section("Attacks"), *audit_sections(board.audits)] if board.audits else ()),
        *(tuning_sections(board) if board.trials else ()),
    ]


def _list(head: str, lines: Sequence[str]) -> Section:
    return Section(text=(head,) if lines else (), lines=tuple(lines))


def legend(board: Leaderboard) -> str:
    """How to read the main table."""
    rules = [rule_set.words for rule_set in rule_sets(board.suite.spec).values()]
    sets = "".join(f" {words}." for words in rules)
    if board.rule.goals:
        return (
            f"Cells: mean ± std over seeds. {board.rule.words} reached: seeds that reach every "
            f"goal.{sets}"
        )
    return (
        "Goal of every → column: the value of Retrain. Cells: mean ± std over seeds, then the "
        f"signed gap to the seed's Retrain. {board.rule.words}{sets} rank: by the mean as "
        "shown, ties share the best; [its range in 95 % of draws of seeds and trials]."
    )


def floor_line(board: Leaderboard) -> str:
    """The noise floor in words; empty where rows are ordered by goals."""
    if board.rule.goals:
        return ""
    own, pooled, over = board.floor.summary, board.pooled.summary, ""
    if own is None:
        return "Noise floor: unknown (retrains: 2 gives it)."
    if pooled is not None and pooled.n > own.n:
        over = f" Over all {pooled.n} pairs of this protocol in the store: {spread(pooled)}."
    seeds = ", ".join("?" if v is None else f"{v:.2f}" for v in board.floor.per_seed)
    second = next((row.derived for row in board.rows if row.label == FLOOR), {})
    of_axes = [f"{axis.title} {spread(second.get(axis.name))}" for axis in board.rule.axes]
    axes = f"; {', '.join(of_axes)}" if of_axes else ""
    return (
        f"Noise floor ({board.rule.title} of a second Retrain against the first): "
        f"{spread(own)} [{seeds}]{axes}.{over}"
    )


def noise_line(board: Leaderboard) -> str:
    """Which columns weigh nothing, as they are noise; empty where none is."""
    if not board.noisy:
        return ""
    columns = [
        f"{board.specs[name].title} ({apart:.1f} against {away:.1f})"
        for name, (apart, away) in board.noisy.items()
    ]
    head = f"Weighs nothing in {board.rule.title}, max gap and worst, as"
    if set(board.noisy) >= set(board.rule.metrics):
        head = "All columns weigh, although in each of them"
    folds = " The last fold decides for all folds." if board.suite.spec.folds else ""
    return (
        f"{head} two Retrains lie farther apart than the methods from Retrain: "
        f"{', '.join(columns)}; root mean square gap of the second Retrain against that of the "
        f"methods' means.{folds}"
    )


def calibration_lines(board: Leaderboard) -> list[str]:
    """What Retrain's own values say about the table, for metrics that declare it."""
    retrain = next((row for row in board.rows if row.method == "retrain"), None)
    values = retrain.metrics if retrain else {}
    return [
        spec.calibration.format(spread(values[name], spec.digits))
        for name, spec in board.specs.items()
        if spec.calibration and name in values
    ]


def share_line(board: Leaderboard) -> str:
    """How much each metric, and each axis, has of the distances of all methods together."""
    rows = [row.parts for row in board.rows if row.method not in REFERENCES and row.parts]
    of_metrics = shares(rows)
    words = {m: f"{board.specs[m].title} {100 * s:.0f} %" for m, s in of_metrics.items()}
    for axis in board.rule.axes if words else ():
        inside = [name for name in axis.weights if name in words]
        whole = math.fsum(of_metrics[name] for name in inside)
        parts = ", ".join(words.pop(name) for name in inside)
        words[axis.name] = f"{axis.title} {100 * whole:.0f} % ({parts})"
    head = f"Shares of {board.rule.title} over all methods"
    return f"{head}: {', '.join(words.values())}." if words else ""


def saturation_line(board: Leaderboard) -> str:
    """Which metrics are 0 or 100 for Retrain and every method, and so carry nothing."""
    saturated = []
    for name in board.rule.metrics:
        values = {r.metrics.get(name) for _, r in board.records if r.method != "original"}
        if values in ({0.0}, {100.0}):
            saturated.append(f"{board.specs[name].title} ({values.pop():g})")
    if not saturated:
        return ""
    return f"Carries nothing, being the same for Retrain and every row: {', '.join(saturated)}."


def assumption_line(board: Leaderboard) -> str:
    """Which published models do not say what they were trained on; empty where all do."""
    names = {
        "Retrain" if record.method == "retrain" else "Original"
        for _, record in board.records
        if record.data.get("trained_on") == ASSUMED
    }
    if not names:
        return ""
    return (
        f"Published without a statement of its training data: {' and '.join(sorted(names))}. That"
        " these are the data of this table is assumed."
    )


def pretraining_line(board: Leaderboard) -> str:
    """What Original and every Retrain start from, where that was pretrained here."""
    origins = {record.data.get(PRETRAINED) for _, record in board.records} - {None}
    return "".join(f"Original and Retrain start from a pretraining on {text}." for text in origins)


def divergence_lines(board: Leaderboard) -> list[str]:
    """Which runs diverged, and where."""
    return [
        f"{row.label}, seed {seed}: {detail}"
        for row in board.rows
        for seed, detail in row.diverged.items()
    ]


def inapplicable_lines(board: Leaderboard) -> list[str]:
    """Which rows say nothing about this benchmark, and why."""
    return [
        f"{row.label}: not applicable ({row.inapplicable})"
        for row in board.rows
        if row.inapplicable
    ]


def composite_lines(board: Leaderboard) -> list[str]:
    """Which rows are generation-time methods."""
    infos = {row.label: info_of(row.method) for row in board.rows if row.seeds}
    models = {label: info.models for label, info in infos.items() if info}
    return [
        f"{label}: a generation-time method, {count} models at inference; no checkpoint of its own"
        for label, count in models.items()
        if count > 1
    ]


def budget_lines(suite: ResolvedSuite) -> list[str]:
    """What the rows were given to spend, and which of them spent something else."""
    if suite.spec.budget is None:
        return []
    rows = {
        word: ", ".join(row.label for row in suite.rows if row.budget == word)
        for word in ("own", "counted")
    }
    lines = [f"Budget of every row that reads retain data and has a length: {suite.spec.budget}."]
    if rows["own"]:
        lines.append(f"Another budget, stated by the row: {rows['own']}.")
    if rows["counted"]:
        lines.append(f"No length of its own; what it read is counted: {rows['counted']}.")
    return lines


def choice_lines(board: Leaderboard) -> list[str]:
    """How the settings of tuned rows were chosen, in one line of the first screen."""
    tune = board.suite.spec.tune
    if tune is None or board.rule.goals:
        return []
    seeds = ", ".join(map(str, tune.seeds))
    best = f"{tune.trials} trials a row" if tune.trials else tune.budget
    rule = board.suite.trial_rule
    if isinstance(rule, TargetRule):
        return [
            f"Settings: the best of {best} by held-out forgetting and utility on seed {seeds}, "
            f"without a Retrain: {rule.words}."
        ]
    return [
        f"Settings: the best of {best} by the distance to the Retrain of seed "
        f"{seeds}{by_attack(tune)}. No user has such a Retrain."
    ]


def _provenance(board: Leaderboard) -> str:
    """Data, commit and packages of the first record."""
    if not board.records:
        return ""
    record = board.records[0][1]
    git = record.environment.get("git", {})
    commit = git.get("commit", "unknown")[:12] + (" (dirty)" if git.get("dirty") else "")
    packages = record.environment.get("packages", {})
    versions = [f"{name} {version}" for name, version in packages.items()]
    return (
        f"Data: {record.data.get('provenance', '?')}, digest {record.data['digest'][:12]}. "
        f"{', '.join([f'Commit {commit}', *versions])}. {_hardware(board)}"
    )


def _hardware(board: Leaderboard) -> str:
    """Processes, threads, device and processor: no part of a key, though they move digits."""
    kinds = sorted(
        {
            tuple(str(r.environment.get(k, "?")) for k in ("processes", "threads", "device"))
            for _, r in board.records
        }
    )
    words = [f"{count} x {threads} on {device}" for count, threads, device in kinds]
    mixed = "; rows of several kinds may differ in their last digits" if len(kinds) > 1 else ""
    chips = sorted({r.environment.get("processor", "") for _, r in board.records} - {""})
    chip = f" Processor: {'; '.join(chips)}." if chips else ""
    return f"Processes x threads on device: {', '.join(words)}{mixed}.{chip}"
