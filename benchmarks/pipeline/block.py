"""The configs of one block of a grid: train, read out, one row per cell.  Needs torch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from stable_forgetting.benchmarks.pipeline.unlearning import training
from stable_forgetting.common.base.config import validate
from stable_forgetting.common.base.errors import Diverged
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.bounded.attach import attach, chosen_layers, detach
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.bounded.layer import adapted_layers
from stable_forgetting.common.bounded.peft import merge_peft
from stable_forgetting.common.bounded.phi import PHIS
from stable_forgetting.common.bounded.statistics import adapter_statistics, shares_beyond
from stable_forgetting.common.data.splits import ForgetSplit
from stable_forgetting.common.methods.gradient import adapter_targets
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.protocol.benchmark import Benchmark
from stable_forgetting.common.train.batched import BatchedTraining, samples_are_independent
from stable_forgetting.common.train.precision import in_low_precision
from stable_forgetting.common.train.protocols import Telemetry

if TYPE_CHECKING:
    from stable_forgetting.benchmarks.pipeline.sweeping import GridSpec

TURNED = math.pi / 2
"""Argument of phi from which a sine turns back."""
CellRow = dict[str, Any]
MakeTask = Callable[[frozenset[str]], UnlearnTask]


class Shares(NamedTuple):
    """How much of a bound acts; see :class:`benchmarks.pipeline.cells.Cell`."""

    bound_share: float | None = None
    turned_share: float | None = None


class Readout:
    """Measures models of one split as the suite does, and how far they are from Original."""

    def __init__(self, benchmark: Benchmark, split: ForgetSplit, original: nn.Module, seed: int):
        assert benchmark.sweep_axes is not None
        self.axes, self.seed = benchmark.sweep_axes, seed
        everything = benchmark.parts(split, trial=False, seed=seed)
        self.parts = {part: everything[part] for part in self.axes.parts or everything}
        self.benchmark, self.original = benchmark, original

    def metrics(self, model: nn.Module) -> CellRow:
        """What sweeps of the benchmark judge.

        Raises:
            Diverged: A score is not finite.
        """
        scores = self.benchmark.score(model.eval(), self.parts, trial=self.axes.as_trial)
        return self.benchmark.sweep_metrics(scores, seed=self.seed)

    def row(self, model: nn.Module, point: Sequence[float], step: int, bound: Shares) -> CellRow:
        """One cell; non-finite scores make it a diverged one."""
        try:
            metrics = self.metrics(model)
        except Diverged:
            return self.diverged(point, step)
        moved = self.movement(model)
        return cell_row(point, step, **metrics, delta_ratio=moved, **bound._asdict())

    def diverged(self, point: Sequence[float], step: int) -> CellRow:
        """A cell without numbers: divergence is a status, never a value."""
        names = (*self.axes.metrics, "delta_ratio", *Shares._fields)
        return {**cell_row(point, step), **dict.fromkeys(names), "nonfinite": True}

    @torch.no_grad()
    def movement(self, model: nn.Module) -> float:
        """||dW||_F / ||W0||_F over all matrices that differ from Original's, together."""
        if any(True for _ in adapted_layers(model)):
            return adapter_statistics(model)["delta_ratio"]
        moved = base = 0.0
        before, now = (dict(each.named_parameters()) for each in (self.original, model))
        if now.keys() != before.keys():  # of layers that are not ours, which keep dW apart
            now = dict(merge_peft(copy.deepcopy(model)).named_parameters())
        for name, parameter in now.items():
            if parameter.ndim >= 2 and not torch.equal(parameter, before[name]):
                moved += float((parameter - before[name]).double().square().sum())
                base += float(before[name].double().square().sum())
        return math.sqrt(moved / base) if base else 0.0


def cell_row(point: Sequence[float], step: int, **values: float | None) -> CellRow:
    """A cell's row of the JSON lines."""
    return {"lr": point[0], "lam": point[1], "step": step, **values, "nonfinite": False}


def run_block(spec: GridSpec, readout: Readout, make_task: MakeTask) -> list[CellRow]:
    """Runs every config of a block; the cells in the order of rate, weight and step.

    ``make_task`` gives a task on a fresh copy of Original.
    """
    cls = METHODS[spec.method]
    configs = [validate(cls.Config, params, f"grid of {spec.method}") for params in spec.params]
    original = readout.original
    alike = samples_are_independent(original) and not in_low_precision(original)
    task = make_task(cls.info.access) if spec.together and alike else None
    if task is not None and _on_linear_layers(task, configs[0].adapter):
        rows = _together(spec, configs, readout, task)
    else:
        rows = []
        for point, config in zip(spec.points, configs, strict=True):
            rows += _alone(spec, cls, config, point, readout, make_task(cls.info.access))
    return sorted(rows, key=lambda row: (row["lr"], row["lam"], row["step"]))


def _on_linear_layers(task: UnlearnTask, adapter: AdapterConfig) -> bool:
    """Whether the adapters would be on plain linear layers alone, which copies can share."""
    patterns = adapter_targets(task, adapter.placement, adapter.targets)
    layers = (task.model.get_submodule(name) for name in chosen_layers(task.model, patterns))
    return all(type(layer) is nn.Linear for layer in layers)


def _together(
    spec: GridSpec, configs: Sequence[Any], readout: Readout, task: UnlearnTask
) -> list[CellRow]:
    """All configs in one forward, read out at every step that is asked for."""
    first, plain = configs[0], copy.deepcopy(task.model)
    engine = first.engine()
    loaders = task.loaders(("retain", "forget"), engine)
    targets = adapter_targets(task, first.adapter.placement, first.adapter.targets)
    attach(task.model, targets, first.adapter, task.generator("adapter"))
    training = BatchedTraining(
        task.model,
        loaders,
        engine,
        forward=task.forward,
        rates=[config.engine().lr for config in configs],
        weights=[config.forget_weight for config in configs],
        total=max(spec.steps),
        forget_loss=first.forget_loss,
        ball=first.ball,
        weight_clip=first.weight_clip,
    )
    rows = []
    for step in spec.steps:
        training.run_to(step)
        shares = _bound_shares(training, first)
        for run, point in enumerate(spec.points):
            if not training.finite(run):
                rows.append(readout.diverged(point, step))
                continue
            training.write_(plain, run)
            rows.append(readout.row(plain, point, step, shares[run]))
    return rows


def _bound_shares(training: BatchedTraining, config: Any) -> Sequence[Shares]:
    if config.ball is not None:
        return [Shares(share) for share in training.at_ball]
    if PHIS[config.adapter.phi].bounded:
        bound = next(iter(training.layers.values())).bound
        return [Shares(*pair) for pair in training.shares_beyond((bound.curved_from, TURNED))]
    return [Shares()] * training.copies


class _AtBall:
    """A sink that keeps the mean share of layers at the ball over the logged steps."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Notes the share where there is one."""
        if "adapter/at_ball" in values:
            self.shares.append(values["adapter/at_ball"])

    def rewind(self, step: int) -> None:
        """Drops all: without a checkpoint a run begins at the beginning."""
        self.shares.clear()

    def share(self, model: nn.Module) -> Shares:
        """At the ball, or inside an entrywise bound; nothing where there is no bound."""
        if self.shares:
            return Shares(math.fsum(self.shares) / len(self.shares))
        layers = [layer for _, layer in adapted_layers(model)]
        if layers and layers[0].bound.record.bounded:
            return Shares(*shares_beyond(model, (layers[0].bound.curved_from, TURNED)))
        return Shares()


def _alone(
    spec: GridSpec,
    cls: Any,
    config: Any,
    point: Sequence[float],
    readout: Readout,
    task: UnlearnTask,
) -> list[CellRow]:
    """One config through the method itself; a step that never came is the final model's."""
    rows: dict[int, CellRow] = {}
    sink = _AtBall()

    def evaluate(model: nn.Module, step: int) -> Mapping[str, float | None]:
        if step in spec.steps:
            rows[step] = readout.row(model, point, step, sink.share(model))
        return {}

    task.telemetry = Telemetry(tracker=sink, evaluate_during=evaluate)
    often: dict[str, int | None] = {"evaluate_every": math.gcd(*spec.steps)}
    if "evaluate_epochs" in cls.Config.model_fields:
        often["evaluate_epochs"] = None
    timed = config.model_copy(update=often)
    with training(task) as outcome:
        outcome.model = cls(timed).unlearn(task)
    model = outcome.model
    missing = [step for step in spec.steps if step not in rows]
    if model is None:
        rows |= {step: readout.diverged(point, step) for step in missing}
    elif missing:
        share, final = sink.share(model), detach(model)
        rows |= {step: readout.row(final, point, step, share) for step in missing}
    return [rows[step] for step in spec.steps]
