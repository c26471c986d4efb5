"""One method, run once on the user's model: what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stable_forgetting.benchmarks.pipeline.unlearning import count_parameters, training
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import Diverged
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.protocol.given import GivenBenchmark

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
    warn_of_loss("the model", squares)


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
