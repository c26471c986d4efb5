"""Who forgets and who hides, over all tables: what rows show of the forgotten after an attack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from stable_forgetting.benchmarks.audits.after import EQUAL
from stable_forgetting.benchmarks.report.cells import MISSING, number
from stable_forgetting.benchmarks.report.files import csv_text, reading
from stable_forgetting.benchmarks.report.section import Column, Picture, Section, Table, table
from stable_forgetting.benchmarks.sharing import heat
from stable_forgetting.benchmarks.sharing.versus import BOARD, Boards
from stable_forgetting.benchmarks.suite.suite import FLOOR

TITLE = "Who forgets, who hides: every table whose rows were attacked"
READ = (
    "Cells: points by which a row shows more of the forgotten than Retrain after the worst attack, "
    "less what a second Retrain shows so (mean over seeds). At 0 or below it shows no more than "
    f"a second Retrain does. In brackets: more than {EQUAL:g} points of accuracy on what is to be "
    "kept are lost. Each value is the largest of many attacks, for the second Retrain too. Tables "
    "differ in their attacks, so columns are not compared with each other."
)
LIMITS = (0, 10, 25, 50)
"""Points beyond the second Retrain, where the picture's colour changes."""


SEVERAL = 2
"""Attacks of a table that counts; tables of before this was told had more."""


@dataclass(frozen=True)
class Attacked:
    """One row of one table, in points above Retrain, means over seeds.

    Attributes:
        before: What it shows of the forgotten without an attack.
        after: What it shows after the attack that shows most of it.
        low: Lower end of the 95 % CI of ``after``; None with one seed.
        floor: ``after`` of the second Retrain.
        equal: Whether it keeps as much as Retrain, but for :data:`EQUAL` points.
        distance: To Retrain, by which its table is ordered; None where it has none.
    """

    suite: str
    row: str
    before: float
    after: float
    low: float | None
    attack: str
    floor: float
    equal: bool
    distance: float | None

    @property
    def beyond(self) -> float:
        """Points beyond the second Retrain."""
        return self.after - self.floor

    @property
    def shown(self) -> str:
        """The points as a cell."""
        return f"{round(self.beyond)}" if self.equal else f"({round(self.beyond)})"


def attacked(boards: Boards) -> list[Attacked]:
    """Every method of every table that has a second Retrain and was attacked in several ways.

    The worst of one attack is no maximum, and says less.
    """
    found: list[Attacked] = []
    for suite, board in boards.items():
        with reading(f"{suite}: {BOARD} cannot be read"):
            found += _of_board(suite, board)
    return found


def _of_board(suite: str, board: Mapping[str, Any]) -> Iterator[Attacked]:
    lines = {line["label"]: line for line in board.get("after_attack") or ()}
    if FLOOR not in lines or lines[FLOOR].get("attacks", SEVERAL) < SEVERAL:
        return
    distances = {row["row"]: [*row["ag_per_seed"].values()] for row in board["rows"]}
    for label, line in lines.items():
        if not line["reference"]:
            own, after = distances.get(label), line["after"]
            yield Attacked(
                suite=suite,
                row=label,
                before=line["before"],
                after=after["mean"],
                low=after["low"],
                attack=line["attack"],
                floor=lines[FLOOR]["after"]["mean"],
                equal=line["equal_utility"],
                distance=fmean(own) if own else None,
            )


def sections(found: Sequence[Attacked]) -> list[Section]:
    """The rows by table, and what each table adds up to."""
    return [
        Section(TITLE, depth=1),
        Section(text=(READ,), content=_rows(found)),
        Section("By table", (tally(found),), content=_tables(found)),
    ]


def tally(found: Sequence[Attacked]) -> str:
    """How many rows hide, as a sentence."""
    equal = [own for own in found if own.equal]
    alike = [own for own in equal if own.before <= EQUAL]
    return (
        f"{len(equal)} rows of {len({o.suite for o in found})} tables lose at most {EQUAL:g} "
        f"points of what is to be kept. {len(alike)} of them look forgotten before an attack: they "
        f"show at most {EQUAL:g} points more of the forgotten than Retrain. Of these {len(alike)}, "
        f"{len(hiding(alike))} have their 95 % CI after the worst attack above the second "
        f"Retrain's mean, and {len(below(alike))} lie at it or below; of all {len(equal)}, "
        f"{len(hiding(equal))} and {len(below(equal))}. Rows of one table share their Retrains."
    )


def hiding(rows: Sequence[Attacked]) -> list[Attacked]:
    """Those whose interval after the worst attack is above the second Retrain's mean."""
    return [own for own in rows if own.low is not None and own.low > own.floor]


def below(rows: Sequence[Attacked]) -> list[Attacked]:
    """Those that show no more than the second Retrain after the worst attack."""
    return [own for own in rows if own.beyond <= 0]


def _by_row(found: Sequence[Attacked]) -> dict[str, dict[str, Attacked]]:
    """Row -> table -> it: the rows of most tables first, then by the median."""
    rows: dict[str, dict[str, Attacked]] = {}
    for own in found:
        rows.setdefault(own.row, {})[own.suite] = own
    return dict(sorted(rows.items(), key=lambda item: (-len(item[1]), _middle(item[1]))))


def _middle(of: Mapping[str, Attacked]) -> float:
    return median(own.beyond for own in of.values())


def _rows(found: Sequence[Attacked]) -> Table:
    suites = list(dict.fromkeys(own.suite for own in found))
    middle = Column("median", doc="is over the row's tables, and orders rows of as many tables")
    heads: list[str | Column] = ["method", middle, *(Column(name) for name in suites)]
    lines = [
        [row, f"{round(_middle(of))}", *(_cell(of.get(suite)) for suite in suites)]
        for row, of in _by_row(found).items()
    ]
    return table(heads, lines)


def _cell(own: Attacked | None) -> str:
    return "" if own is None else f"{own.shown} {own.attack}"


def _tables(found: Sequence[Attacked]) -> Table:
    heads: list[str | Column] = [
        "suite",
        Column("rows", doc="counts its methods"),
        Column("second Retrain", doc="is what a second Retrain shows after its worst attack"),
        Column("at or below", doc="counts the rows that show no more than that"),
        Column("least", "label", "is the row of equal utility that shows least"),
        Column(
            "rho",
            doc="is Spearman's correlation of the distance to Retrain with what is shown after "
            "the worst attack, over the rows of equal utility; at 1 an attack changes no place",
        ),
    ]
    lines = []
    for suite in dict.fromkeys(own.suite for own in found):
        own = [each for each in found if each.suite == suite]
        least = min((e for e in own if e.equal), key=lambda e: e.beyond, default=None)
        lines.append(
            [
                suite,
                str(len(own)),
                f"{own[0].floor:.1f}",
                str(sum(each.beyond <= 0 for each in own)),
                MISSING if least is None else f"{least.row} {least.beyond:+.1f}",
                number(correlation(own), 2),
            ]
        )
    return table(heads, lines)


def correlation(found: Sequence[Attacked]) -> float | None:
    """Spearman's of distance and after; None for fewer than three rows or where all are equal."""
    from scipy.stats import spearmanr

    own = [e for e in found if e.equal]
    pairs = [(round(e.distance, 2), round(e.after, 2)) for e in own if e.distance is not None]
    if len(pairs) < 3 or any(len({*side}) == 1 for side in zip(*pairs, strict=True)):
        return None
    return float(spearmanr(pairs).statistic)


def picture(found: Sequence[Attacked]) -> Picture:
    """Rows of three tables or more, by table."""
    cells = {
        row: {
            suite: heat.Cell(
                own.beyond,
                own.shown,
                f"{row} in {suite}: {own.before:.1f} points above Retrain before, {own.after:.1f} "
                f"after {own.attack}; a second Retrain {own.floor:.1f}",
            )
            for suite, own in of.items()
        }
        for row, of in _by_row(found).items()
    }
    suites = {own.suite: f"a second Retrain shows {own.floor:.1f}" for own in found}
    title = "Shown of the forgotten after the worst attack: points beyond a second Retrain"
    subtitle = f"means over seeds; in brackets: more than {EQUAL:g} points of utility lost"
    return heat.picture(cells, suites, LIMITS, title=title, subtitle=subtitle)


def to_csv(found: Sequence[Attacked]) -> str:
    """One line per row and table."""
    return csv_text([{**asdict(own), "beyond": own.beyond} for own in found])
