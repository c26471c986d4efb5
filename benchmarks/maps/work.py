"""One block of a map: train, read out, one row per cell.  Imported in the process that works."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.maps.plan import CELLS
from common.base.config import validate
from common.base.errors import DataError, Diverged
from common.base.registry import METHODS
from common.bounded.attach import adapted_layers, attach, detach
from common.bounded.phi import BOUNDED
from common.bounded.statistics import adapter_statistics
from common.data.splits import ForgetSplit
from common.methods.task import UnlearnTask
from common.protocol.benchmark import Benchmark
from common.train.batched import BatchedTraining, samples_are_independent
from common.train.protocols import Telemetry

PARTS = {"fa": "forget", "ra": "retain", "ta": "test"}
Row = dict[str, Any]
MakeTask = Callable[[frozenset[str]], UnlearnTask]


class Readout:
    """Measures models of one split, and how far they are from Original.

    Args:
        benchmark: Scores them.
        split: Its parts are those of the suite's own evaluation.
        original: Without adapters.
        seed: Of the run.
    """

    def __init__(self, benchmark: Benchmark, split: ForgetSplit, original: nn.Module, seed: int):
        everything = benchmark.parts(split, trial=False, seed=seed)
        self.parts = {part: everything[part] for part in PARTS.values()}
        self.benchmark, self.original = benchmark, original

    def metrics(self, model: nn.Module) -> Row:
        """FA, RA, TA in percent, and the mean forget loss in nats.

        Raises:
            Diverged: A score is not finite.
        """
        scores = self.benchmark.score(model.eval(), self.parts)
        for part in scores.values():
            part.check_finite()
        accuracies = {name: scores[part].accuracy for name, part in PARTS.items()}
        return {**accuracies, "forget_loss": float(scores["forget"].loss.mean(dtype="float64"))}

    def row(self, model: nn.Module, point: Sequence[float], step: int, bound: float | None) -> Row:
        """One cell; non-finite scores make it a diverged one."""
        try:
            metrics = self.metrics(model)
        except Diverged:
            return diverged_row(point, step)
        moved = self.movement(model)
        return cell_row(point, step, **metrics, delta_ratio=moved, bound_share=bound)

    @torch.no_grad()
    def movement(self, model: nn.Module) -> float:
        """||dW||_F / ||W0||_F over all matrices that differ from Original's, together."""
        if any(True for _ in adapted_layers(model)):
            return adapter_statistics(model)["delta_ratio"]
        moved = base = 0.0
        before = dict(self.original.named_parameters())
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and not torch.equal(parameter, before[name]):
                moved += float((parameter - before[name]).double().square().sum())
                base += float(before[name].double().square().sum())
        return math.sqrt(moved / base) if base else 0.0


def cell_row(point: Sequence[float], step: int, **values: float | None) -> Row:
    """A cell's row of the JSON lines."""
    return {"lr": point[0], "lam": point[1], "step": step, **values, "nonfinite": False}


def diverged_row(point: Sequence[float], step: int) -> Row:
    """A cell without numbers: divergence is a status, never an accuracy."""
    names = ("fa", "ra", "ta", "forget_loss", "delta_ratio", "bound_share")
    return {**cell_row(point, step), **dict.fromkeys(names), "nonfinite": True}


def run_block(
    spec: Mapping[str, Any],
    benchmark: Benchmark,
    split: ForgetSplit,
    original: nn.Module,
    make_task: MakeTask,
    folder: Path,
) -> None:
    """Runs every config of a block and writes its cells.

    Args:
        spec: Of the stage: method, points, params, steps, seed, together.
        benchmark: The protocol.
        split: The index sets.
        original: Trained, without adapters; left alone.
        make_task: Access -> a task on a fresh copy of Original.
        folder: Where ``cells.jsonl`` goes.
    """
    cls = METHODS[spec["method"]]
    reason = cls.info.inapplicable(scenario=benchmark.scenario, modality=benchmark.modality)
    if reason is not None:
        raise DataError(f"method '{spec['method']}' is {reason}; remove the row")
    name = f"map of {spec['method']}"
    configs = [validate(cls.Config, params, name) for params in spec["params"]]
    readout = Readout(benchmark, split, original, spec["seed"])
    if spec["together"] and samples_are_independent(original):
        rows = _together(spec, configs, readout, make_task(cls.info.access))
    else:
        rows = []
        for point, config in zip(spec["points"], configs, strict=True):
            rows += _alone(spec, cls, config, point, readout, make_task(cls.info.access))
    rows.sort(key=lambda row: (row["lr"], row["lam"], row["step"]))
    lines = (json.dumps(row, allow_nan=False) + "\n" for row in rows)
    (folder / CELLS).write_text("".join(lines), encoding="utf-8")


def _together(
    spec: Mapping[str, Any], configs: Sequence[Any], readout: Readout, task: UnlearnTask
) -> list[Row]:
    """All configs in one forward, read out at every step that is asked for."""
    first, plain = configs[0], copy.deepcopy(task.model)
    engine = first.engine()
    loaders = task.loaders(("retain", "forget"), engine)
    targets = first.adapter.targets or task.family.targets[first.adapter.placement]
    attach(task.model, targets, first.adapter, task.generator("adapter"))
    training = BatchedTraining(
        task.model,
        loaders,
        engine,
        forward=task.forward,
        rates=[config.engine().lr for config in configs],
        weights=[config.lam for config in configs],
        total=max(spec["steps"]),
        forget_loss=first.forget_loss,
        ball=first.ball,
        weight_clip=first.weight_clip,
    )
    rows = []
    for step in spec["steps"]:
        training.run_to(step)
        shares = _bound_shares(training, first)
        for run, point in enumerate(spec["points"]):
            if not training.finite(run):
                rows.append(diverged_row(point, step))
                continue
            training.write_(plain, run)
            rows.append(readout.row(plain, point, step, shares[run]))
    return rows


def _bound_shares(training: BatchedTraining, config: Any) -> Sequence[float | None]:
    if config.ball is not None:
        return training.at_ball
    if config.adapter.phi in BOUNDED:
        return training.bound_active()
    return [None] * training.copies


class _AtBall:
    """A sink that keeps the mean share of layers at the ball over the logged steps."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Notes the share where there is one."""
        if "adapter/at_ball" in values:
            self.shares.append(values["adapter/at_ball"])

    def share(self, model: nn.Module) -> float | None:
        """At the ball, or inside an entrywise bound; None where there is no bound."""
        if self.shares:
            return math.fsum(self.shares) / len(self.shares)
        layers = [layer for _, layer in adapted_layers(model)]
        if layers and layers[0].config.phi in BOUNDED:
            return adapter_statistics(model)["bound_active"]
        return None


def _alone(
    spec: Mapping[str, Any],
    cls: Any,
    config: Any,
    point: Sequence[float],
    readout: Readout,
    task: UnlearnTask,
) -> list[Row]:
    """One config through the method itself; a step that never came is the final model's."""
    found: dict[int, Row] = {}
    sink = _AtBall()

    def evaluate(model: nn.Module, step: int) -> Mapping[str, float | None]:
        if step in spec["steps"]:
            found[step] = readout.row(model, point, step, sink.share(model))
        return {}

    task.telemetry = Telemetry(tracker=sink, evaluate_during=evaluate)
    every = math.gcd(*spec["steps"])
    timed = config.model_copy(update={"evaluate_every": every})
    try:
        model = cls(timed).unlearn(task)
        share = sink.share(model)
        missing = [step for step in spec["steps"] if step not in found]
        final = detach(model) if missing else model
        found |= {step: readout.row(final, point, step, share) for step in missing}
    except Diverged:
        missing = [step for step in spec["steps"] if step not in found]
        found |= {step: diverged_row(point, step) for step in missing}
    return [found[step] for step in spec["steps"]]
