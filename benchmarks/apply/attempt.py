"""An application is carried out: its methods run on the user's model, and what comes of it."""

from __future__ import annotations

import contextlib
import datetime
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stable_forgetting.benchmarks.apply.place import Workplace, earlier_requests, workplace
from stable_forgetting.benchmarks.apply.relearn import relearned
from stable_forgetting.benchmarks.apply.report import reading, verdict, weight_change
from stable_forgetting.benchmarks.apply.result import SCHEMA, Result
from stable_forgetting.benchmarks.pipeline.unlearning import count_parameters, training
from stable_forgetting.common.base import processes
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import CheckpointError, DataError, Diverged
from stable_forgetting.common.base.registry import METHODS, plugin_code
from stable_forgetting.common.bounded.attach import detach
from stable_forgetting.common.bounded.files import AdapterState, adapter_state
from stable_forgetting.common.bounded.layer import adapted_layers, warn_of_loss
from stable_forgetting.common.bounded.statistics import adapter_statistics
from stable_forgetting.common.data.access import DataAccess
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.protocol.given import SEEN, VALIDATION, Application, GivenBenchmark
from stable_forgetting.common.store.records import environment
from stable_forgetting.common.store.stages import ENGINE_VERSION
from stable_forgetting.common.train.protocols import Progress, Telemetry


@dataclass
class Attempt:
    """What came of one method.

    Attributes:
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
    """Runs a method on a copy of the given model; without a ``checkpoint`` none is written."""
    seed, access = benchmark.config.seed, METHODS[method].info.access
    model = benchmark.blank()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    task = UnlearnTask(
        model=model,
        data=DataAccess(benchmark.source, benchmark.split(seed), access, method),
        family=benchmark,
        recipe=benchmark.recipe,
        build=partial(benchmark.build, seed),
        seed=seed,
        telemetry=Telemetry(progress=progress),
        checkpoint=checkpoint,
    )
    with training(task) as outcome:
        outcome.model = METHODS[method](config).unlearn(task)
    count_parameters(outcome, task)
    facts = {"cost": outcome.cost, "dynamics": outcome.dynamics}
    result = Attempt(method, config, facts, detail=outcome.detail)
    if outcome.model is None:
        return result
    if any(True for _ in adapted_layers(outcome.model)):
        result.adapter = adapter_state(outcome.model)
        result.adapters = adapter_statistics(outcome.model)
    merged = detach(outcome.model)
    for name, parameter in merged.named_parameters():  # a method may have frozen some
        parameter.requires_grad_(name in trained)
    try:
        squares = _settle(merged, benchmark)
        if result.adapter is not None:
            warn_of_loss(squares)
        _check_merged(merged, benchmark.original)
        result.model = merged
    except Diverged as error:
        result.detail = str(error)
    return result


def _settle(model: nn.Module, benchmark: GivenBenchmark) -> Tensor:
    """Gives the weights the precision in which they will be written, in place.

    So what is measured is what is written.  Gives (3,) squared norms: of the given weights, of the
    update, of what rounding takes from it.
    """
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
    return squares


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
    """Part -> measure -> value, and measures of the model as a whole.

    A ``trial``, by which methods are chosen, looks at no test data.

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
    """Runs every trial: the best attempt, and the statement's ``choice``.

    The distance is the mean of how far the yardstick is from the goal on forget data, and of how
    far it fell on validation data; of equal ones the first is taken.
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


@dataclass
class Run:
    """One application being carried out."""

    benchmark: GivenBenchmark
    configs: Mapping[str, Strict]
    device: torch.device
    progress: Progress | None

    @property
    def application(self) -> Application:
        """What was asked."""
        return self.benchmark.config

    def run(self) -> Result:
        """What became of it, written where that was asked."""
        statement, out = self._identity(), self.application.out
        if out is None:
            return self._run(statement, None)
        tried = [_about(name, config) for name, config in self.configs.items()]
        code = [ENGINE_VERSION, *plugin_code(tried)]
        with workplace(out, {**statement, "methods": tried, "code": code}) as place:
            result = self._run(statement, place)
            if not processes.is_main():
                return replace(result, out=out)
            with place.writing() as folder:
                return replace(result.write(folder, out.name), out=out)

    def _run(self, statement: dict[str, Any], place: Workplace | None) -> Result:
        with _noting_warnings() as statement["warnings"]:
            created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            statement |= {"environment": environment(), "created": created}
            statement["earlier"], doubt = self._earlier()
            statement["warnings"] += [doubt] if doubt else []
            statement["before"] = self._before()
            best, statement["choice"] = self._best(statement["before"], place)
            statement["method"] |= _about(best.method, best.config)
            statement |= best.facts
            if best.model is None:
                return self._diverged(statement, best.detail)
            try:
                statement["after"] = measured(self.benchmark, best.model)
            except Diverged as error:
                return self._diverged(statement, str(error))
            statement["verdict"] = self._verdict(statement)
            change = weight_change(self.benchmark.original, best.model, best.adapters)
            statement["weight_change"] = change
            audits = self.application.audits
            statement["audits"] = relearned(self.benchmark, best.model) if audits else {}
            statement["reading"] = reading(statement, self.benchmark)
            return Result("ok", statement, self.benchmark, best.model, best.adapter)

    def _best(
        self, before: Mapping[str, Any], place: Workplace | None
    ) -> tuple[Attempt, dict[str, Any] | None]:
        """The only attempt, or the chosen one and how it was chosen."""
        several = len(self.configs) > 1
        trials = {
            name: partial(
                attempt,
                name,
                config,
                self.benchmark,
                checkpoint=None if place is None else place.checkpoint_of(name if several else ""),
                progress=self.progress,
            )
            for name, config in self.configs.items()
        }
        if several:
            return choose(self.benchmark, before, trials)
        (run,) = trials.values()
        return run(), None

    def _verdict(self, statement: Mapping[str, Any]) -> dict[str, str]:
        """Towards the goal; without one, of some images as well as unseen ones, else 0."""
        before, key, goal = statement["before"], self.benchmark.yardstick, self.application.goal
        if goal is None:
            unseen = before.get("test", {}).get(key)
            goal = unseen if self.benchmark.scenario == "random" else 0.0
        return verdict(before, statement["after"], key, goal)

    def _earlier(self) -> tuple[list[dict[str, Any]], str]:
        if not isinstance(self.application.model, Path):
            return [], ""
        digest = self.benchmark.about()["input"]["weights_sha256"]
        return earlier_requests(self.benchmark.given.weights, digest)

    def _before(self) -> dict[str, Any]:
        try:
            before = measured(self.benchmark, self.benchmark.original)
        except Diverged as error:
            weights = self.benchmark.given.weights
            raise CheckpointError(
                f"{weights}: the model's outputs are not finite ({error.reason}); "
                "give a model that works, or samples without NaN"
            ) from None
        doubt = self.benchmark.doubt(before)
        if doubt and not self.application.anyway:
            raise DataError(f"{doubt} If they are as they should be, add --anyway (anyway=True).")
        return before

    def _diverged(self, statement: dict[str, Any], detail: str) -> Result:
        statement |= {"status": "diverged", "status_detail": detail, "after": None}
        statement["reading"] = reading(statement, self.benchmark)
        return Result("diverged", statement, self.benchmark)

    def _identity(self) -> dict[str, Any]:
        name, config = next(iter(self.configs.items()))
        return {
            "schema_version": SCHEMA,
            "kind": "apply",
            "status": "ok",
            "status_detail": "",
            "modality": self.benchmark.kind,
            **self.benchmark.about(),
            "scenario": self.benchmark.scenario or None,
            "method": {**_about(name, config), "preset": self.application.preset},
            "seed": self.application.seed,
            "device": str(self.device),
        }


def _about(method: str, config: Strict) -> dict[str, Any]:
    """What a statement says of a method."""
    info = METHODS[method].info
    about = {"name": method, "version": info.version, "paper": info.paper}
    return {**about, "params": config.model_dump(mode="json")}


@contextlib.contextmanager
def _noting_warnings() -> Iterator[list[str]]:
    """Collects what the adapters warn of, such as an update that rounding swallows."""
    texts: list[str] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    handler, logger = Noting(logging.WARNING), logging.getLogger("stable_forgetting.common")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
