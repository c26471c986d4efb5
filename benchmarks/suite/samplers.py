"""Optuna behind ``tune.spaces``: proposals as pure functions of space, seed and finished trials.

Every study lives in memory and only as long as one call: finished trials are added, further ones
are asked for.  The same Optuna gives the same proposals.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from stable_forgetting.common.base.errors import ConfigError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler

    from stable_forgetting.benchmarks.suite.tune import Dimension

Point = dict[str, float]
"""Parameter -> number with three digits, or the index of a listed value."""


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

    Raises:
        ConfigError: Optuna is not installed.
    """
    optuna = _optuna()
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


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ConfigError(
            "tune.spaces needs Optuna, which is not installed; pip install optuna, or write grids"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


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
