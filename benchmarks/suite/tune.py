"""``tune:`` of a suite: where a row's trials come from, the same number for every row.

A row's trials are the product of a grid, or draws from a space.  Draws are pure functions of the
tuning seeds, the space and, where the sampler asks for it, the gaps of the trials before: nothing
of a sweep is stored but its trials' records.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from stable_forgetting.benchmarks.suite.samplers import Dimension, propose
from stable_forgetting.common.base.config import (
    Strict,
    did_you_mean,
    digest,
    is_whole,
    merge,
    nested,
)
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.grown import Grown
from stable_forgetting.common.base.numbers import Count, Seed
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.base.seeding import derive
from stable_forgetting.common.methods.base import over, resolve_config

SLACK = 1.5
"""Times the smallest distance that a trial may have and still be chosen by an attack."""


class Tune(Grown):
    """The same trial budget for every method, chosen by the distance on seeds of its own.

    Attributes:
        seeds: Seeds of the trials; must not be among the suite's seeds.
        trials: Trials of every method; each grid's product must have this size.
        trials_per_dimension: In the place of ``trials``: a row with d searched parameters has d
            times so many.
        select: The distance is to the tuning seed's ``retrain``, or ``without_retrain`` to values
            of Original on data that it never saw (:meth:`Benchmark.without_retrain`).
        grids: ``default`` or a row's label -> parameter (dots for nesting) -> values.
        spaces: The same with ranges or lists, from which ``trials`` configs are drawn.
        sampler: Who draws: scrambled Sobol points, independent draws, or the tree-structured
            Parzen estimator, which looks at the gaps of the rounds before.
        round: Trials that ``tpe`` draws at once (they run in parallel); the first round is ``qmc``.
        after_attack: An attack, such as ``relearn_few``, that decides among the trials within
            :data:`SLACK` times the smallest distance: the one that shows least is chosen.
    """

    later = {
        "trials": None,
        "trials_per_dimension": None,
        "select": "retrain",
        "after_attack": None,
    }
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)] = (0,)
    trials: Count | None = None
    trials_per_dimension: Count | None = None
    select: Literal["retrain", "without_retrain"] = "retrain"
    grids: dict[str, dict[str, list[Any]]] = {}
    spaces: dict[str, Annotated[dict[str, Dimension], Field(min_length=1)]] = {}
    sampler: Literal["qmc", "random", "tpe"] = "qmc"
    round: Count = 4
    after_attack: str | None = None

    @field_validator("grids", "spaces", mode="before")
    @classmethod
    def _without_null(cls, value: Any) -> Any:
        """A suite that extends another takes a label away with null."""
        if isinstance(value, Mapping):
            return {label: item for label, item in value.items() if item is not None}
        return value

    def count(self, dimensions: int) -> int:
        """Trials of a row that has so many searched parameters."""
        return self.trials or (self.trials_per_dimension or 0) * dimensions

    @property
    def budget(self) -> str:
        """Trials of a row, in words."""
        if self.trials is not None:
            return f"{self.trials} trials per row"
        return f"{self.trials_per_dimension} trials per searched parameter of a row"

    @model_validator(mode="after")
    def _consistent(self) -> Tune:
        if (self.trials is None) == (self.trials_per_dimension is None):
            raise ValueError(
                "give one of trials and trials_per_dimension (an inherited one goes with null)"
            )
        if self.after_attack is not None and self.select != "retrain":
            raise ValueError(
                "after_attack compares with the tuning seed's Retrain, which select: "
                "without_retrain does not train; leave one of them out"
            )
        for label, grid in self.grids.items():
            size, wanted = math.prod(map(len, grid.values())), self.count(len(grid))
            if size != wanted:
                key = "trials is" if self.trials else "trials_per_dimension makes it"
                raise ValueError(
                    f"grid '{label}' has {size} combinations, but {key} {wanted}; "
                    "every method gets the same number"
                )
            if label in self.spaces:
                raise ValueError(f"'{label}' has a grid and a space; keep one of them")
        return self


@dataclass(frozen=True)
class Draw:
    """One trial.

    Attributes:
        values: Parameter (dots for nesting) -> value.
        point: What the sampler drew: numbers, and the index of a listed value.
    """

    values: Mapping[str, Any]
    config: Strict
    point: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Search:
    """How the trials of one row come about.

    Attributes:
        sampler: ``grid`` or the suite's sampler.
        params: The row's params, which a trial's values override.
        origin: Names the row's grid or space in errors.
        skipped: Parameters of the default space that the row's method does not have.
    """

    tune: Tune
    space: Mapping[str, Dimension]
    sampler: str
    method: str
    preset: str | None
    params: Mapping[str, Any]
    origin: str
    skipped: tuple[str, ...] = ()

    @property
    def trials(self) -> int:
        """How many there are in all."""
        return self.tune.count(len(self.space))

    def more(self, draws: Sequence[Draw], gaps: Sequence[float]) -> tuple[Draw, ...]:
        """The next trials, given all before and their gaps; none once the budget is spent.

        Raises:
            ConfigError: A value is not valid, or trials would repeat.
        """
        left = self.trials - len(draws)
        if left == 0:
            return ()
        if self.sampler == "grid":
            return self._grid()
        if not draws:
            self._check_space()
        count = min(left, self.tune.round) if self.sampler == "tpe" else left
        return self._distinct(self._proposals(draws, gaps, count), draws, count)

    def _grid(self) -> tuple[Draw, ...]:
        lists = (dimension.choices or () for dimension in self.space.values())
        points = (dict(zip(self.space, each, strict=True)) for each in itertools.product(*lists))
        draws = [self._draw(point) for point in points]
        if len({_identity(draw) for draw in draws}) != len(draws):
            raise ConfigError(
                f"{self.origin}: two trials are the same; every method gets the same number of "
                "different ones"
            )
        return tuple(draws)

    def _draw(self, values: Mapping[str, Any], point: Mapping[str, float] | None = None) -> Draw:
        drawn: dict[str, Any] = {}
        for key, value in values.items():
            drawn = merge(drawn, nested(key, value))
        params = over(self.params, drawn)
        config = resolve_config(self.method, self.preset, params, origin=self.origin)
        return Draw(values, config, point or {})

    def _check_space(self) -> None:
        """Each end and each listed value must be valid, and there must be enough of them."""
        size = 1.0
        for key, dimension in self.space.items():
            ends = dimension.choices if dimension.choices is not None else dimension.ends
            different = {_identity(self._draw({key: value})) for value in ends}
            if dimension.choices is not None:
                size *= len(different)
            else:
                low, high = dimension.ends
                size *= high - low + 1 if self.whole(key) else math.inf
        if size < self.trials:
            raise self._too_small()

    def _too_small(self) -> ConfigError:
        return ConfigError(
            f"{self.origin}: has fewer than {self.trials} different trials (values have "
            "three digits); widen it or lower trials"
        )

    def whole(self, key: str) -> bool:
        """Whether a parameter takes whole numbers only."""
        return is_whole(METHODS[self.method].Config, key)

    def _proposals(
        self, draws: Sequence[Draw], gaps: Sequence[float], count: int
    ) -> Iterable[dict[str, float]]:
        first, *others = self.tune.seeds
        stored = METHODS[self.method].Config.stored
        space = {stored.get(key, key): dimension for key, dimension in self.space.items()}
        seed = derive(first, *others, digest(space), len(draws))
        trials = [(draw.point, gap) for draw, gap in zip(draws, gaps, strict=True)]
        whole = {key for key in self.space if self.whole(key)}
        limit = 200 + 50 * count
        if not trials:
            sampler = "random" if self.sampler == "random" else "qmc"
            return itertools.islice(propose(sampler, self.space, whole, seed), limit)
        # where the estimator insists on what was tried already, chance goes on
        return itertools.chain(
            itertools.islice(propose("tpe", self.space, whole, seed, trials), 5 * count),
            itertools.islice(propose("random", self.space, whole, seed), limit),
        )

    def _distinct(
        self, proposals: Iterable[dict[str, float]], draws: Sequence[Draw], count: int
    ) -> tuple[Draw, ...]:
        seen = {_identity(draw) for draw in draws}
        new_draws: list[Draw] = []
        lists = {key: dimension.choices for key, dimension in self.space.items()}
        for point in proposals:
            listed = {k: values[int(point[k])] for k, values in lists.items() if values is not None}
            draw = self._draw({**point, **listed}, point)
            if _identity(draw) not in seen:
                seen.add(_identity(draw))
                new_draws.append(draw)
            if len(new_draws) == count:
                return tuple(new_draws)
        raise self._too_small()

    def edges(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        """Parameters of a trial whose value lies at the edge of its range or list."""
        return tuple(k for k, v in values.items() if self.space[k].at_edge(v))

    def __str__(self) -> str:
        return "; ".join(f"{key} {dimension}" for key, dimension in self.space.items())


def _identity(draw: Draw) -> str:
    return digest(draw.config.identity())


def search_of(
    tune: Tune, label: str, *, method: str, preset: str | None, params: Mapping[str, Any], file: str
) -> Search:
    """The search of one row: its own grid or space, or the default one."""
    for name in (label, "default"):
        if name in tune.grids:
            lists = METHODS[method].Config.by_field(tune.grids[name])
            grid = {key: Dimension(choices=tuple(v)) for key, v in lists.items()}
            origin = f"{file}: tune.grids for row '{label}'"
            return Search(tune, grid, "grid", method, preset, params, origin)
        if name in tune.spaces:
            origin = f"{file}: tune.spaces for row '{label}'"
            space, skipped = _space_of(tune.spaces[name], method, name == "default", origin)
            return Search(tune, space, tune.sampler, method, preset, params, origin, skipped)
    raise ConfigError(
        f"{file}: tune: no grid or space for row '{label}' and no default; {_own_space(label)}"
    )


def _own_space(label: str) -> str:
    """How a row gets a space of its own, or none."""
    return (
        f"write tune: {{spaces: {{{label}: {{lr: {{low: 1e-4, high: 1e-2, log: true}}}}}}}}, or "
        "tune: false in the row"
    )


def _space_of(
    written: Mapping[str, Dimension], method: str, shared: bool, origin: str
) -> tuple[dict[str, Dimension], tuple[str, ...]]:
    """A row's dimensions, and those of the shared space that its method has no setting for."""
    config = METHODS[method].Config
    space = dict(sorted(config.by_field(written).items()))
    unknown = tuple(key for key in space if key.partition(".")[0] not in config.model_fields)
    left = {key: dimension for key, dimension in space.items() if key not in unknown}
    if unknown and not (shared and left):
        label = origin.split("'")[-2]
        raise ConfigError(
            f"{origin}: {unknown[0]}: unknown key"
            f"{did_you_mean(unknown[0], list(config.model_fields))}; {_own_space(label)} "
            f"(settings: unlearn show {method})"
        )
    return left, unknown
