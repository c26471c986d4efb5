"""A suite's grid: its rows run at every point of it, and each point is judged beside Retrain."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, create_model, model_validator

from stable_forgetting.common.base.config import Strict, merge, nested, validate
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.numbers import Count, NonNegative, Positive
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.measure.metric import SweepAxes
from stable_forgetting.common.methods.base import check_read, resolve_config

Point = tuple[float, float]
"""Effective learning rate and lambda."""
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


class Axes(Strict):
    """Axes of one row.

    Attributes:
        axis: The parameter (dots for nesting) that lambda sets; null where there is none.
        lrs: Rates of this row where the grid's mean nothing, as for methods without an adapter.
        lambdas: Values of ``axis`` for this row.
    """

    axis: str | None = "lam"
    lrs: Annotated[tuple[Positive, ...], Field(min_length=1)] | None = None
    lambdas: Annotated[tuple[NonNegative, ...], Field(min_length=1)] | None = None


class Grid(Strict):
    """The grid and the rule.

    Attributes:
        lrs: Effective rates: what an adapter of slope 1 would take, so that the first step in
            weight space is the same for all (``lr_scaling: slope`` divides by the slope).
        lambdas: Weights of the forget term.
        steps: One run is scored after each of these optimizer steps.
        rows: Label -> axes of rows that do not take the grid's.
        rule: When a cell is acceptable: metric -> tolerance, for the metrics that sweeps of the
            benchmark judge, and ``two_sided``; half and double are always shown too.
        extend: Rates added until each side fails; they count for edges and bands only.
        block: Runs that share one forward, at most; a block is one stage.
    """

    lrs: Annotated[tuple[Positive, ...], Field(min_length=2)] = LRS
    lambdas: Annotated[tuple[NonNegative, ...], Field(min_length=1)] = LAMBDAS
    steps: Annotated[tuple[Count, ...], Field(min_length=1)] = (100, 300)
    rows: dict[str, Axes] = {}
    rule: dict[str, Any] = {}
    extend: Extend = Extend()
    block: Annotated[int, Field(ge=1, le=256)] = 8

    @model_validator(mode="after")
    def _increasing(self) -> Grid:
        axes: dict[str, Sequence[float] | None] = {
            "lrs": self.lrs,
            "lambdas": self.lambdas,
            "steps": self.steps,
        }
        for label, row in self.rows.items():
            axes |= {f"rows.{label}.lrs": row.lrs, f"rows.{label}.lambdas": row.lambdas}
        for name, values in axes.items():
            if values is not None and (not values or list(values) != sorted(set(values))):
                raise ValueError(f"{name} must increase, without repeats")
        return self


@dataclass(frozen=True)
class GridRow:
    """A row's grid.

    Attributes:
        axis: The parameter that lambda sets; None where there is none.
        steps: When a run is scored.
        params: The row's own over the suite's defaults, at the first point.
        origin: For messages.
    """

    method: str
    preset: str | None
    axis: str | None
    lrs: tuple[float, ...]
    lambdas: tuple[float, ...]
    steps: tuple[int, ...]
    params: Mapping[str, Any]
    origin: str

    @property
    def points(self) -> list[Point]:
        """What every seed runs, without extensions."""
        return list(itertools.product(self.lrs, self.lambdas))

    def set(self, lr: float, lam: float) -> dict[str, Any]:
        """The params that a point gives."""
        point: dict[str, Any] = {"lr": lr, "steps": max(self.steps)}
        return point if self.axis is None else merge(point, nested(self.axis, lam))

    def config(self, lr: float, lam: float) -> Any:
        """The method's full config at one point."""
        params = merge(self.params, self.set(lr, lam))
        return resolve_config(self.method, self.preset, params, origin=self.origin)


def grid_row(
    grid: Grid, label: str, *, method: str, preset: str | None, params: Mapping[str, Any], file: str
) -> GridRow:
    """The grid of one row, without the suite's defaults."""
    own, config = grid.rows.get(label, Axes()), METHODS[method].Config
    for needed in ("lr", "steps", "evaluate_every"):
        if needed not in config.model_fields:
            raise ConfigError(
                f"{file}: method '{method}' has no '{needed}', so it has no grid; remove the row"
            )
    axis = config.field_of(own.axis) if own.axis else None
    if axis is not None and axis.partition(".")[0] not in config.model_fields:
        raise ConfigError(
            f"{file}: method '{method}' has no '{axis}'; write grid: {{rows: {{{label}: "
            "{axis: PARAMETER}}}, or axis: null"
        )
    check_read(method, [axis or "lr"], origin=f"{file}: grid.rows.{label}.axis")
    for fixed in ("lr", "steps", axis or "lr"):
        if fixed in config.by_field(params):
            raise ConfigError(f"{file}: params.{fixed} is an axis of the grid; leave it out")
    lambdas = (own.lambdas or grid.lambdas) if axis else (1.0,)
    lrs = own.lrs or grid.lrs
    return GridRow(method, preset, axis, lrs, lambdas, grid.steps, params, file)


@dataclass(frozen=True)
class Acceptance:
    """When a cell is acceptable, in the units of its metrics.

    Formula: retained >= Retrain - tolerance and utility >= Retrain - tolerance and forgotten <=
    tolerance, or, two-sided, |forgotten - Retrain| <= tolerance.

    Attributes:
        tolerances: Metric -> tolerance, for these three.
        two_sided: For random forgetting, where Retrain's own value is far from 0.
    """

    axes: SweepAxes
    tolerances: Mapping[str, float]
    two_sided: bool = False

    def scaled(self, factor: float) -> Acceptance:
        """The strict (0.5) or the loose (2) rule."""
        scaled = {metric: factor * value for metric, value in self.tolerances.items()}
        return Acceptance(self.axes, scaled, self.two_sided)


def acceptance(axes: SweepAxes, tolerances: Mapping[str, Any], origin: str) -> Acceptance:
    """The rule of a grid, with the benchmark's own tolerances where it has none."""
    judged = (axes.forgotten, axes.retained, axes.utility)
    fields: dict[str, Any] = {
        metric: (NonNegative, value) for metric, value in zip(judged, axes.tolerances, strict=True)
    }
    model = create_model("Rule", __base__=Strict, two_sided=(bool, False), **fields)
    values = validate(model, tolerances, origin).model_dump()
    return Acceptance(axes, {metric: values[metric] for metric in judged}, values["two_sided"])
