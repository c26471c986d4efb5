"""What a comparison may name: a suite, a store's suite, records, a bundle, shipped results."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from stable_forgetting.benchmarks.leaderboard.board import Leaderboard
from stable_forgetting.benchmarks.leaderboard.write import RECORDS
from stable_forgetting.benchmarks.report.shipped import RESULTS, read_board
from stable_forgetting.benchmarks.sharing.bundle import opened
from stable_forgetting.benchmarks.sharing.records import board_of, read_records
from stable_forgetting.benchmarks.suite.goals import metric_specs
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite, load_suite
from stable_forgetting.benchmarks.suite.suite import FLOOR, suite_names
from stable_forgetting.common.base.errors import ConfigError, DataError, one_line
from stable_forgetting.common.measure.metric import MetricSpec

Place = tuple[str, int, int]
"""Row label, replicate, seed."""
RUNS = "runs.csv"
"""Where shipped results have their runs."""


@dataclass(frozen=True)
class Run:
    """What one evaluated model measured.

    Attributes:
        split: Digest of its index sets; empty where the results do not say it.
        metrics: Of a model that did not diverge, ``distance`` among them.
    """

    split: str
    ok: bool
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Results:
    """Runs of one suite.

    Attributes:
        name: As a reader knows it.
        suite: Name of the suite, of a varied one the name of what was varied.
        runs: In the order of its table.
        titles: Metric -> column head and digits, main columns first; empty where not said.
    """

    name: str
    suite: str
    runs: Mapping[Place, Run]
    titles: Mapping[str, tuple[str, int]]

    @property
    def told(self) -> bool:
        """Whether every run says which split it is of."""
        return all(run.split for run in self.runs.values())


def read_results(text: str, board: Callable[[str, Path | None], Leaderboard | None]) -> Results:
    """The runs that an argument names.

    Args:
        text: A suite, ``STORE:SUITE``, a file of records, a bundle, or a folder of results.
        board: (suite, store) -> its table; None where the store has no record of it.

    Raises:
        UserError: It is none of these, or there are no runs.
    """
    path = Path(text)
    store, colon, suite = text.rpartition(":")
    if path.is_dir() or (path.is_file() and path.suffix not in (".yaml", ".yml")):
        return _of_path(path)
    if colon and not Path(store).is_dir():
        raise ConfigError(f"compare {text}: {store} is no store; write STORE:SUITE, or a path")
    made = board(suite, Path(store) if colon else None)
    if made is not None:
        return of_board(made, text)
    if not colon and (RESULTS / text / RUNS).is_file():
        return _of_results(RESULTS / text, f"{text} (shipped)")
    raise ConfigError(f"compare {text}: no records of {suite}; run: unlearn run {suite}")


def _of_path(path: Path) -> Results:
    if path.is_dir() and not (path / RECORDS).is_file():
        return _of_results(path, str(path))
    with opened(path) if path.suffix == ".zip" else nullcontext(path) as place:
        return of_board(board_of(read_records(place), place), str(path))


def of_board(board: Leaderboard, name: str) -> Results:
    """The runs of a table."""
    distances = {row.label: row.ag_per_seed for row in board.rows}
    runs = {}
    for label, record in board.records:
        metrics = {name: value for name, value in record.metrics.items() if value is not None}
        of_row = distances.get(FLOOR if record.replicate else label, {})
        if record.replicate < 2 and record.seed in of_row:
            metrics["distance"] = of_row[record.seed]
        place = (label, record.replicate, record.seed)
        runs[place] = Run(record.split.get("digest", ""), record.status == "ok", metrics)
    order = [row.label for row in board.rows]
    runs = dict(sorted(runs.items(), key=lambda item: order.index(item[0][0])))
    suite = board.suite.name.partition("+")[0]
    return Results(name, suite, runs, _titles(board.suite, board.specs, board.rule.title))


def _titles(
    suite: ResolvedSuite, specs: Mapping[str, MetricSpec], distance: str
) -> dict[str, tuple[str, int]]:
    """Heads and digits: the suite's columns in their order, the distance, then all others."""
    columns = [name for name in suite.spec.columns if name in specs]
    titles = {n: (specs[n].title, specs[n].digits) for n in dict.fromkeys([*columns, *specs])}
    main = {name: titles[name] for name in columns}
    return {**main, "distance": (distance, 2), **titles}


def _of_results(folder: Path, name: str) -> Results:
    """The runs of a folder of shipped results."""
    try:
        data = read_board(folder)
        distances = {row["row"]: row["ag_per_seed"] for row in data["rows"]}
        with (folder / RUNS).open(encoding="utf-8", newline="") as stream:
            runs = dict(_run(line, distances) for line in csv.DictReader(stream))
    except FileNotFoundError:
        raise DataError(f"{folder}: no {RECORDS} and no {RUNS}; give a folder of results") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{folder}: no results that can be read ({one_line(error)})") from None
    suite = data["suite"].partition("+")[0]
    return Results(name, suite, runs, _known_titles(suite, data["distance"]["title"]))


def _known_titles(suite: str, distance: str) -> dict[str, tuple[str, int]]:
    """The titles of a built-in suite; none of another."""
    if suite not in suite_names():
        return {}
    resolved = load_suite(suite)
    return _titles(resolved, metric_specs(resolved.spec, resolved.probes), distance)


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
        metrics["distance"] = distance
    return (label, replicate, int(seed)), Run(
        line.get("split", ""), line["status"] == "ok", metrics
    )
