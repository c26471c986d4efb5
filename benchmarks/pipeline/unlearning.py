"""One run of a method, its outcome, and the ``unlearn`` stage."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from stable_forgetting.benchmarks.pipeline.kinds import StageKind
from stable_forgetting.benchmarks.pipeline.stage import ModelSpec
from stable_forgetting.common.base import processes
from stable_forgetting.common.base.config import validate
from stable_forgetting.common.base.errors import DataError, Diverged
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.base.seeding import derive
from stable_forgetting.common.data.splits import TRAIN_PARTS, ForgetSplit
from stable_forgetting.common.measure.goal import References
from stable_forgetting.common.measure.rules import stopping_goals
from stable_forgetting.common.measure.scores import save_scores
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.store.records import RECORD, RunRecord, clean_metrics
from stable_forgetting.common.store.weights import save_weights

if TYPE_CHECKING:
    from torch import nn

    from stable_forgetting.benchmarks.pipeline.context import StageContext
    from stable_forgetting.common.train.protocols import EvaluateDuring

TRAJECTORY = "trajectory"


@dataclass
class Outcome:
    """What came of one training.

    Attributes:
        model: None where it diverged.
        detail: Where and how it diverged.
        cost: Seconds, steps, peak bytes, samples read of the forget and of the retain set, and
            passes over each; of a method also trainable and base parameters.
        dynamics: Last and largest value of everything that was logged.
        stopped: What ended the last fit before its time; None where nothing did.
    """

    model: nn.Module | None
    status: Literal["ok", "diverged"] = "ok"
    detail: str = ""
    step: int | None = None
    cost: dict[str, float | None] = field(default_factory=dict)
    dynamics: dict[str, float | None] = field(default_factory=dict)
    stopped: str | None = None

    def facts(self) -> dict[str, Any]:
        """What ``done.json`` says of it."""
        facts: dict[str, Any] = {"cost": self.cost, "dynamics": self.dynamics}
        if self.stopped is not None:
            facts["stopped"] = self.stopped
        if self.status == "diverged":
            facts |= {"status": self.status, "status_detail": self.detail, "step": self.step}
        return facts


@contextmanager
def training(task: UnlearnTask) -> Iterator[Outcome]:
    """What comes of a training inside the block, which sets ``outcome.model``.

    Divergence is an outcome, not an error.
    """
    import torch

    from stable_forgetting.common.bounded.peft import merge_peft

    device = next(task.model.parameters()).device
    on_card = device.type == "cuda"  # on a CPU a process's peak is not a stage's
    if on_card:
        torch.cuda.reset_peak_memory_stats(device)
    started, outcome = time.perf_counter(), Outcome(None)
    try:
        yield outcome
        if not isinstance(outcome.model, torch.nn.Module):
            raise TypeError(f"the method returned {type(outcome.model).__name__}, not a model")
        merge_peft(outcome.model)
    except Diverged as error:
        outcome.status, outcome.detail, outcome.step = "diverged", str(error), error.step
    earlier = sum(result.earlier for result in task.results)  # before it was interrupted
    outcome.cost = {
        "seconds": round(earlier + time.perf_counter() - started, 3),
        "steps": float(sum(result.steps for result in task.results) + (outcome.step or 0)),
        "peak_bytes": float(torch.cuda.max_memory_allocated(device)) if on_card else None,
    }
    for part in TRAIN_PARTS:
        outcome.cost[f"{part}_samples"] = float(task.data.reads.samples(part))
        outcome.cost[f"{part}_passes"] = task.data.reads.passes(part)
    for result in task.results:
        outcome.dynamics |= {f"last/{name}": value for name, value in result.last.items()}
        outcome.dynamics |= {f"max/{name}": value for name, value in result.peak.items()}
        outcome.stopped = result.stopped
    outcome.dynamics = clean_metrics(outcome.dynamics)


def count_parameters(outcome: Outcome, task: UnlearnTask) -> None:
    """Adds the parameters of an unlearned model, which may carry adapters, to its cost."""
    from stable_forgetting.common.bounded.attach import trainable_share

    if outcome.model is not None:
        trainable, base = trainable_share(outcome.model)
        # what was trained and is merged comes back frozen
        outcome.cost |= {
            "trainable_parameters": trainable or task.trained,
            "base_parameters": base,
        }


class Unlearn(StageKind[ModelSpec]):
    """Runs a method on a trained model: Original, or what an earlier request left."""

    Spec = ModelSpec
    order = 3
    trains = True
    events = True

    def work(self, context: StageContext, spec: ModelSpec) -> None:
        """Stores the model, as an adapter where the method attached one."""
        from stable_forgetting.common.bounded.files import save_adapter
        from stable_forgetting.common.bounded.layer import adapted_layers

        cls = METHODS[spec.method]
        context.check_applicable(spec.method)
        split = context.split()
        context.check_original(split)
        before = context.facts("start")
        if before["status"] != "ok":
            with context.writing():
                detail = f"an earlier request diverged: {before.get('status_detail', '')}"
                context.about |= {"status": "diverged", "status_detail": detail}
            return
        config = _with_limits(context, validate(cls.Config, spec.params, context.stage.name))
        with context.writing() as folder:
            start = context.model("start")
            if spec.moved:
                move_last_digits_(start, derive(spec.seed, "moved"))
            names = frozenset(start.state_dict())
            task = context.task(split, cls.info.access, model=start, method=spec.method)
            with context.recording(task, folder, _trajectory(context, split, config)):
                with training(task) as outcome:
                    outcome.model = cls(config).unlearn(task)
                count_parameters(outcome, task)
            context.about |= outcome.facts()
            if outcome.model is None or not processes.is_main():
                return
            alone = cls.info.models == 1
            if alone and any(True for _ in adapted_layers(outcome.model)):
                save_adapter(outcome.model, folder)
                return
            if alone and names != outcome.model.state_dict().keys():
                raise TypeError("the method returned a model with other tensors than Original")
            save_weights(outcome.model, folder)


def move_last_digits_(model: nn.Module, seed: int) -> None:
    """Moves every weight to a neighbouring number of its type, up or down at random, in place."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            up = torch.randint(2, parameter.shape, generator=generator).to(parameter.device)
            towards = (2 * up - 1).to(parameter.dtype) * torch.inf
            parameter.copy_(torch.nextafter(parameter, towards))


def _trajectory(context: StageContext, split: ForgetSplit, config: Any) -> EvaluateDuring:
    """Measures the model in training; its scores are stored beside the model."""
    benchmark, seed = context.benchmark, context.stage.spec.seed
    limits = getattr(config, "stop_below", None) or {}

    def evaluate(model: nn.Module, step: int) -> Mapping[str, float | None]:
        every = benchmark.parts(split, trial=False, seed=seed)
        parts = {part: every[part] for part in benchmark.monitor or every}
        scores = benchmark.watch(model, parts, limits)
        if processes.is_main():
            folder = context.scratch / TRAJECTORY
            folder.mkdir(parents=True, exist_ok=True)
            save_scores(scores, folder / f"{step:06d}.safetensors")
        return benchmark.monitored(scores, seed=seed)

    return evaluate


def _with_limits(context: StageContext, config: Any) -> Any:
    """The method's config with numbers for ``stop_below: goal`` and for values ``retrain``."""
    if "goal" not in context.stage.parents:
        return config
    measured = RunRecord.load(context.folder("goal") / RECORD).metrics
    limits: dict[str, float | None] = {}
    if config.stop_below == "goal":
        whose, rule = "Original", context.benchmark.gap_of(context.benchmark.config)
        for goal in stopping_goals(rule):
            limits[goal.metric] = goal.value(References(original=measured))
    else:
        whose = "Retrain"
        for name, limit in config.stop_below.items():
            value = measured.get(name) if limit == "retrain" else limit
            at_most = None if value is None else math.nextafter(value, math.inf)
            limits[name] = at_most if limit == "retrain" else limit
    if None in limits.values():
        unknown = ", ".join(sorted(name for name, value in limits.items() if value is None))
        raise DataError(
            f"{context.stage.name}: stop_below: {unknown} is not measured on {whose}; give values"
        )
    return config.model_copy(update={"stop_below": limits})
