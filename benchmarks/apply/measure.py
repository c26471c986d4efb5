"""One model measured on a user's samples, part by part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stable_forgetting.common.protocol.given import GivenBenchmark

if TYPE_CHECKING:
    from torch import nn


def measured(benchmark: GivenBenchmark, model: nn.Module, *, trial: bool = False) -> dict[str, Any]:
    """What the benchmark measures of a model.

    Args:
        benchmark: Prepared.
        model: The given or an unlearned one.
        trial: Whether methods are chosen by it: test data are not looked at.

    Returns:
        Part -> measure -> value, and measures of the model as a whole.

    Raises:
        Diverged: An output is not finite.
    """
    seed = benchmark.config.seed
    parts = benchmark.parts(benchmark.split(seed), trial=trial, seed=seed)
    scores = benchmark.score(model, parts, trial=trial)
    nested: dict[str, Any] = {}
    for name, value in benchmark.evaluate(scores, trial=trial, seed=seed).items():
        part, _, measure = name.rpartition(".")
        (nested.setdefault(part, {}) if part else nested)[measure] = value
    return nested
