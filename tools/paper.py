"""The paper's printed numbers against themselves: ``python -m tools.paper`` prints what differs.

Each rule recomputes a printed number from others, or says which values it could have at all.  Only
what does not follow is a finding.  ``benchmarks/results/paper/findings.csv`` is this output, which
``unlearn verify paper`` shows.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache

from scipy.stats import ks_2samp

from stable_forgetting.benchmarks.costs.bounded import layer_costs
from stable_forgetting.benchmarks.paper.report import HEADS
from stable_forgetting.benchmarks.report.files import csv_text
from stable_forgetting.benchmarks.suite.goals import (
    TOLERANCE,
    Printed,
    read_printed,
    read_tables,
    recomputed_gap,
)

GRIDS = {"forget01": ((40, 300), (40, 40)), "forget05": ((200, 300), (200, 200))}
"""Truth ratios that forget quality compares: LoKU's code takes 300 rows of the model retrained
without forget10 for every split, TOFU's as many as the split has."""
FORGET10 = ((300, 300), (400, 400))
MODELS = {
    "Phi-1.5B": "phi-1.5",
    "GPT-Neo-125M": "gpt-neo-125m",
    "GPT-Neo-1.3B": "gpt-neo-1.3b",
    "GPT-Neo-2.7B": "gpt-neo-2.7b",
    "ViT-S": "vit-s",
    "ViT": "vit-b",
}
RANKS = {"TOFU": 4, "TDEC": 16, "CIFAR-10": 8, "CIFAR-100": 8}
"""Rank of the adapters whose share is printed: the paper's text; TDEC's is LoKU's, inferred."""
BEST = {
    ("tab:tdec_evaluation", "EL10"): min,
    ("tab:tdec_evaluation", "MA"): min,
    ("tab:tofu_", "forget_quality"): max,
}
"""Tables and metrics of which the text says that GD+Sine is the best."""
OURS = "GD+Sine"
UNCHANGED = ("Original", "Retain90", "Retrain", "Before", "Before Unlearning")
REPEATED = ("tab:tofu_llama2_rank", "tab:tofu_phi_rank")


Finding = dict[str, str]
"""Cells of one line: see :data:`benchmarks.paper.report.HEADS`."""


def findings() -> list[Finding]:
    """Every printed number that does not follow."""
    values = read_printed()
    rules: Sequence[Callable[[Sequence[Printed]], Iterator[Finding]]] = (
        _average_gaps,
        _forget_qualities,
        _retrained_against_itself,
        _utilities,
        _shares,
        _claims,
        _same_at_every_rank,
        _one_run_one_value,
    )
    return [finding for rule in rules for finding in rule(values)]


def _finding(value: Printed, recomputed: str, rule: str) -> Finding:
    return _line(value.table, value.method, value.metric, value.text, recomputed, rule)


def _line(*cells: str) -> Finding:
    return dict(zip(HEADS, cells, strict=True))


def _average_gaps(values: Sequence[Printed]) -> Iterator[Finding]:
    """AG is the mean absolute gap to the table's own Retrain."""
    for label, rows in read_tables().items():
        reference = next((row for row in rows if row.method == "Retrain"), None)
        for row in rows:
            if reference is None:
                break
            gap, printed = recomputed_gap(row, reference), row.values.get("AG")
            if gap is not None and printed is not None and abs(gap - printed[0]) > TOLERANCE:
                rule = "AG is the mean absolute gap to the table's Retrain over its four columns"
                yield _line(label, row.method, "AG", f"{printed[0]:g}", f"{gap:.2f}", rule)


def _forget_qualities(values: Sequence[Printed]) -> Iterator[Finding]:
    """A single run's forget quality is a p-value of the two-sample KS test: one of a few."""
    for value in values:
        if value.metric != "forget_quality" or value.std or not value.table.startswith("tab:"):
            continue
        grids = GRIDS.get(value.split, FORGET10)
        nearest = min(
            (nearest_on_grid(value.number, sizes) for sizes in grids),
            key=lambda p: abs(math.log(p / value.number)),
        )
        if abs(nearest - value.number) > 1.01 * value.half_unit:
            pairs = " or ".join(f"{n}:{m}" for n, m in grids)
            rule = f"forget quality is a KS p-value of {pairs} truth ratios; nearest"
            yield _finding(value, f"{nearest:.2e}", rule)


def nearest_on_grid(target: float, sizes: tuple[int, int]) -> float:
    """The possible p-value that is nearest to a positive one, in its logarithm."""
    n, m = sizes
    whole = math.lcm(n, m)
    place = bisect_left(range(1, whole + 1), -target, key=lambda k: -exact_p(k, n, m)) + 1
    near = [exact_p(k, n, m) for k in (place - 1, place) if 1 <= k <= whole]
    return min(near, key=lambda p: abs(math.log(p / target)))


@cache
def exact_p(steps: int, n: int, m: int) -> float:
    """scipy's exact p-value of the two-sample KS test at D = steps / lcm(n, m).

    It is asked of two samples that are so far apart: b of the one come first, then a of the other,
    then the rest of both in turn.  Next to 1 scipy gives the asymptotic value, and warns.
    """
    whole = math.lcm(n, m)
    right, up = whole // n, whole // m
    a = next(k for k in range(n + 1) if k * right >= steps and (k * right - steps) % up == 0)
    b = (a * right - steps) // up
    first, second = [*range(b, b + a)], [*range(b)]
    for place in range(a + b, n + m):
        of_first, of_second = len(first), len(second)
        ahead = abs((of_first + 1) * right - of_second * up)
        behind = abs(of_first * right - (of_second + 1) * up)
        into_first = of_second == m or (of_first < n and ahead <= behind)
        (first if into_first else second).append(place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return float(ks_2samp(first, second, method="exact").pvalue)


def _retrained_against_itself(values: Sequence[Printed]) -> Iterator[Finding]:
    for value in values:
        retrained = value.method.lower().startswith("retain9")
        if retrained and value.metric == "forget_quality" and value.number < 1:
            yield _finding(value, "1", "the retrained model is compared with itself")


def _utilities(values: Sequence[Printed]) -> Iterator[Finding]:
    """Six of model utility's nine terms are printed; the others are at most 1."""
    rows: dict[tuple[str, str], dict[str, Printed]] = defaultdict(dict)
    for value in values:
        rows[value.table, value.method][value.metric] = value
    names = [
        f"{part}_{rate}"
        for part in ("retain", "real_authors", "world_facts")
        for rate in ("rougeL", "truth_ratio")
    ]
    for row in rows.values():
        utility = row.get("model_utility")
        if utility is None or not all(name in row for name in names):
            continue
        terms = [row[name].number + row[name].half_unit for name in names]
        bound = 9 / (sum(1 / term for term in terms) + 3) if min(terms) > 0 else 0.0
        if utility.number - utility.half_unit > bound:
            rule = "model utility is the harmonic mean of nine terms, six printed, all at most 1"
            yield _finding(utility, f"at most {bound:.3f}", rule)


def _shares(values: Sequence[Printed]) -> Iterator[Finding]:
    """Parameters of adapters, counted."""
    counted: dict[tuple[str, int], dict[str, float]] = {}
    for value in values:
        model, rank = MODELS.get(value.model), RANKS.get(value.dataset)
        whole = value.metric != "params_percent" or value.number == 100
        if whole or model is None or rank is None:
            continue
        if (model, rank) not in counted:
            costs = {
                place: layer_costs(model, rank=rank, placement=place)
                for place in ("mlp", "attention", "all")
            }
            half = costs["mlp"].trained + costs["attention"].trained // 2
            counted[model, rank] = {
                "mlp": costs["mlp"].percent_of_all,
                "all": costs["all"].percent_of_all,
                "mlp, q and v": 100 * half / (costs["mlp"].base + half),
            }
        shares = counted[model, rank]
        if value.method == OURS:  # on MLPs, says the text
            shares = {"mlp": shares["mlp"]}
        if not any(abs(share - value.number) <= value.half_unit for share in shares.values()):
            words = " or ".join(f"{share:.3f} on {place}" for place, share in shares.items())
            yield _finding(value, words, f"adapters of rank {rank}, counted, percent")


def _claims(values: Sequence[Printed]) -> Iterator[Finding]:
    """Where the text says that a row is the best of its table."""
    columns: dict[tuple[str, str], list[Printed]] = defaultdict(list)
    for value in values:
        if value.method not in UNCHANGED:
            columns[value.table, value.metric].append(value)
    for (label, metric), cells in columns.items():
        best = next((f for (t, m), f in BEST.items() if label.startswith(t) and m == metric), None)
        ours = next((cell for cell in cells if cell.method == OURS), None)
        if best is None or ours is None:
            continue
        winner = best(cells, key=lambda cell: cell.number)
        if winner.number != ours.number:
            words = f"{winner.text} ({winner.method})"
            yield _finding(ours, words, f"the text: {OURS} is the best of the table")


def _same_at_every_rank(values: Sequence[Printed]) -> Iterator[Finding]:
    """LoKU's code trains adapters of the rank for every method, so its rows move with the rank."""
    rows: dict[tuple[str, str, str], dict[str, tuple[str, ...]]] = defaultdict(dict)
    cells: dict[tuple[str, str], list[str]] = defaultdict(list)
    for value in values:
        if value.table.startswith(REPEATED) and value.method not in UNCHANGED:
            cells[value.table, value.method].append(value.text)
    for (label, method), texts in cells.items():
        name, _, split = label.partition("/")
        family, _, rank = name.rpartition("_rank")
        rows[family, split, method][rank] = tuple(texts)
    for (family, split, method), ranks in rows.items():
        groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for rank, numbers in ranks.items():
            groups[numbers].append(rank)
        for numbers, same in groups.items():
            if len(same) > 1:
                words = f"{len(numbers)} equal numbers at ranks {', '.join(same)}"
                rule = "a row that is trained at each rank moves with the rank"
                yield _line(f"{family}/{split}", method, "all", words, "differ", rule)


def _one_run_one_value(values: Sequence[Printed]) -> Iterator[Finding]:
    """The same model, data, split, rank and method in two tables."""
    same: dict[tuple[str, ...], list[Printed]] = defaultdict(list)
    for value in values:
        rank4 = value.table.endswith("rank4/forget10") or "rank" not in value.table
        if rank4 and value.split in ("", "forget10"):
            run = (value.model, value.dataset, value.split, value.method)
            same[*run, value.metric].append(value)
    for cells in same.values():
        first = cells[0]
        for other in cells[1:]:
            if abs(other.number - first.number) > first.half_unit + other.half_unit:
                rule = f"the same run is printed in {first.table}"
                yield _finding(other, first.text, rule)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    sys.stdout.write(csv_text(findings()))
