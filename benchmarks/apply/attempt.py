"""One method, run once on the user's model: what came of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stable_forgetting.benchmarks.pipeline.unlearning import count_parameters, training
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import Diverged
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.protocol.given import SEEN, VALIDATION, GivenBenchmark

if TYPE_CHECKING:
    from torch import nn

    from stable_forgetting.common.bounded.files import AdapterState
    from stable_forgetting.common.train.protocols import Progress


@dataclass
class Attempt:
    """What came of one method.

    Attributes:
        method: Its name.
        config: Its config.
        facts: The statement's ``cost`` and ``dynamics``.
        model: With adapters merged and the precision in which it is written; None: it diverged.
        detail: Where and how it diverged.
        adapters: Statistics of its adapters, None where it trained none.
        adapter: Its adapter before it was merged, if it trained one.
    """

    method: str
    config: Strict
    facts: dict[str, Any]
    model: nn.Module | None = None
    detail: str = ""
    adapters: Mapping[str, float] | None = None
    adapter: AdapterState | None = None


def attempt(
    method: str,
    config: Strict,
    benchmark: GivenBenchmark,
    *,
    checkpoint: Path | None,
    progress: Progress | None,
) -> Attempt:
    """Runs a method on a copy of the given model.

    Args:
        method: Registered name.
        config: Of the method.
        benchmark: Prepared.
        checkpoint: Of the training; None writes none.
        progress: Called after every step.
    """
    from stable_forgetting.common.bounded.attach import detach

    task = _task(method, benchmark, checkpoint, progress)
    with training(task) as outcome:
        outcome.model = METHODS[method](config).unlearn(task)
    count_parameters(outcome, task)
    result = Attempt(method, config, {"cost": outcome.cost, "dynamics": outcome.dynamics})
    if outcome.model is None:
        result.detail = outcome.detail
        return result
    result.adapter, result.adapters = _adapter(outcome.model)
    merged = detach(outcome.model)
    try:
        settle(merged, benchmark)
        _check_merged(merged, benchmark.original)
    except Diverged as error:
        result.detail = str(error)
        return result
    result.model = merged
    return result


def _task(
    method: str, benchmark: GivenBenchmark, checkpoint: Path | None, progress: Progress | None
) -> UnlearnTask:
    from stable_forgetting.common.data.access import DataAccess
    from stable_forgetting.common.train.protocols import Telemetry

    seed = benchmark.config.seed
    split, access = benchmark.split(seed), METHODS[method].info.access
    return UnlearnTask(
        model=benchmark.blank(),
        data=DataAccess(benchmark.source, split, access, method),
        family=benchmark,
        recipe=benchmark.recipe,
        build=partial(benchmark.build, seed),
        seed=seed,
        telemetry=Telemetry(progress=progress),
        checkpoint=checkpoint,
    )


def _adapter(model: nn.Module) -> tuple[AdapterState | None, dict[str, float] | None]:
    """A model's adapter and its statistics; None where it has none."""
    from stable_forgetting.common.bounded.attach import adapter_statistics
    from stable_forgetting.common.bounded.files import adapter_state
    from stable_forgetting.common.bounded.layer import adapted_layers

    if not any(True for _ in adapted_layers(model)):
        return None, None
    return adapter_state(model), adapter_statistics(model)


def settle(model: nn.Module, benchmark: GivenBenchmark) -> None:
    """Gives the weights the precision in which they will be written, in place.

    Warns where that loses a share of the update, so that what is measured is what is written.
    """
    import torch

    from stable_forgetting.common.bounded.layer import warn_of_loss

    before, squares = benchmark.original.state_dict(), torch.zeros(3, dtype=torch.float64)
    for name, tensor in model.state_dict().items():
        dtype = benchmark.given.dtypes.get(name)
        if dtype is None:
            continue
        written = tensor.to(dtype).to(tensor.dtype)
        base = before[name]
        norms = [t.double().square().sum() for t in (base, tensor - base, tensor - written)]
        squares += torch.stack(norms).cpu()
        tensor.copy_(written)
    warn_of_loss(squares)


def _check_merged(model: nn.Module, original: nn.Module) -> None:
    """What is written must load into the architecture that it came from, and be finite."""
    before, after = original.state_dict(), model.state_dict()
    assert list(before) == list(after), "the method changed the architecture"
    shared = [len(list(each.parameters())) for each in (original, model)]
    assert shared[0] == shared[1], "the method tied or untied layers"
    for name, tensor in after.items():
        assert tensor.shape == before[name].shape, f"the method changed the shape of {name}"
        assert tensor.dtype == before[name].dtype, f"the method changed the type of {name}"
        if not bool(tensor.isfinite().all()):
            raise Diverged(0, f"parameter {name} is not finite")


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


Measured = Mapping[str, Any]


def choose(
    benchmark: GivenBenchmark, before: Measured, trials: Mapping[str, Callable[[], Attempt]]
) -> tuple[Attempt, dict[str, Any]]:
    """Runs every trial and keeps the best.

    Args:
        benchmark: Prepared, with a part ``validation``.
        before: What was measured of the given model.
        trials: Method -> what runs it.

    Returns:
        The chosen attempt, and the statement's ``choice``.  The distance is the mean of how far the
        yardstick is from the goal on forget data, and of how far it fell on validation data; of
        equal ones the first is taken.
    """
    goal, key = benchmark.config.goal or 0.0, benchmark.yardstick
    wanted = {"forget": goal, VALIDATION: before[VALIDATION][key]}
    best, shortest, table = None, math.inf, []
    for method, run in trials.items():
        attempt = run()
        row: dict[str, Any] = {"method": method, "status": "diverged", "distance": None}
        values = _values(attempt, benchmark)
        row |= {"seconds": attempt.facts["cost"]["seconds"], **dict.fromkeys(SEEN), **values}
        if values:
            lost = max(0.0, wanted[VALIDATION] - values[VALIDATION])
            distance = (abs(values["forget"] - wanted["forget"]) + lost) / 2
            row |= {"status": "ok", "distance": distance}
            if distance < shortest:
                best, shortest = attempt, distance
        best = best or attempt
        table.append(row)
    assert best is not None, "there is a method to try"
    return best, {
        "rule": f"mean of the distance of {key} to the goal on forget data and of its loss on "
        f"{VALIDATION} data",
        "goal": goal,
        "given": before[VALIDATION][key],
        "held_out": len(benchmark.split(benchmark.config.seed).parts[VALIDATION]),
        "chosen": best.method,
        "trials": table,
    }


def _values(attempt: Attempt, benchmark: GivenBenchmark) -> dict[str, float]:
    """Part -> yardstick; empty where the training or what the model says diverged."""
    if attempt.model is None:
        return {}
    try:
        values = measured(benchmark, attempt.model, trial=True)
    except Diverged as error:
        attempt.model, attempt.detail = None, str(error)
        return {}
    return {part: values[part][benchmark.yardstick] for part in SEEN}
