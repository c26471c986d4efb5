"""One method, run once on the user's model: what came of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stable_forgetting.benchmarks.pipeline.unlearning import count_parameters, trained
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import Diverged
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.data.splits import ForgetSplit
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.train.config import FitConfig

if TYPE_CHECKING:
    from torch import nn

    from stable_forgetting.common.bounded.files import AdapterState
    from stable_forgetting.common.protocol.subject import Subject
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


class _GivenSplit(ForgetSplit):
    """Index sets of a user's folders: retain may be absent where the method does not read it."""

    def __post_init__(self) -> None:
        """Folders are disjoint by construction and never empty."""


def attempt(
    method: str,
    config: Strict,
    subject: Subject,
    *,
    checkpoint: Path | None,
    progress: Progress | None,
) -> Attempt:
    """Runs a method on a copy of the subject's model.

    Args:
        method: Registered name.
        config: Of the method.
        subject: Loaded.
        checkpoint: Of the training; None writes none.
        progress: Called after every step.
    """
    from stable_forgetting.common.bounded.attach import detach

    task = _task(method, subject, checkpoint, progress)
    outcome = trained(METHODS[method](config).unlearn, task)
    count_parameters(outcome, task)
    result = Attempt(method, config, {"cost": outcome.cost, "dynamics": outcome.dynamics})
    if outcome.model is None:
        result.detail = outcome.detail
        return result
    result.adapter, result.adapters = _adapter(outcome.model)
    merged = detach(outcome.model)
    try:
        settle(merged, subject)
        _check_merged(merged, subject.original)
    except Diverged as error:
        result.detail = str(error)
        return result
    result.model = merged
    return result


def _task(
    method: str, subject: Subject, checkpoint: Path | None, progress: Progress | None
) -> UnlearnTask:
    from stable_forgetting.common.data.access import DataAccess
    from stable_forgetting.common.train.protocols import Telemetry

    split = _GivenSplit("apply", subject.parts, subject.source.digest)
    return UnlearnTask(
        model=copy.deepcopy(subject.original),
        data=DataAccess(subject.source, split, METHODS[method].info.access, method),
        family=subject,
        recipe=FitConfig(epochs=1),
        build=_no_fresh_model,
        seed=subject.application.seed,
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


def settle(model: nn.Module, subject: Subject) -> None:
    """Gives the weights the precision in which they will be written, in place.

    Warns where that loses a share of the update, so that what is measured is what is written.
    """
    import torch

    from stable_forgetting.common.bounded.layer import warn_of_loss

    before, squares = subject.original.state_dict(), torch.zeros(3, dtype=torch.float64)
    for name, tensor in model.state_dict().items():
        dtype = subject.stored_types.get(name)
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
    for name, tensor in after.items():
        assert tensor.shape == before[name].shape, f"the method changed the shape of {name}"
        assert tensor.dtype == before[name].dtype, f"the method changed the type of {name}"
        if not bool(tensor.isfinite().all()):
            raise Diverged(0, f"parameter {name} is not finite")


def _no_fresh_model() -> nn.Module:
    raise AssertionError("refused before: no method with access to 'initial' comes here")
