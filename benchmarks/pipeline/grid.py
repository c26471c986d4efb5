"""A row's grid -> stages.  A block of configs that share a forward is one stage; torch-free.

Extensions resolve like tuning does: their columns follow from the cells of the columns before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from stable_forgetting.benchmarks.pipeline.cells import best_cell, judge
from stable_forgetting.benchmarks.pipeline.lineage import Lineage
from stable_forgetting.benchmarks.pipeline.stage import Block, Plan, Stage
from stable_forgetting.benchmarks.pipeline.sweeping import GridBlock, GridReader
from stable_forgetting.benchmarks.suite.grid import Grid, GridRow, Point
from stable_forgetting.benchmarks.suite.resolve import ResolvedRow
from stable_forgetting.common.base.config import Strict, canonical
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.bounded.phi import PHIS
from stable_forgetting.common.methods.base import UnlearningMethod
from stable_forgetting.common.methods.simple import GradientDifference

SIDES = ("low", "high")


def runs_together(cls: type[UnlearningMethod], config: Any) -> bool:
    """Whether :mod:`common.train.batched` does exactly what this method with this config does."""
    if not issubclass(cls, GradientDifference):
        return False
    body = ("unlearn", "prepare", "_attach", "loaders")
    own = any(getattr(cls, name) is not getattr(GradientDifference, name) for name in body)
    adapter = config.adapter
    if own or adapter is None or adapter.dropout or adapter.train_head or adapter.trained:
        return False
    if adapter.peft or adapter.polynomial or PHIS[adapter.phi].start == "random":
        return False
    plain = (config.retain_weight, config.optimizer, config.accumulation, config.mixed_precision)
    off = (config.penalty, config.max_grad_norm, config.probe_every, config.stop_below)
    alone = (config.warmup_epochs, config.lr_of)
    return plain == (1.0, "adamw", 1, "no") and not any((*off, *alone))


def next_rate(lr: float, up: bool) -> float:
    """The neighbour on the axis 1, 3, 10, 30, ...; half a decade away where lr is not on it."""
    power = math.floor(math.log10(lr) + 1e-9)
    mantissa = round(lr / 10**power, 6)
    steps = {1.0: (0.3, 3.0), 3.0: (1.0, 10.0)}
    if mantissa in steps:
        return float(f"{steps[mantissa][up] * 10**power:.3g}")
    return float(f"{lr * math.sqrt(10) ** (1 if up else -1):.3g}")


def add_grid(plan: Plan, lineage: Lineage, row: ResolvedRow) -> Strict | None:
    """Adds a row's blocks to a plan, and as many extensions as the cells so far ask for.

    A row waits while its cells decide what else is run.

    Returns:
        The config of the best cell, for the audits; None while cells are missing, where none is
        accepted, or without audits.
    """
    suite, grid = plan.suite, plan.suite.spec.grid
    assert grid is not None
    blocks = _Blocks(lineage, row, grid, GridReader(suite, lineage.store, plan.results))
    decided = [blocks.extended(side) for side in SIDES]
    plan.blocks += blocks.planned
    if all(decided) and all(blocks.reader.cells(block) is not None for block in blocks.planned):
        return blocks.best() if suite.audits else None
    if suite.audits or grid.extend.low or grid.extend.high:
        plan.waiting.append(row.label)
    return None


class _Blocks:
    """The blocks of one row."""

    def __init__(self, lineage: Lineage, row: ResolvedRow, grid: Grid, reader: GridReader):
        assert row.grid is not None
        self.lineage, self.label, self.grid, self.reader = lineage, row.label, grid, reader
        self.row: GridRow = row.grid
        self.planned: list[Block[Stage]] = []
        self._add(self.row.points, extension=False)

    def best(self) -> Strict | None:
        """The config of the best cell, as long as that cell's run."""
        rule, judged = self.reader.rule, []
        for block in self.planned:
            target = self.reader.target(block.seed)
            if target is None:
                return None
            shared = () if block.extension else self.reader.cells(block) or ()
            judged += [(cell, judge(cell, target, rule)) for cell in shared]
        best = best_cell(judged, rule.axes.utility)
        if best is None:
            return None
        config: Strict = self.row.config(best.lr, best.lam)
        return config.model_copy(update={"steps": best.step})

    def extended(self, side: str) -> bool:
        """Adds columns until one has no accepted cell, as far as allowed; whether that is known."""
        for left in reversed(range(getattr(self.grid.extend, side) + 1)):
            edge = self.reader.edge(self.planned, side)
            if edge.lr is None:
                return False
            if edge.fails or not left:
                break
            lr = next_rate(edge.lr, side == "high")
            self._add([(lr, lam) for lam in self.row.lambdas], extension=True)
        return True

    def _add(self, points: Sequence[Point], *, extension: bool) -> None:
        size = self.grid.block
        for seed in self.lineage.suite.spec.seeds:
            for start in range(0, len(points), size):
                chosen = tuple(points[start : start + size])
                rates, stage = tuple(lr for lr, _ in chosen), self._stage(seed, chosen)
                self.planned.append(Block(self.label, seed, rates, extension, stage))

    def _stage(self, seed: int, points: tuple[Point, ...]) -> Stage:
        configs = [self.row.config(lr, lam) for lr, lam in points]
        cls = METHODS[self.row.method]
        plain = [config.model_copy(update={"lr": 1.0, "forget_weight": 1.0}) for config in configs]
        alike = all(config == plain[0] for config in plain)  # but for rate and weight
        together = runs_together(cls, configs[0]) and alike
        params = [canonical(config) for config in configs]
        axes = self.lineage.benchmark.sweep_axes
        assert axes is not None
        identity = {
            **self.lineage.identity("score"),
            **({} if axes.unmeasured else {"measure": self.lineage.identity("measure")}),
            "map_version": GridBlock.version,
            "method": self.row.method,
            "method_version": cls.info.version,
            "points": [config.identity() for config in configs],
            "steps": self.row.steps,
            "seed": seed,
        }
        first, last = points[0][0], points[-1][0]
        name = f"{self.label}/seed-{seed}/lr-{first:g}" + (f"..{last:g}" if last != first else "")
        return self.lineage.stage(
            "map",
            name,
            identity,
            {"split": self.lineage.split(seed), "start": self.lineage.original(seed)},
            seed=seed,
            method=self.row.method,
            points=points,
            params=params,
            steps=self.row.steps,
            together=together,
        )
