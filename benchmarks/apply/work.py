"""One application: check everything, unlearn, measure, write all or nothing."""

from __future__ import annotations

import contextlib
import datetime
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stable_forgetting.benchmarks.apply.attacked import relearned
from stable_forgetting.benchmarks.apply.attempt import Attempt, attempt, choose, measured
from stable_forgetting.benchmarks.apply.checks import (
    benchmark_of,
    check_applicable,
    check_application,
    configs_of,
)
from stable_forgetting.benchmarks.apply.place import Workplace, earlier_requests, workplace
from stable_forgetting.benchmarks.apply.report import reading, verdict, weight_change
from stable_forgetting.benchmarks.apply.result import Result
from stable_forgetting.common.base import processes
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import CheckpointError, DataError, Diverged
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.base.seeding import make_deterministic
from stable_forgetting.common.protocol.benchmark import check_device, pick_device
from stable_forgetting.common.protocol.given import Application, GivenBenchmark
from stable_forgetting.common.store.records import environment

if TYPE_CHECKING:
    import torch

    from stable_forgetting.common.train.protocols import Progress


SCHEMA = 2


def apply(application: Application, *, progress: Progress | None = None) -> Result:
    """Unlearns ``forget``; writes model, adapter, statement and report into ``out``, or nothing.

    Memory: the given model and the one that is changed are held together; where several methods are
    tried, the best one so far, too.  ``progress`` is called after every step of a training.

    Raises:
        UserError: Something in the application can be mended; nothing was written.
    """
    configs = configs_of(application)
    check_application(application)
    benchmark = benchmark_of(application)
    check_applicable(application, benchmark)
    chosen = pick_device(application.device)
    check_device(chosen)
    import torch

    device = torch.device(chosen)
    make_deterministic(application.threads)
    if processes.count() > 1:
        from stable_forgetting.common.train.launch import join_processes

        join_processes(device)
        processes.wait_for_all()  # until then nobody writes what others refuse to overwrite
    benchmark.prepare(device, [*configs.values()])
    benchmark.split(application.seed)
    return _Run(benchmark, configs, device, progress).run()


@dataclass
class _Run:
    """One application being carried out."""

    benchmark: GivenBenchmark
    configs: Mapping[str, Strict]
    device: torch.device
    progress: Progress | None

    @property
    def application(self) -> Application:
        return self.benchmark.config

    def run(self) -> Result:
        statement, out = self._identity(), self.application.out
        if out is None:
            return self._run(statement, None)
        tried = [_about(name, config) for name, config in self.configs.items()]
        with workplace(out, {**statement, "methods": tried}) as place:
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
            unseen = self.benchmark.scenario == "random" and "test" in before
            goal = before["test"][key] if unseen else 0.0
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
                "give a model that works"
            ) from None
        doubt = self.benchmark.doubt(before)
        if doubt and not self.application.anyway:
            raise DataError(f"{doubt} If they are as they should be, add --anyway.")
        return before

    def _diverged(self, statement: dict[str, Any], detail: str) -> Result:
        statement |= {"status": "diverged", "status_detail": detail, "after": None}
        statement["reading"] = reading(statement, self.benchmark)
        return Result("diverged", statement, self.benchmark)

    def _identity(self) -> dict[str, Any]:
        application = self.application
        name, config = next(iter(self.configs.items()))
        return {
            "schema_version": SCHEMA,
            "kind": "apply",
            "status": "ok",
            "status_detail": "",
            "modality": self.benchmark.kind,
            **self.benchmark.about(),
            "scenario": self.benchmark.scenario or None,
            "method": {**_about(name, config), "preset": application.preset},
            "seed": application.seed,
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
