"""Cells -> shares, bands, edges, comparisons.  Pure: nothing here is stored as truth.

The seed is the unit: the cells of one sweep share data, start and batches, so their number says
nothing about certainty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from stable_forgetting.benchmarks.pipeline.cells import (
    DAMAGE,
    UNDER,
    BestCell,
    Cell,
    Edge,
    Judged,
    Target,
    best_cell,
    grouped,
    judge,
    values_of,
)
from stable_forgetting.benchmarks.suite.grid import Acceptance
from stable_forgetting.common.measure.gaps import Summary, summarise


def share(judged: Iterable[tuple[Cell, str]]) -> float:
    """Accepted cells in percent; 0 of none."""
    marks = [mark for _, mark in judged]
    return 100.0 * sum(not mark for mark in marks) / len(marks) if marks else 0.0


def band(judged: Judged) -> float:
    """Longest run of accepted neighbours on the lr axis in decades, averaged over lambda and step.

    One accepted column alone spans 0 decades.  Takes the cells of one row and seed.
    """
    lines = grouped(judged, lambda cell: (cell.lam, cell.step))
    spans = [_longest(sorted((cell.lr, not mark) for cell, mark in line)) for _, line in lines]
    return math.fsum(spans) / len(spans) if spans else 0.0


def _longest(line: Sequence[tuple[float, bool]]) -> float:
    best, start = 0.0, None
    for lr, accepted in line:
        if not accepted:
            start = None
            continue
        start = lr if start is None else start
        best = max(best, math.log10(lr / start))
    return best


@dataclass(frozen=True)
class Square:
    """One square of a panel: a setting of lr and lambda, over seeds and steps."""

    lr: float
    lam: float
    share: float
    letters: str
    retained_drop: float | None
    extension: bool


@dataclass(frozen=True)
class SweepLine:
    """What a sweep says of one row; per-seed values are in the order of ``seeds``.

    Attributes:
        seeds: Seeds with every cell of the shared grid.
        accepted: Accepted percent per seed; with half and double the rule's tolerances next.
        band: Decades per seed, extensions included.
        widest: Decades between the outermost columns: what ``band`` cannot exceed.
        worst_retained: Per seed, over the cells that did not diverge; None if all did.
        diverged: Cells of the shared grid that diverged, over all seeds.
        best: None where no cell is accepted.
        by_lr: lr -> accepted percent over seeds, lambdas and steps; likewise the next two.
        highest: Further metric -> its highest value over the cells that did not diverge.
    """

    label: str
    seeds: tuple[int, ...]
    accepted: tuple[float, ...]
    strict: tuple[float, ...]
    loose: tuple[float, ...]
    band: tuple[float, ...]
    widest: float
    worst_retained: tuple[float | None, ...]
    median_retained: tuple[float | None, ...]
    diverged: int
    best: BestCell | None
    edges: Mapping[str, Edge]
    by_lr: Mapping[float, float]
    by_lam: Mapping[float, float]
    by_step: Mapping[int, float]
    squares: tuple[Square, ...]
    highest: Mapping[str, float | None]


def derive_line(
    label: str,
    cells: Sequence[Cell],
    targets: Mapping[int, Target],
    rule: Acceptance,
    edges: Mapping[str, Edge],
    further: Sequence[str] = (),
) -> SweepLine:
    """Everything about one row, from all its cells; every seed has the same settings.

    ``further`` names metrics of a cell of which only the highest value is kept.
    """
    judged = [(cell, judge(cell, targets[cell.seed], rule)) for cell in cells]
    shared = [(cell, mark) for cell, mark in judged if not cell.extension]
    seeds = tuple(sorted({cell.seed for cell, _ in shared}))
    lrs = [cell.lr for cell in cells]
    retained = [
        values_of((cell for cell, _ in shared if cell.seed == seed), rule.axes.retained)
        for seed in seeds
    ]
    return SweepLine(
        label=label,
        seeds=seeds,
        accepted=_shares(cells, targets, rule, seeds),
        strict=_shares(cells, targets, rule.scaled(0.5), seeds),
        loose=_shares(cells, targets, rule.scaled(2.0), seeds),
        band=tuple(band([j for j in judged if j[0].seed == seed]) for seed in seeds),
        widest=math.log10(max(lrs) / min(lrs)),
        worst_retained=tuple(min(values) if values else None for values in retained),
        median_retained=tuple(median(values) if values else None for values in retained),
        diverged=sum(cell.nonfinite for cell, _ in shared),
        best=best_cell(shared, rule.axes.utility),
        edges=edges,
        by_lr=_shares_by(judged, lambda cell: cell.lr),
        by_lam=_shares_by(shared, lambda cell: cell.lam),
        by_step={int(k): v for k, v in _shares_by(shared, lambda cell: cell.step).items()},
        squares=_squares(judged, targets, rule.axes.retained),
        highest={
            name: max(values_of((cell for cell, _ in shared), name), default=None)
            for name in further
        },
    )


def _shares(
    cells: Sequence[Cell], targets: Mapping[int, Target], rule: Acceptance, seeds: Sequence[int]
) -> tuple[float, ...]:
    return tuple(
        share(
            (cell, judge(cell, targets[seed], rule))
            for cell in cells
            if cell.seed == seed and not cell.extension
        )
        for seed in seeds
    )


def _shares_by(judged: Judged, key: Callable[[Cell], float]) -> dict[float, float]:
    return {value: share(group) for value, group in grouped(judged, key)}


def _squares(judged: Judged, targets: Mapping[int, Target], retained: str) -> tuple[Square, ...]:
    squares = []
    for place, group in grouped(judged, lambda cell: (cell.lr, cell.lam)):
        drops = [
            targets[cell.seed][retained] - value
            for cell, _ in group
            if (value := cell.metrics[retained]) is not None
        ]
        drop = math.fsum(drops) / len(drops) if drops else None
        extension = group[0][0].extension
        squares.append(Square(*place, share(group), letters(group), drop, extension))
    return tuple(squares)


def letters(group: Judged) -> str:
    """U and D where at least half of a square's failed cells fail so; "" if half pass or more."""
    failed = [mark for _, mark in group if mark]
    if 2 * len(failed) <= len(group):
        return ""
    return "".join(
        letter
        for letter in (UNDER, DAMAGE)
        if 2 * sum(letter in mark for mark in failed) >= len(failed)
    )


@dataclass(frozen=True)
class Ceiling:
    """Whether a second Retrain passes the rule against the first, per seed."""

    seeds: tuple[int, ...]
    accepted: tuple[bool, ...]
    strict: tuple[bool, ...]
    loose: tuple[bool, ...]


def derive_ceiling(
    first: Mapping[int, Target], second: Mapping[int, Target], rule: Acceptance
) -> Ceiling:
    """The rule's own noise: if a second Retrain fails it, so may a perfect method."""
    seeds = tuple(sorted(set(first) & set(second)))

    def passes(scale: float) -> tuple[bool, ...]:
        made = [Cell("", s, extension=False, lr=1, lam=1, step=0, metrics=second[s]) for s in seeds]
        return tuple(not judge(cell, first[cell.seed], rule.scaled(scale)) for cell in made)

    return Ceiling(seeds, passes(1.0), passes(0.5), passes(2.0))


@dataclass(frozen=True)
class SweepComparison:
    """Accepted percent of one row minus that of another, seed by seed.

    Attributes:
        differences: In points, for the seeds that both have.
        p_value: Two-sided exact sign test; ties count for neither side.
    """

    first: str
    second: str
    differences: tuple[float, ...]
    summary: Summary
    p_value: float


def compare_lines(first: SweepLine, second: SweepLine) -> SweepComparison | None:
    """The paired difference of two rows; None where they share no seed."""
    theirs = dict(zip(second.seeds, second.accepted, strict=True))
    pairs = zip(first.seeds, first.accepted, strict=True)
    differences = tuple(value - theirs[seed] for seed, value in pairs if seed in theirs)
    if not differences:
        return None
    p = sign_test(sum(d > 0 for d in differences), sum(d < 0 for d in differences))
    return SweepComparison(first.label, second.label, differences, summarise(differences), p)


def sign_test(positive: int, negative: int) -> float:
    """Two-sided exact p that signs are a fair coin's; 1 without any.

    Three seeds cannot give less than 0.25, five not less than 0.0625.
    """
    n = positive + negative
    tail = sum(math.comb(n, k) for k in range(min(positive, negative) + 1)) / 2**n
    return min(1.0, 2 * tail)
