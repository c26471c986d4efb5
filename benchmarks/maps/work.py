"""The ``map`` stage: a block of configs that one row of a stability map runs on one seed."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

from stable_forgetting.benchmarks.pipeline.kinds import StageKind
from stable_forgetting.benchmarks.pipeline.stage import StageSpec

if TYPE_CHECKING:
    from stable_forgetting.benchmarks.pipeline.worksite import Worksite
    from stable_forgetting.common.methods.task import UnlearnTask

CELLS = "cells.jsonl"


class MapSpec(StageSpec):
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


class MapBlock(StageKind[MapSpec]):
    """Runs every config of a block from the same Original."""

    Spec = MapSpec
    order = 7
    trains = True

    def work(self, site: Worksite, spec: MapSpec) -> None:
        """Writes one JSON line per cell."""
        from stable_forgetting.benchmarks.maps.block import Readout, run_block

        site.check_applicable(spec.method)
        split = site.split()
        site.check_original(split)
        with site.writing() as folder:
            original = site.model("start")

            def task(access: frozenset[str]) -> UnlearnTask:
                return site.task(split, access, model=copy.deepcopy(original), method=spec.method)

            rows = run_block(spec, Readout(site.benchmark, split, original, spec.seed), task)
            lines = (json.dumps(row, allow_nan=False) + "\n" for row in rows)
            (folder / CELLS).write_text("".join(lines), encoding="utf-8")
