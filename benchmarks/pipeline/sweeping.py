"""The ``map`` stage: a block of configs that one row of a grid runs on one seed."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stable_forgetting.benchmarks.pipeline.cells import Cell, Edge, Target, judge
from stable_forgetting.benchmarks.pipeline.kinds import StageKind
from stable_forgetting.benchmarks.pipeline.measuring import read_record, read_stored
from stable_forgetting.benchmarks.pipeline.stage import Block, Result, StageSpec
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.store.stages import StageStore

if TYPE_CHECKING:
    from stable_forgetting.benchmarks.pipeline.context import StageContext

CELLS = "cells.jsonl"


class GridSpec(StageSpec):
    """Which cells.

    Attributes:
        points: (lr, lambda) of every run.
        params: The method's config at each point, as plain values.
        steps: When a run is read out.
        together: Whether the configs may share a forward pass.
    """

    method: str
    points: tuple[tuple[float, float], ...]
    params: tuple[dict[str, Any], ...]
    steps: tuple[int, ...]
    together: bool


class GridBlock(StageKind[GridSpec]):
    """Runs every config of a block from the same Original."""

    Spec = GridSpec
    order = 7
    trains = True

    def work(self, context: StageContext, spec: GridSpec) -> None:
        """Writes one JSON line per cell."""
        from stable_forgetting.benchmarks.pipeline.block import Readout, run_block

        context.check_applicable(spec.method)
        split = context.split()
        context.check_original(split)
        with context.writing() as folder:
            original = context.model("start")

            def task(access: frozenset[str]) -> UnlearnTask:
                return context.task(
                    split, access, model=copy.deepcopy(original), method=spec.method
                )

            rows = run_block(spec, Readout(context.benchmark, split, original, spec.seed), task)
            lines = (json.dumps(row, allow_nan=False) + "\n" for row in rows)
            (folder / CELLS).write_text("".join(lines), encoding="utf-8")


class GridReader:
    """Reads a grid's blocks and its Retrains; ``results`` are of its plan, or of a stored one."""

    def __init__(self, suite: ResolvedSuite, store: StageStore, results: Sequence[Result[Any]]):
        assert suite.accepts is not None
        self.rule, self.store = suite.accepts, store
        labels = {row.label for row in suite.rows if row.method == "retrain"}
        self._cells: dict[str, list[Cell]] = {}
        self._retrains = {(r.seed, r.replicate): r.stage for r in results if r.label in labels}

    def target(self, seed: int, replicate: int = 0) -> Target | None:
        """What a Retrain scores; None while it is not there.

        Raises:
            DataError: It diverged.
        """
        stage = self._retrains.get((seed, replicate))
        record = None if stage is None else read_record(self.store, stage)
        if record is None:
            return None
        values = {name: record.metrics.get(name) for name in self.rule.axes.metrics}
        target = {name: value for name, value in values.items() if value is not None}
        if record.status != "ok" or len(target) != len(values):
            raise DataError(
                f"Retrain of seed {seed} diverged, so nothing can be judged; leave that seed out"
            )
        return target

    def cells(self, block: Block[Any]) -> list[Cell] | None:
        """The cells of a block; None while it is not done."""
        if block.stage.key in self._cells:
            return self._cells[block.stage.key]
        about = block.label, block.seed, block.extension

        def parse(text: str) -> list[Cell]:
            return [Cell.of(json.loads(line), *about) for line in text.splitlines()]

        cells = read_stored(self.store, block.stage, CELLS, parse)
        if cells is not None:
            self._cells[block.stage.key] = cells
        return cells

    def edge(self, blocks: Sequence[Block[Any]], side: str) -> Edge:
        """The outermost column of one row's blocks, ``low`` or ``high``, as far as it is known."""
        rates = [lr for block in blocks for lr in block.lrs]
        lr = max(rates) if side == "high" else min(rates)
        accepted = 0
        for block in (block for block in blocks if lr in block.lrs):
            cells, target = self.cells(block), self.target(block.seed)
            if cells is None or target is None:
                return Edge(None, False)
            accepted += sum(cell.lr == lr and not judge(cell, target, self.rule) for cell in cells)
        return Edge(lr, accepted == 0)
