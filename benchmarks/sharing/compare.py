"""Two results, paired by row, seed and split."""

from __future__ import annotations

import csv
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from stable_forgetting.benchmarks.leaderboard.board import Leaderboard
from stable_forgetting.benchmarks.leaderboard.write import RECORDS
from stable_forgetting.benchmarks.report.cells import MISSING, interval, significant
from stable_forgetting.benchmarks.report.files import csv_text, reading
from stable_forgetting.benchmarks.report.section import Column, Section, table
from stable_forgetting.benchmarks.report.shipped import RESULTS, read_board
from stable_forgetting.benchmarks.sharing.bundle import opened
from stable_forgetting.benchmarks.sharing.records import board_of, read_records
from stable_forgetting.benchmarks.suite.goals import metric_specs
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite, load_suite
from stable_forgetting.benchmarks.suite.suite import FLOOR, suite_names
from stable_forgetting.common.base.errors import ConfigError, DataError
from stable_forgetting.common.measure.gaps import PairedDifference, paired_difference
from stable_forgetting.common.measure.metric import MetricSpec
from stable_forgetting.common.measure.rules import GapRule
from stable_forgetting.common.measure.verdict import holm_by_key

RUNS = "runs.csv"
"""Where shipped results have their runs."""
DIFFERENCE = "is the mean paired difference, with its 95 % CI (t)"
MOST = 8
"""Metrics of the table."""
Place = tuple[str, int, int]
"""Row label, replicate, seed."""
Run = tuple[str, Mapping[str, float] | None]
"""Digest of the split, empty where the results do not say it, and metrics with ``distance``; None
of a model that diverged."""
Titles = Mapping[str, tuple[str, int]]
"""Metric -> column head and digits, main columns first."""
Differences = Mapping[tuple[str, int], Mapping[str, PairedDifference]]
"""Row label and replicate -> metric -> difference, first less second."""


@dataclass(frozen=True)
class Results:
    """Runs of one suite.

    Attributes:
        suite: Name of the suite, of a varied one the name of what was varied.
        runs: In the order of its table.
        titles: Empty where not said.
        weights: Metric -> what it weighs in the distance; empty where not said, or of goals.
    """

    name: str
    suite: str
    runs: Mapping[Place, Run]
    titles: Titles
    weights: Mapping[str, float]

    @property
    def told(self) -> bool:
        """Whether every run says which split it is of."""
        return all(split for split, _ in self.runs.values())


# What is compared --------------------------------------------------------------------------------


def read_results(text: str, board: Callable[[str, Path | None], Leaderboard | None]) -> Results:
    """The runs that an argument names.

    Args:
        text: A suite, ``STORE:SUITE``, a file of records, a bundle, or a folder of results.
        board: (suite, store) -> its table; None where the store has no record of it.

    Raises:
        UserError: It is none of these, or there are no runs.
    """
    path = Path(text)
    if (path / "suites").is_dir():
        raise ConfigError(f"compare {text}: is a store; write {text}:SUITE")
    store, colon, suite = text.rpartition(":")
    if path.is_dir() and not (path / RECORDS).is_file():
        return _of_results(path, text)
    if path.is_dir() or (path.is_file() and path.suffix not in (".yaml", ".yml")):
        with opened(path) if path.suffix == ".zip" else nullcontext(path) as place:
            return of_board(board_of(read_records(place), place), text)
    if colon and not Path(store).is_dir():
        raise ConfigError(f"compare {text}: {store} is no store; write STORE:SUITE, or a path")
    made = board(suite, Path(store) if colon else None)
    if made is not None:
        return of_board(made, text)
    if not colon and (RESULTS / text / RUNS).is_file():
        return _of_results(RESULTS / text, f"{text} (shipped)")
    kept = f" --store {shlex.quote(store)}" if colon else ""
    raise ConfigError(
        f"compare {text}: no records of {suite}; run: unlearn run {shlex.quote(suite)}{kept}"
    )


def of_board(board: Leaderboard, name: str) -> Results:
    """The runs of a table."""
    distances = {row.label: row.ag_per_seed for row in board.rows}
    runs: dict[Place, Run] = {}
    for label, record in board.records:
        metrics = {name: value for name, value in record.metrics.items() if value is not None}
        of_row = distances.get(FLOOR if record.replicate else label, {})
        if record.replicate < 2 and record.seed in of_row:
            metrics["distance"] = of_row[record.seed]
        place = (label, record.replicate, record.seed)
        runs[place] = record.split.get("digest", ""), metrics if record.status == "ok" else None
    order = [row.label for row in board.rows]
    runs = dict(sorted(runs.items(), key=lambda item: order.index(item[0][0])))
    suite = board.suite.name.partition("+")[0]
    weights = board.rule.weights() if isinstance(board.rule, GapRule) else {}
    titles = _titles(board.suite, board.specs, board.rule.title)
    return Results(name, suite, runs, titles, weights)


def _titles(suite: ResolvedSuite, specs: Mapping[str, MetricSpec], distance: str) -> Titles:
    """Heads and digits: the suite's columns in their order, the distance, then all others."""
    columns = [name for name in suite.spec.columns if name in specs]
    titles = {n: (specs[n].title, specs[n].digits) for n in dict.fromkeys([*columns, *specs])}
    main = {name: titles[name] for name in columns}
    return {**main, "distance": (distance, 2), **titles}


def _of_results(folder: Path, name: str) -> Results:
    """The runs of a folder of shipped results."""
    with reading(f"{folder}: no results that can be read"):
        data = read_board(folder)
        suite, distance = data["suite"].partition("+")[0], data["distance"]["title"]
        weights = {name: w for name, w in data["distance"].get("weights", {}).items() if w}
        distances = {row["row"]: row["ag_per_seed"] for row in data["rows"]}
        if not (folder / RUNS).exists():
            raise DataError(f"{folder}: no {RECORDS} and no {RUNS}; give a folder of results")
        with (folder / RUNS).open(encoding="utf-8-sig", newline="") as stream:
            runs = dict(_run(line, distances) for line in csv.DictReader(stream))
    titles: Titles = {}
    if suite in suite_names():
        known = load_suite(suite)
        specs = metric_specs(known.spec, known.probes)
        titles = _titles(known, specs, distance)
    return Results(name, suite, runs, titles, weights)


def _run(
    line: Mapping[str, str], distances: Mapping[str, Mapping[str, float]]
) -> tuple[Place, Run]:
    label, replicate, seed = line["row"], int(line["replicate"]), line["seed"]
    facts = ("row", "method", "seed", "replicate", "status", "split", "distance")
    metrics = {
        name: float(value)
        for name, value in line.items()
        if value and name not in facts and not name.startswith(("gap.", "config."))
    }
    distance = distances.get(FLOOR if replicate else label, {}).get(seed)
    if replicate < 2 and distance is not None:
        metrics["distance"] = float(distance)
    place = (label, replicate, int(seed))
    return place, (line.get("split", ""), metrics if line["status"] == "ok" else None)


# How they are paired -----------------------------------------------------------------------------


def compare(first: Results, second: Results) -> tuple[Differences, list[str]]:
    """The differences of paired runs, and what could not be compared, in words.

    Raises:
        DataError: There is no pair, or nothing tells that the splits are the same.
    """
    if first.suite != second.suite and not (first.told and second.told):
        raise DataError(
            f"compare: {first.name} is of {first.suite}, {second.name} of {second.suite}, and not "
            "every run says its split; compare records, or results of one suite"
        )
    pairs = defaultdict(list)
    for place in [place for place in first.runs if place in second.runs]:
        (_, ours), (_, theirs) = first.runs[place], second.runs[place]
        if ours is not None and theirs is not None and not _fault(first, second, place):
            pairs[place[:2]].append((ours, theirs))
    otherwise = [*_weighed(first, second)]
    unpaired = [*_alone(first, second), *_alone(second, first), *_faults(first, second), *otherwise]
    if not pairs:
        several = "" if first.suite == second.suite else ", results of two suites,"
        raise DataError(
            f"compare: nothing of {first.name} and of {second.name}{several} can be paired by row, "
            f"seed and split: {'; '.join(unpaired[:3])}"
        )
    differences = {}
    for row, of_row in pairs.items():
        measured = set.intersection(*({*a} & {*b} for a, b in of_row))
        measured -= {"distance"} if otherwise else set()
        differences[row] = {
            name: paired_difference(*zip(*((a[name], b[name]) for a, b in of_row), strict=True))
            for name in measured
        }
    return differences, unpaired


def _fault(first: Results, second: Results, place: Place) -> str:
    """Why two runs of one row and seed are no pair; empty where they are."""
    (split, ours), (other, theirs) = first.runs[place], second.runs[place]
    if split and other and split != other:
        return "other splits"
    return "diverged" if ours is None or theirs is None else ""


def _alone(own: Results, other: Results) -> Iterator[str]:
    """Rows, and seeds of rows, that only one of them has."""
    rows = dict.fromkeys(place[:2] for place in own.runs)
    others = {place[:2] for place in other.runs}
    lacking = [_name(*row) for row in rows if row not in others]
    if lacking:
        yield f"only in {own.name}: {', '.join(lacking)}"
    seeds: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for row in rows:
        alone = [str(p[2]) for p in own.runs if p[:2] == row and p not in other.runs]
        if alone and row in others:
            seeds[tuple(alone)].append(_name(*row))
    for numbers, names in seeds.items():
        yield f"only in {own.name}: seeds {', '.join(numbers)} of {', '.join(names)}"


def _faults(first: Results, second: Results) -> Iterator[str]:
    places: dict[tuple[str, int], list[str]] = defaultdict(list)
    for place in first.runs:
        if place in second.runs and (why := _fault(first, second, place)):
            places[why, place[2]].append(_name(*place[:2]))
    for (why, seed), names in places.items():
        yield f"seed {seed}: {why}: {', '.join(names)}"
    silent = [own.name for own in (first, second) if not own.told]
    if silent:
        yield f"paired by row and seed alone, since no split is told: {', '.join(silent)}"


def _weighed(first: Results, second: Results) -> Iterator[str]:
    """That both distances are of other columns: one less the other is of no model."""
    if first.weights and second.weights and first.weights != second.weights:
        told = []
        for own in (first, second):
            parts = (f"{name} {100 * weight:.0f} %" for name, weight in own.weights.items())
            told.append(f"{', '.join(parts)} in {own.name}")
        yield f"the distance, as other columns weigh: {'; '.join(told)}"


def _name(label: str, replicate: int) -> str:
    return f"{label} ({replicate + 1})" if replicate else label


# What is shown -----------------------------------------------------------------------------------


def sections(
    first: Results, second: Results, differences: Differences, unpaired: Sequence[str]
) -> list[Section]:
    """The differences of the main columns, and what is no pair."""
    titles = {**second.titles, **first.titles}
    metrics = _metrics(first, second, differences)
    names = [name for name in metrics if name in titles] or metrics
    if "distance" in names[MOST:]:
        names = [*names[: MOST - 1], "distance"]
    names = names[:MOST]
    titled = {name: titles.get(name, (name, 2)) for name in names}
    tested = "distance" if "distance" in names else next(iter(names), "")
    heads: list[str | Column] = ["method", Column("pairs", doc="counts the seeds of both")]
    heads += [Column(head, doc=DIFFERENCE) for head, _ in titled.values()]
    of = titled[tested][0] if titled else ""
    heads.append(Column("p", doc=f"is of a paired t-test of {of}, corrected for the rows (Holm)"))
    q, rows = _corrected(differences, tested), []
    for row, own in differences.items():
        count = next((str(difference.summary.n) for difference in own.values()), MISSING)
        cells = [
            interval(own[name].summary, f"+.{digits}f") if name in own else MISSING
            for name, (_, digits) in titled.items()
        ]
        rows.append([_name(*row), count, *cells, significant(q.get(row))])
    text = f"{first.name} − {second.name}: below 0 the first has the lower value."
    result = [Section(f"{first.name} and {second.name}", depth=1)]
    result.append(Section(text=(text,), content=table(heads, rows), tone="muted"))
    if unpaired:
        result.append(Section("Not compared", lines=tuple(unpaired)))
    return result


def _metrics(first: Results, second: Results, differences: Differences) -> list[str]:
    """Every metric that both have, the main columns first."""
    measured = {name for row in differences.values() for name in row}
    names = dict.fromkeys([*first.titles, *second.titles, *sorted(measured)])
    return [name for name in names if name in measured]


def _corrected(differences: Differences, metric: str) -> dict[tuple[str, int], float]:
    """P-values of one metric, corrected for the rows of the table (Holm)."""
    of_rows = differences.items()
    return holm_by_key({row: own[metric].p_value for row, own in of_rows if metric in own})


def to_csv(first: Results, second: Results, differences: Differences) -> str:
    """One line per row and metric: the difference, its interval, p as it is and corrected."""
    lines = []
    metrics = _metrics(first, second, differences)
    q = {metric: _corrected(differences, metric) for metric in metrics}
    for row, own in differences.items():
        for name in metrics:
            if name in own:
                summary, p = own[name].summary, own[name].p_value
                kept = {key: getattr(summary, key) for key in ("mean", "low", "high", "n")}
                line = {"row": _name(*row), "metric": name, **kept, "p": p, "q": q[name].get(row)}
                lines.append(line)
    return csv_text(lines)
