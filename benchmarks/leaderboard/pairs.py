"""Pairs of rows in one table: their difference, its correction, and how it reads."""

from __future__ import annotations

from collections.abc import Sequence

from stable_forgetting.benchmarks.leaderboard.board import BoardRow, Comparison, Leaderboard
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.common.measure.gaps import PairedDifference, paired_difference
from stable_forgetting.common.measure.verdict import LEVEL, holm_by_key

NEGLIGIBLE = 0.005
"""Differences of AG that two decimals do not show are none, however small their spread."""


def compare_rows(suite: ResolvedSuite, rows: Sequence[BoardRow]) -> list[Comparison]:
    """The pairs that a suite asks for, paired by seed; p is corrected for them (Holm)."""
    by_label = {row.label: row for row in rows}
    found: dict[tuple[str, str], PairedDifference] = {}
    for first, second in suite.spec.compare:
        if first not in by_label or second not in by_label:
            continue
        a, b = by_label[first].ag_per_seed, by_label[second].ag_per_seed
        seeds = sorted(set(a) & set(b))
        if seeds:
            found[first, second] = paired_difference([a[s] for s in seeds], [b[s] for s in seeds])
    q = holm_by_key({pair: difference.p_value for pair, difference in found.items()})
    return [Comparison(*pair, difference, q.get(pair)) for pair, difference in found.items()]


def comparison_line(board: Leaderboard, comparison: Comparison) -> str:
    """A paired difference in words; p decides once it is corrected for the pairs of the table."""
    summary, q = comparison.difference.summary, comparison.q
    interval, reading = "", "no difference shown"
    target = "its goals" if board.rule.goals else "Retrain"
    if summary.low is not None and summary.high is not None:
        interval = f", 95 % CI [{summary.low:+.2f}, {summary.high:+.2f}]"
    if q is not None and q <= LEVEL:
        closer = comparison.first if summary.mean < 0 else comparison.second
        reading = f"{closer} is closer to {target}"
    if abs(summary.mean) < NEGLIGIBLE:
        reading = "the same to two decimals"
    return (
        f"{board.rule.title} of {comparison.first} − {comparison.second}: {summary.mean:+.2f}"
        f"{interval}{'' if q is None else f', p {q:.2g}'}, n {summary.n}: {reading}."
    )
