"""One row against another in every table that has both: what a claim is worth across settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from stable_forgetting.benchmarks.leaderboard.verdicts import alike
from stable_forgetting.benchmarks.report.cells import MISSING, interval, number, significant
from stable_forgetting.benchmarks.report.files import csv_text, reading
from stable_forgetting.benchmarks.report.section import Column, Section, Table, table
from stable_forgetting.benchmarks.report.shipped import RESULTS, read_board
from stable_forgetting.benchmarks.suite.reading import suite_version
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.measure.gaps import PairedDifference, paired_difference
from stable_forgetting.common.measure.verdict import LEVEL, holm_by_key

BOARD = "leaderboard.json"
CLAIMS = {
    ("gd_sine", "gd_lora_omega"): "The paper's sine against the same adapter without it",
    ("gd_sine", "gd_lora"): "The paper's sine against plain LoRA",
    ("gd_tanh_tight", "gd_lora_omega"): "A bound of the weights' size against none",
    ("gd_ul_tanh_tight", "gd_ul_omega"): "The same bound against none, with the saturating loss",
    ("gd_ul_tanh_tight", "gd_ul"): "The same bound and omega 100 against LoRA, with that loss",
}
"""What is asked where nobody asks otherwise: does a bound help?  Pair -> it in words."""
READINGS = {
    "nearer": "says that the first row is nearer to the goal",
    "farther": "says that the second row is nearer",
    "same": "says that they are equal to two decimals, in the mean and from seed to seed",
    "not apart": "says that no difference is shown",
    "one seed": "says that one seed tells nothing",
    "diverged": "says that a row diverged on some seed, so that they are not compared",
}
"""What a comparison shows -> in words."""
SHORT = {
    "same": "equal to two decimals in",
    "not apart": "no difference shown in",
    "one seed": "one seed, which tells nothing, in",
    "diverged": "not compared, as a row diverged, in",
}
"""Readings that decide nothing, in a sentence."""
Boards = Mapping[str, Mapping[str, Any]]
"""Name of a table -> it, as ``leaderboard.json`` has it."""


@dataclass(frozen=True)
class Encounter:
    """Two rows in one table.

    Attributes:
        also: Other tables with the same runs of both rows, or some of them.
        runs: (seed, distance of the first row, of the second), of the seeds of both.
        means: Mean distance of each row over these seeds; None where there is none.
        floor: Mean distance between two Retrains.
        difference: First less second; None where a row diverged.
        diverged: Row -> seeds on which it diverged.
        complete: Whether every run of the table is there.
        q: The difference's p, corrected for the tables that have the pair.
    """

    suite: str
    also: tuple[str, ...]
    pair: tuple[str, str]
    unit: str
    runs: frozenset[tuple[str, float, float]]
    means: tuple[float, float] | None
    floor: float | None
    difference: PairedDifference | None
    diverged: Mapping[str, int]
    complete: bool
    q: float | None = None

    @property
    def reading(self) -> str:
        """A key of :data:`READINGS`."""
        if self.difference is None:
            return "diverged"
        if alike(self.difference.summary):
            return "same"
        if self.q is None:
            return "one seed"
        if self.q > LEVEL:
            return "not apart"
        return "nearer" if self.difference.summary.mean < 0 else "farther"

    @property
    def share(self) -> tuple[float, float, float] | None:
        """Difference, and the ends of its interval, in percent of the sum of both distances."""
        if self.difference is None or self.means is None or sum(self.means) == 0:
            return None
        own = self.difference.summary
        ends = (own.mean, *(own.mean if end is None else end for end in (own.low, own.high)))
        mean, low, high = (100 * value / sum(self.means) for value in ends)
        return mean, low, high


def meetings(pairs: Iterable[tuple[str, str]], boards: Boards) -> list[Encounter]:
    """Every table that has both rows of a pair, pair by pair.

    Raises:
        ConfigError: No table has both rows of a pair.
        DataError: A table cannot be read.
    """
    met: list[Encounter] = []
    for pair in pairs:
        found = []
        for name, board in boards.items():
            with reading(f"{name}: {BOARD} cannot be read"):
                found.append(_meet(name, board, pair))
        own = _distinct(found)
        if not own:
            raise ConfigError(_missing(pair, boards))
        p = {n: each.difference.p_value for n, each in enumerate(own) if each.difference}
        q = holm_by_key(p)
        met += [replace(each, q=q.get(n)) for n, each in enumerate(own)]
    return met


def read_boards(
    stores: Sequence[Path], words: str = ""
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The tables in stores, with those that were left out since their suite has changed.

    Raises:
        DataError: A table cannot be read.
    """
    wanted = words.split()
    files = {file.parent.name: file for store in stores for file in store.glob(f"*/{BOARD}")}
    boards, withdrawn = {}, []
    for name, file in sorted(files.items()):
        if not all(word in name for word in wanted):
            continue
        board = read_board(file.parent)
        if file.parent.parent == RESULTS and board["version"] != suite_version(name):
            withdrawn.append(name)
        else:
            boards[name] = board
    return boards, withdrawn


def _meet(name: str, board: Mapping[str, Any], pair: tuple[str, str]) -> Encounter | None:
    """The pair in a table; None where it has not both."""
    rows = {row["row"]: row for row in board["rows"]}
    if not all(label in rows and rows[label]["seeds"] for label in pair):
        return None
    first, second = (rows[label]["ag_per_seed"] for label in pair)
    seeds = [seed for seed in first if seed in second]
    diverged = {label: len(rows[label]["diverged"]) for label in pair if rows[label]["diverged"]}
    if not seeds and not diverged:
        return None
    values = [[own[seed] for seed in seeds] for own in (first, second)]
    floor = board.get("pooled_floor") or board["floor"] or {}
    return Encounter(
        suite=name,
        also=(),
        pair=pair,
        unit=board["distance"]["unit"],
        runs=frozenset(zip(seeds, *map(_rounded, values), strict=True)),
        means=(fmean(values[0]), fmean(values[1])) if seeds else None,
        floor=floor.get("mean"),
        difference=None if diverged else paired_difference(*values),
        diverged=diverged,
        complete=board["complete"],
    )


def _rounded(values: Sequence[float]) -> list[float]:
    """At five digits, as scores that were measured again differ by rounding."""
    return [float(f"{value:.5g}") for value in values]


def _distinct(found: Iterable[Encounter | None]) -> list[Encounter]:
    """Tables with the same runs of both rows, or with some of them, count once.

    The one with the most runs stands for them; of equal ones that of the shortest name.
    """
    result: list[Encounter] = []
    known = [own for own in found if own is not None]
    for own in sorted(known, key=lambda each: (-len(each.runs), len(each.suite))):
        for place, other in enumerate(result):
            if own.runs and own.runs <= other.runs and own.diverged == other.diverged:
                result[place] = replace(other, also=(*other.also, own.suite))
                break
        else:
            result.append(own)
    return sorted(result, key=lambda each: each.suite)


def _missing(pair: tuple[str, str], boards: Boards) -> str:
    known = {row["row"] for board in boards.values() for row in board["rows"]}
    unknown = [label for label in pair if label not in known]
    told = f"; no table has {' and '.join(unknown)}" if unknown and known else ""
    return (
        f"compare {','.join(pair)}: none of {len(boards)} tables has both rows{told}; see a "
        "table's rows with: unlearn report SUITE"
    )


# What is shown -----------------------------------------------------------------------------------

DOCS = {
    "n": "counts the seeds of both",
    "2nd Retrain": "is the distance of a second Retrain",
    "difference": "is the first row's distance to the goal less the second's, paired by seed, with "
    "its 95 % CI (t): below 0 the first is nearer",
    "in %": "is the same over the sum of both distances: at -100 the first would be at the goal",
    "q": "is the paired t-test's p, corrected for the tables of the pair (Holm); "
    f"{LEVEL:g} or less is a difference",
}


def sections(met: Sequence[Encounter], withdrawn: Sequence[str]) -> list[Section]:
    """One table per pair, and what it adds up to."""
    result: list[Section] = []
    for pair in dict.fromkeys(own.pair for own in met):
        own = [each for each in met if each.pair == pair]
        result.append(Section(f"{pair[0]} against {pair[1]}", depth=1 if not result else 2))
        content = _table(pair, own, met if len(result) == 1 else ())
        result.append(Section(text=(tally(own),), content=content))
    notes = [
        f"{', '.join(each.also)}: the same runs as {each.suite}, or some of them"
        for each in met
        if each.also
    ]
    notes += [
        f"{each.suite}: " + ", ".join(f"{k} diverged on {v} seeds" for k, v in told.items())
        for each in met
        if (told := each.diverged)
    ]
    notes += [f"{each.suite}: some runs are missing" for each in met if not each.complete]
    if withdrawn:
        notes.append(f"left out, since their suites have changed: {', '.join(withdrawn)}")
    said = "Tables that share data or models are not independent of each other."
    result.append(Section(text=(said,), lines=tuple(dict.fromkeys(notes)), tone="muted"))
    return result


def tally(met: Sequence[Encounter]) -> str:
    """How many tables show what, in words."""
    first, second = met[0].pair
    counts = Counter(own.reading for own in met)
    told = [f"{first} is nearer in {counts['nearer']}, {second} in {counts['farther']}"]
    told += [
        f"{word}: {counts[word]}"
        for word in READINGS
        if counts[word] and word not in ("nearer", "farther")
    ]
    return f"{len(met)} tables: {'; '.join(told)}."


def answer(met: Sequence[Encounter]) -> str:
    """The same as a sentence on the first row."""
    counts = Counter(own.reading for own in met)
    told = [f"nearer to the goal in {counts['nearer']} of {len(met)} tables"]
    told.append(f"farther in {counts['farther']}")
    told += [f"{words} {counts[word]}" for word, words in SHORT.items() if counts[word]]
    return f"{', '.join(told)}."


def _table(
    pair: tuple[str, str], met: Sequence[Encounter], explained: Sequence[Encounter]
) -> Table:
    """The tables of a pair; the first table of all explains the columns, and every reading."""
    docs = {**DOCS, pair[0]: "and the next column: mean distances to the goal"} if explained else {}
    names = ("suite", "n", *pair, "2nd Retrain", "unit", "difference", "in %", "q", "reading")
    heads = [
        Column(
            name, "label" if name in ("suite", "unit", "reading") else "number", docs.get(name, "")
        )
        for name in names
    ]
    rows = [_cells(own) for own in met]
    kept = (0, 1, 6, 8, 9)
    narrow = table([heads[k] for k in kept], [[row[k] for k in kept] for row in rows])
    notes = {word: READINGS[word] for word in {own.reading: None for own in explained}}
    return table(heads, rows, narrow=replace(narrow, notes=notes), notes=notes)


def _cells(own: Encounter) -> list[str]:
    means = own.means or (None, None)
    difference = own.difference
    return [
        own.suite,
        MISSING if difference is None else str(difference.summary.n),
        *(number(value, 2) for value in means),
        number(own.floor, 2),
        own.unit,
        MISSING if difference is None else interval(difference.summary, "+.2f"),
        MISSING if own.share is None else f"{round(own.share[0]) + 0:+d}",
        significant(own.q),
        own.reading,
    ]


def to_csv(met: Sequence[Encounter]) -> str:
    """One line per pair and table."""
    return csv_text([_line(own) for own in met])


def _line(own: Encounter) -> dict[str, Any]:
    none = (None, None, None)
    line: dict[str, Any] = dict(zip(("first", "second"), own.pair, strict=True))
    line |= {"suite": own.suite, "also": " ".join(own.also), "unit": own.unit}
    line |= zip(("first_mean", "second_mean"), own.means or none[:2], strict=True)
    line["floor"] = own.floor
    if own.difference is not None:
        kept = ("mean", "low", "high", "n")
        line |= {key: getattr(own.difference.summary, key) for key in kept}
        line["p"] = own.difference.p_value
    line |= zip(("percent", "percent_low", "percent_high"), own.share or none, strict=True)
    return line | {"q": own.q, "reading": own.reading}
