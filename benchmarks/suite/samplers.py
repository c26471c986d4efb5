"""Spaces of ``tune.spaces``; Optuna proposes points as pure functions of space, seed and trials.

Every study lives in memory and only as long as one call: finished trials are added, further ones
are asked for.  The same Optuna gives the same proposals.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from stable_forgetting.common.base.config import Strict

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler

Point = dict[str, float]
"""Parameter -> number with three digits, or the index of a listed value."""


SHARE_OF_EDGE = 0.1
"""A value this near to an end of its range (as a share of it) lies at the edge."""


class Dimension(Strict):
    """One parameter of a space: a range ``{low, high, log}`` or a list of values.

    Attributes:
        low: Lower bound, included.
        high: Upper bound, included.
        log: Draw the logarithm uniformly.
        choices: The values, for a parameter without a range.
    """

    low: float | None = None
    high: float | None = None
    log: bool = False
    choices: tuple[Any, ...] | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return {"choices": value}
        if not isinstance(value, Mapping | Dimension):
            raise ValueError("write {low: 1e-4, high: 1e-2, log: true} or a list of values")
        return value

    @model_validator(mode="after")
    def _range_or_choices(self) -> Dimension:
        if self.choices is not None:
            if not self.choices or self.low is not None or self.high is not None or self.log:
                raise ValueError("give low and high, or a list of at least one value")
        elif self.low is None or self.high is None:
            raise ValueError("a range needs low and high")
        elif self.low >= self.high:
            raise ValueError(f"low {self.low:g} is not below high {self.high:g}; swap or widen")
        elif self.log and self.low <= 0:
            raise ValueError(f"log: true needs low above 0, not {self.low:g}")
        return self

    @property
    def ends(self) -> tuple[float, float]:
        """Bounds of a range."""
        assert self.low is not None and self.high is not None
        return self.low, self.high

    def at_edge(self, value: Any) -> bool:
        """Whether a value is an outermost number of a list, or within a tenth of a range's end."""
        if self.choices is not None:
            numbers = [_number(choice) for choice in self.choices]
            values = [number for number in numbers if number is not None]
            ends = {min(values), max(values)} if len(values) == len(numbers) else set()
            return len(ends) == 2 and _number(value) in ends
        scale = math.log if self.log else float
        low, high = map(scale, self.ends)
        share = (scale(value) - low) / (high - low)
        return not SHARE_OF_EDGE < share < 1 - SHARE_OF_EDGE

    def __str__(self) -> str:
        if self.choices is not None:
            return "of " + ", ".join(map(str, self.choices))
        low, high = self.ends
        return f"{low:g} to {high:g}" + (" (log)" if self.log else "")


def _number(value: Any) -> float | None:
    """A number, or text such as ``1e-3`` (which YAML does not read as one)."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def propose(
    sampler: str,
    space: Mapping[str, Dimension],
    whole: AbstractSet[str],
    seed: int,
    trials: Sequence[tuple[Mapping[str, float], float]] = (),
) -> Iterator[Point]:
    """Endless proposals; they may repeat.

    Args:
        sampler: ``qmc``, ``random`` or ``tpe``.
        space: Parameter -> range or values.
        whole: Parameters that take whole numbers only.
        seed: Of the draws; its low 32 bits count.
        trials: Finished trials for ``tpe``: point and gap (smaller is better, infinite is worst).
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {k: _distribution(optuna, d, k in whole) for k, d in space.items()}
    seed %= 2**32
    samplers: dict[str, Callable[[], BaseSampler]] = {
        "qmc": lambda: optuna.samplers.QMCSampler(scramble=True, seed=seed),
        "random": lambda: optuna.samplers.RandomSampler(seed=seed),
        "tpe": lambda: optuna.samplers.TPESampler(n_startup_trials=1, seed=seed),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        drawer = samplers[sampler]()
        study = optuna.create_study(sampler=drawer)
    for point, gap in trials:
        study.add_trial(
            optuna.trial.create_trial(params=dict(point), distributions=distributions, value=gap)
        )
    if sampler == "qmc":
        # asked through the study, the first point would not be of the sequence
        study.ask()
        (trial,) = study.trials
        while True:
            drawn = drawer.sample_relative(study, trial, distributions)
            yield _readable(drawn, space, whole)
    while True:
        yield _readable(study.ask(distributions).params, space, whole)


def _distribution(optuna: Any, dimension: Dimension, whole: bool) -> BaseDistribution:
    if dimension.choices is not None:
        return optuna.distributions.CategoricalDistribution(range(len(dimension.choices)))
    low, high = dimension.ends
    if whole:
        return optuna.distributions.IntDistribution(int(low), int(high), log=dimension.log)
    return optuna.distributions.FloatDistribution(low, high, log=dimension.log)


def _readable(
    drawn: Mapping[str, Any], space: Mapping[str, Dimension], whole: AbstractSet[str]
) -> Point:
    """Three digits, inside the range."""
    point: Point = {}
    for key, dimension in space.items():
        value = drawn[key]
        if dimension.choices is None:
            low, high = dimension.ends
            value = min(max(float(f"{value:.3g}"), low), high)
        point[key] = int(value) if key in whole or dimension.choices is not None else value
    return point
