"""Two results, paired by row, seed and split."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stable_forgetting.benchmarks.leaderboard.data import csv_text
from stable_forgetting.benchmarks.report.cells import MISSING, interval, significant
from stable_forgetting.benchmarks.report.section import Column, Section, table
from stable_forgetting.benchmarks.sharing.results import Results, Run
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.measure.gaps import PairedDifference, paired_difference
from stable_forgetting.common.measure.verdict import holm_by_key

DIFFERENCE = "is the mean paired difference, with its 95 % CI (t)"
MOST = 8
"""Metrics of the table."""


@dataclass
class Comparison:
    """Differences of two results.

    Attributes:
        differences: (row label, replicate) -> metric -> difference, first less second.
        unpaired: What could not be compared, in words.
    """

    first: Results
    second: Results
    differences: dict[tuple[str, int], dict[str, PairedDifference]] = field(default_factory=dict)
    unpaired: list[str] = field(default_factory=list)

    @property
    def metrics(self) -> list[str]:
        """Every metric that both have, the main columns first."""
        measured = {name for row in self.differences.values() for name in row}
        names = dict.fromkeys([*self.first.titles, *self.second.titles, *sorted(measured)])
        return [name for name in names if name in measured]


def compare(first: Results, second: Results) -> Comparison:
    """Pairs the runs.

    Raises:
        DataError: There is no pair, or nothing tells that the splits are the same.
    """
    result = Comparison(first, second)
    if first.suite != second.suite and not (first.told and second.told):
        raise DataError(
            f"compare: {first.name} is of {first.suite}, {second.name} of {second.suite}, and not "
            "every run says its split; compare records, or results of one suite"
        )
    pairs: dict[tuple[str, int], list[tuple[Run, Run]]] = defaultdict(list)
    for place, ours in first.runs.items():
        theirs = second.runs.get(place)
        if theirs is not None and _fault(ours, theirs) == "":
            pairs[place[:2]].append((ours, theirs))
    for row, of_row in pairs.items():
        metrics = set.intersection(*({*a.metrics} & {*b.metrics} for a, b in of_row))
        result.differences[row] = {
            name: paired_difference(
                *zip(*((a.metrics[name], b.metrics[name]) for a, b in of_row), strict=True)
            )
            for name in metrics
        }
    result.unpaired = [*_alone(first, second), *_alone(second, first), *_faults(first, second)]
    if not pairs:
        several = "" if first.suite == second.suite else ", results of two suites,"
        raise DataError(
            f"compare: nothing of {first.name} and of {second.name}{several} can be paired by row, "
            f"seed and split: {'; '.join(result.unpaired[:3])}"
        )
    return result


def _fault(ours: Run, theirs: Run) -> str:
    """Why two runs of one row and seed are no pair; empty where they are."""
    if ours.split and theirs.split and ours.split != theirs.split:
        return "other splits"
    return "" if ours.ok and theirs.ok else "diverged"


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
        if place in second.runs and (why := _fault(first.runs[place], second.runs[place])):
            places[why, place[2]].append(_name(*place[:2]))
    for (why, seed), names in places.items():
        yield f"seed {seed}: {why}: {', '.join(names)}"
    silent = [own.name for own in (first, second) if not own.told]
    if silent:
        yield f"paired by row and seed alone, since no split is told: {', '.join(silent)}"


def _name(label: str, replicate: int) -> str:
    return f"{label} ({replicate + 1})" if replicate else label


def sections(comparison: Comparison) -> list[Section]:
    """The differences of the main columns, and what is no pair."""
    first, second = comparison.first, comparison.second
    main = [name for name in comparison.metrics if name in {**first.titles, **second.titles}]
    names = (main or comparison.metrics)[:MOST]
    titles: Mapping[str, tuple[str, int]] = {**second.titles, **first.titles}

    def shown(names: Sequence[str]) -> tuple[list[str | Column], list[list[str]]]:
        heads: list[str | Column] = ["method", Column("pairs", doc="counts the seeds of both")]
        heads += [Column(titles.get(n, (n, 2))[0], doc=DIFFERENCE) for n in names]
        of = titles.get(_tested(names), (_tested(names), 2))[0]
        heads.append(
            Column("p", doc=f"is of a paired t-test of {of}, corrected for the rows (Holm)")
        )
        q = corrected(comparison, _tested(names))
        return heads, [
            [*_cells(comparison, row, names, titles), significant(q.get(row))]
            for row in comparison.differences
        ]

    text = f"{first.name} − {second.name}: below 0 the first has the lower value."
    content = table(*shown(names))
    result = [Section(f"{first.name} and {second.name}", depth=1)]
    result.append(Section(text=(text,), content=content, tone="muted"))
    if comparison.unpaired:
        result.append(Section("Not compared", lines=tuple(comparison.unpaired)))
    return result


def _tested(names: Sequence[str]) -> str:
    """The metric of the paired test: the distance, else the first."""
    return "distance" if "distance" in names else next(iter(names), "")


def _cells(
    comparison: Comparison,
    row: tuple[str, int],
    names: Sequence[str],
    titles: Mapping[str, tuple[str, int]],
) -> list[str]:
    own = comparison.differences[row]
    count = next((str(difference.summary.n) for difference in own.values()), MISSING)
    cells = [
        interval(own[n].summary, f"+.{titles.get(n, (n, 2))[1]}f") if n in own else MISSING
        for n in names
    ]
    return [_name(*row), count, *cells]


def corrected(comparison: Comparison, metric: str) -> dict[tuple[str, int], float]:
    """P-values of one metric, corrected for the rows of the table (Holm)."""
    of_rows = comparison.differences.items()
    return holm_by_key({row: own[metric].p_value for row, own in of_rows if metric in own})


def to_csv(comparison: Comparison) -> str:
    """One line per row and metric: the difference, its interval, p as it is and corrected."""
    q = {metric: corrected(comparison, metric) for metric in comparison.metrics}
    return csv_text(
        [
            {
                "row": _name(*row),
                "metric": name,
                **{key: getattr(difference.summary, key) for key in ("mean", "low", "high", "n")},
                "p": difference.p_value,
                "q": q[name].get(row),
            }
            for row, own in comparison.differences.items()
            for name in comparison.metrics
            if (difference := own.get(name)) is not None
        ]
    )
