"""Which metrics may rank?  Each metric of a benchmark, measured on models whose knowledge is known.

``python -m tools.cards STORE SUITE SEEDS METHOD`` reads a store in which the suite was run with
these seeds (``unlearn run SUITE --seeds SEEDS --only METHOD``) and two Retrains.  It writes
``benchmarks/results/cards/SUITE.csv``, and ``CARDS.md`` from all such files.

*Faithful*: the area under the ROC curve between Originals, which know the forget set, and
Retrains, which never saw it (0.5 to 1; the side is chosen, so noise lies above 0.5).  *Rounded*:
Q = 1 - |after - before| / (|after| + |before|) of the unlearned model under NF4.  *Relearnt*:
R = 1 - |u - r| / (|u| + |r|), where u and r are what training on the forget set changes in the
unlearned model and in Retrain.  1 is ideal for both; both are of means over seeds.
Sources: the pools of 30 models, Dorna et al. 2025 (arXiv 2506.12618); the symmetric Q and R,
arXiv 2605.24614.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from stable_forgetting.benchmarks.pipeline.measuring import read_scores, read_split
from stable_forgetting.benchmarks.pipeline.models import benchmark_of, stored_model
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.pipeline.stage import Stage
from stable_forgetting.benchmarks.report import markdown
from stable_forgetting.benchmarks.report.cells import number
from stable_forgetting.benchmarks.report.files import csv_text
from stable_forgetting.benchmarks.report.section import Column, Section, table
from stable_forgetting.benchmarks.report.shipped import RESULTS
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite, load_suite
from stable_forgetting.common import data, objectives
from stable_forgetting.common.audits.weights import change_matrices_, normal_float
from stable_forgetting.common.base.errors import UserError
from stable_forgetting.common.base.files import write_text
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.base.seeding import generator
from stable_forgetting.common.data.splits import ForgetSplit
from stable_forgetting.common.protocol.benchmark import Benchmark, Runtime
from stable_forgetting.common.store.stages import StageStore
from stable_forgetting.common.train.fit import fit

FOLDER = RESULTS / "cards"
CHANGED = 10
"""Seeds whose models are rounded and relearnt."""
STEPS, SAMPLES, SLOWER = 10, 16, 3
"""Of relearning: steps, samples a step, and by how much its rate is below that of Original."""
FAITHFUL, ROBUST = 0.9, 0.5
"""Set before a table was seen: least lower end of the area's CI, and least Q and R, of a metric
that may rank."""
RESAMPLES = 2000
Values = Mapping[str, float | None]


@dataclass(frozen=True)
class Card:
    """One metric of one suite.

    Attributes:
        area: Between Originals and Retrains; with the ends of its 95 % bootstrap interval.
        rounded: Q.
        relearnt: R; None where relearning moves the metric in neither model, which shows nothing.
    """

    suite: str
    method: str
    metric: str
    seeds: int
    area: float
    low: float
    high: float
    rounded: float
    relearnt: float | None

    @property
    def ranks(self) -> bool:
        """Whether it may rank by the rule above."""
        relearnt = self.relearnt is not None and self.relearnt >= ROBUST
        return self.low >= FAITHFUL and self.rounded >= ROBUST and relearnt


def area(known: np.ndarray, unknown: np.ndarray) -> float:
    """AUC of two samples of values (n,) and (m,), ties half; of the side on which it is larger."""
    above = np.sign(known[:, None] - unknown[None, :])
    return 0.5 + abs(float(above.mean())) / 2


def area_interval(known: np.ndarray, unknown: np.ndarray) -> tuple[float, float]:
    """95 % percentile bootstrap, each pool drawn again; the side is that of the whole sample."""
    side = np.sign(np.sign(known[:, None] - unknown[None, :]).mean()) or 1.0
    stream = np.random.default_rng(0)
    values = []
    for _ in range(RESAMPLES):
        one, other = (stream.choice(pool, len(pool)) for pool in (known, unknown))
        values.append(0.5 + side * float(np.sign(one[:, None] - other[None, :]).mean()) / 2)
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def alike(one: float, other: float) -> float:
    """1 - |one - other| / (|one| + |other|), from 0 to 1; 1 where both are 0."""
    size = abs(one) + abs(other)
    return 1.0 - abs(one - other) / size if size else 1.0


class Measured:
    """The metrics of a suite's models, stored or changed."""

    def __init__(self, suite: ResolvedSuite, store: StageStore):
        self.suite, self.store = suite, store
        self.stages: dict[tuple[str, int, int], Stage] = {
            (result.label, result.seed, result.replicate): result.stage
            for result in make_plan(suite, store).results
            if result.trial is None
        }
        methods = [row.label for row in suite.rows if row.label not in ("original", "retrain")]
        assert len(methods) == 1, "give one method with --set or --only"
        self.method = methods[0]

    def benchmark(self, stage: Stage) -> Benchmark:
        """What evaluates a stage's model."""
        return benchmark_of(stage, Runtime(self.store.root, None, "cpu", 1))

    def split(self, seed: int) -> ForgetSplit:
        """The index sets of a seed."""
        split = read_split(self.store, self.stages["retrain", seed, 0].parents["split"])
        assert split is not None, f"seed {seed} was not run"
        return split

    def stored(self, label: str, seed: int) -> dict[str, float | None]:
        """Metrics of a model of the suite, beside the second Retrain of its seed."""
        return self._values(read_scores(self.store, self.stages[label, seed, 0]), seed)

    def changed(self, label: str, seed: int, how: str) -> dict[str, float | None]:
        """The same of a model that was rounded or relearnt."""
        stage = self.stages[label, seed, 0]
        benchmark = self.benchmark(stage)
        model = stored_model(stage.parents["model"], self.store, benchmark)
        if how == "rounded":
            change_matrices_(model, normal_float)
        else:
            model = relearn(model, benchmark, self.split(seed), seed)
        parts = benchmark.parts(self.split(seed), trial=False, seed=seed)
        return self._values(benchmark.score(model.eval(), parts), seed)

    def _values(self, scores: Mapping[str, Any], seed: int) -> dict[str, float | None]:
        stage = self.stages["retrain", seed, 1]
        benchmark = self.benchmark(stage)
        values = benchmark.evaluate(scores, trial=False, seed=seed)
        target = read_scores(self.store, stage)
        config = self.suite.protocol
        return values | BENCHMARKS[self.suite.spec.benchmark].compare(config, scores, target)


def relearn(model: nn.Module, benchmark: Benchmark, split: ForgetSplit, seed: int) -> nn.Module:
    """The model after a few steps on the forget set."""
    order = generator(seed, "cards", "relearn")
    loader = data.Loader(benchmark.source, split.parts["forget"], SAMPLES, order, augment=False)
    recipe = benchmark.recipe.briefly(STEPS, SAMPLES, benchmark.recipe.lr / SLOWER)
    task = objectives.CrossEntropy("forget")
    fit(model, task, {"forget": loader}, recipe, forward=benchmark.forward, seed=seed)
    return model


def cards(suite: ResolvedSuite, store: StageStore) -> Iterator[Card]:
    """One per metric that is known for every model."""
    models, seeds = Measured(suite, store), suite.spec.seeds
    pools = {label: [models.stored(label, s) for s in seeds] for label in ("original", "retrain")}
    few = seeds[:CHANGED]
    before = {label: [models.stored(label, s) for s in few] for label in (models.method, "retrain")}
    rounded = [models.changed(models.method, seed, "rounded") for seed in few]
    after = {
        label: [models.changed(label, seed, "relearnt") for seed in few]
        for label in (models.method, "retrain")
    }
    for metric in pools["retrain"][0]:
        known, unknown = (column(pools[label], metric) for label in ("original", "retrain"))
        if known is None or unknown is None:
            continue
        low, high = area_interval(known, unknown)
        moved = [mean(after[x], metric) - mean(before[x], metric) for x in after]
        yield Card(
            suite=suite.spec.suite.partition("+")[0],
            method=models.method,
            metric=metric,
            seeds=len(seeds),
            area=area(known, unknown),
            low=low,
            high=high,
            rounded=alike(mean(before[models.method], metric), mean(rounded, metric)),
            relearnt=alike(*moved) if any(moved) else None,
        )


def column(rows: Sequence[Values], metric: str) -> np.ndarray | None:
    """(n,) values of a metric; None where a model has none."""
    values = [row.get(metric) for row in rows]
    return None if None in values else np.array(values, dtype=float)


def mean(rows: Sequence[Values], metric: str) -> float:
    """Of a metric, NaN where a model has none."""
    values = column(rows, metric)
    return float("nan") if values is None else float(values.mean())


ABOUT = (
    "A metric may rank where the lower end of the area's 95 % CI is at least "
    f"{FAITHFUL:g}, and Q and R are at least {ROBUST:g}. These limits were set before a table was "
    "seen. Two things were changed after the first: relearning at a tenth of Original's rate moved "
    f"no accuracy, so it is {STEPS} steps of {SAMPLES} samples at a third; and a metric that moves "
    "in neither model, whose R is not known, may not rank. "
    f"Q and R are of {CHANGED} seeds and one method at one setting, so they say less than the area."
)
HEADS: tuple[str | Column, ...] = (
    "metric",
    Column("area", doc="is the area under the ROC curve between Originals and Retrains"),
    Column("95 % CI"),
    Column("Q", doc="says how alike the metric is before and after rounding to NF4"),
    Column("R", doc="says how alike relearning moves the unlearned model and Retrain"),
    Column("may rank", "label"),
)


def page(found: Sequence[Card]) -> str:
    """CARDS.md."""
    sections = [Section("Which metrics may rank?", (ABOUT,), depth=1)]
    for suite in dict.fromkeys(card.suite for card in found):
        own = sorted((c for c in found if c.suite == suite), key=lambda c: (not c.ranks, -c.area))
        text = f"{own[0].seeds} seeds; method {own[0].method}."
        rows = [
            [
                card.metric,
                f"{card.area:.2f}",
                f"[{card.low:.2f}, {card.high:.2f}]",
                *(number(value, 2) for value in (card.rounded, card.relearnt)),
                "yes" if card.ranks else "",
            ]
            for card in own
        ]
        sections.append(Section(suite, (text,), table([*HEADS], rows)))
    return markdown.write(sections)


def stored_cards() -> list[Card]:
    """Those of every file in the folder."""
    found = []
    for file in sorted(FOLDER.glob("*.csv")):
        for line in csv.DictReader(file.read_text("utf-8").splitlines()):
            numbers = {k: float(v) if v else None for k, v in line.items() if k in NUMBERS}
            kept = {k: line[k] for k in ("suite", "method", "metric")}
            found.append(Card(**kept, seeds=int(line["seeds"]), **numbers))  # type: ignore[arg-type]
    return found


def whole_numbers(text: str) -> list[int]:
    """``1,2,3``."""
    return [int(number) for number in text.split(",")]


NUMBERS = ("area", "low", "high", "rounded", "relearnt")


def main(store: Path, name: str, seeds: Sequence[int], method: str) -> None:
    """Measures a suite's metrics and writes both files."""
    suite = load_suite(name, seeds=seeds, only=[method])
    found = [*cards(suite, StageStore(store))]
    lines = [
        {k: round(v, 6) if isinstance(v, float) else v for k, v in asdict(card).items()}
        for card in found
    ]
    write_text(FOLDER / f"{found[0].suite}.csv", csv_text(lines))
    write_text(FOLDER / "CARDS.md", page(stored_cards()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.cards", description=__doc__)
    parser.add_argument("store", type=Path, help="where the suite was run")
    parser.add_argument("suite", help="its name, or its YAML file")
    parser.add_argument("seeds", type=whole_numbers, help="comma-separated")
    parser.add_argument("method", help="the row whose models are rounded and relearnt")
    given = parser.parse_args()
    try:
        main(given.store, given.suite, given.seeds, given.method)
    except UserError as error:
        parser.error(str(error))
