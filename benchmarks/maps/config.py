"""A stability map as one YAML file: which suite's protocol, which methods, which grid."""

from __future__ import annotations

import itertools
from typing import Annotated, Any

from pydantic import Field, model_validator

from stable_forgetting.benchmarks.suite.suite import SUITES, Name
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.numbers import NonNegative, Positive

MAPS = SUITES / "maps"
LRS = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
LAMBDAS = (0.1, 1.0, 10.0)


class Extend(Strict):
    """How many rates may be added below and above the grid until that side fails.

    Attributes:
        low: Columns below the smallest rate.
        high: Columns above the largest.
    """

    low: Annotated[int, Field(ge=0, le=8)] = 2
    high: Annotated[int, Field(ge=0, le=8)] = 2


class MapRow(Strict):
    """One method of the map.

    Attributes:
        method: Registered name; the row's own label when absent.
        preset: Named overrides of the method.
        params: Overrides of the method's config.
        axis: The parameter (dots for nesting) that lambda sets; null where there is none.
        lrs: Rates of this row where the grid's mean nothing, as for methods without an adapter.
        lambdas: Values of ``axis`` for this row.
    """

    method: str | None = None
    preset: str | None = None
    params: dict[str, Any] = {}
    axis: str | None = "lam"
    lrs: tuple[Positive, ...] | None = None
    lambdas: tuple[NonNegative, ...] | None = None


class MapConfig(Strict):
    """The grid and the rule.

    Attributes:
        methods: Label -> row.
        lrs: Effective rates: what an adapter of slope 1 would take, so that the first step in
            weight space is the same for all (``lr_scaling: slope`` divides by the slope).
        lambdas: Weights of the forget term.
        steps: Read-outs of one run, after this many optimizer steps.
        rule: When a cell is acceptable: metric -> tolerance, for the metrics that the benchmark's
            maps judge, and ``two_sided``; half and double are always shown too.
        extend: Rates added until each side fails; they count for edges and bands only.
        block: Runs that share one forward, at most; a block is one stage.
        defaults: Params for every row whose config has them.
        compare: Pairs of labels whose paired difference is shown.
        probe: Audit -> its settings, for the best cell of every row: the map shows how wide a
            method's acceptable region is, the probe how deep the forgetting in it.
    """

    methods: dict[Name, MapRow | None]
    lrs: Annotated[tuple[Positive, ...], Field(min_length=2)] = LRS
    lambdas: Annotated[tuple[NonNegative, ...], Field(min_length=1)] = LAMBDAS
    steps: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] = (100, 300)
    rule: dict[str, Any] = {}
    extend: Extend = Extend()
    block: Annotated[int, Field(ge=1, le=256)] = 8
    defaults: dict[str, Any] = {}
    compare: tuple[tuple[str, str], ...] = ()
    probe: dict[str, dict[str, Any] | None] = {}

    @model_validator(mode="after")
    def _consistent(self) -> MapConfig:
        if not self.methods:
            raise ValueError("methods is empty; name at least one")
        rows = [(label, row) for label, row in self.methods.items() if row]
        axes = [("lrs", self.lrs), ("lambdas", self.lambdas), ("steps", self.steps)]
        axes += [(f"methods.{k}.lrs", row.lrs) for k, row in rows if row.lrs is not None]
        axes += [
            (f"methods.{k}.lambdas", row.lambdas) for k, row in rows if row.lambdas is not None
        ]
        for name, values in axes:
            if not values or list(values) != sorted(set(values)):
                raise ValueError(f"{name} must increase, without repeats")
        for label in itertools.chain(*self.compare):
            if label not in self.methods:
                raise ValueError(f"compare names '{label}', which is not a row")
        return self


class MapFile(Strict):
    """One map.

    Attributes:
        name: Its name.
        version: Raised when its numbers change meaning.
        title: One line for people.
        notes: What a reader must know.
        suite: Whose benchmark and protocol are used (a built-in suite or a path).
        protocol: Overrides of that protocol.
        seeds: The units of every mean; choose methods' constants on others.
        map: Grid and rule.
    """

    name: Name
    version: Annotated[int, Field(ge=1)] = 1
    title: str = ""
    notes: str = ""
    suite: str
    protocol: dict[str, Any] = {}
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    map: MapConfig

    @model_validator(mode="after")
    def _seeds_differ(self) -> MapFile:
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError("seeds holds a seed twice")
        return self
