"""One application: check everything, unlearn, measure, write all or nothing."""

from __future__ import annotations

import contextlib
import datetime
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stable_forgetting.benchmarks.apply.attempt import Attempt, attempt
from stable_forgetting.benchmarks.apply.checks import (
    check_applicable,
    check_application,
    configs_of,
)
from stable_forgetting.benchmarks.apply.choice import choose, hold_out
from stable_forgetting.benchmarks.apply.lineage import STATEMENT, earlier_requests
from stable_forgetting.benchmarks.apply.place import Workplace, workplace
from stable_forgetting.benchmarks.apply.relearn import relearned
from stable_forgetting.benchmarks.apply.report import reading, sections, weight_change, write_pages
from stable_forgetting.benchmarks.apply.verdict import verdict
from stable_forgetting.benchmarks.report.section import Section
from stable_forgetting.common.base import processes
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import CheckpointError, ConfigError, DataError, Diverged
from stable_forgetting.common.base.files import write_json
from stable_forgetting.common.base.registry import METHODS, SUBJECTS
from stable_forgetting.common.base.seeding import make_deterministic
from stable_forgetting.common.protocol.benchmark import check_device, pick_device
from stable_forgetting.common.protocol.subject import Application, Subject
from stable_forgetting.common.store.records import environment

if TYPE_CHECKING:
    import torch

    from stable_forgetting.common.train.protocols import Progress

SCHEMA = 2
ADAPTER = "adapter"


@dataclass(frozen=True)
class AppliedResult:
    """What became of an application.

    Attributes:
        status: ``ok``; or ``diverged``: then ``out`` holds the statement and no model.
        out: The folder that was written.
        statement: The content of ``statement.json``.
        message: One line for people.
        page: The report; empty where no model was written.
    """

    status: str
    out: Path
    statement: Mapping[str, Any]
    message: str
    page: Sequence[Section] = ()


def apply(application: Application, *, progress: Progress | None = None) -> AppliedResult:
    """Unlearns ``forget`` and writes model, adapter, statement and report into ``out``, or nothing.

    Memory: the given model and the one that is changed are held together; where several methods are
    tried, the best one so far, too.  ``progress`` is called after every step of a training.

    Raises:
        UserError: Something in the application can be mended; nothing was written.
    """
    configs = configs_of(application)
    check_application(application)
    subject = _subject(application)
    check_applicable(application, subject)
    chosen = pick_device(application.device)
    check_device(chosen)
    import torch

    device = torch.device(chosen)
    make_deterministic(application.threads)
    if processes.count() > 1:
        from stable_forgetting.common.train.launch import join_processes

        join_processes(device)
        processes.wait_for_all()  # until then nobody writes what others refuse to overwrite
    subject.load(device, [*configs.values()])
    if len(configs) > 1:
        hold_out(subject)
    return _Run(application, configs, subject, device, progress).run()


def _subject(application: Application) -> Subject:
    """The kind of subject that takes what is to be forgotten.

    Raises:
        ConfigError: None does, or an option of another kind is given.
    """
    kinds = [SUBJECTS[name] for name in SUBJECTS.names()]
    chosen = next((kind for kind in kinds if kind.takes(application.forget)), None)
    if chosen is None:
        forms = " or ".join(kind.form for kind in kinds)
        raise ConfigError(f"forget: {application.forget}: give {forms}")
    for option in application.options:
        if option not in chosen.options:
            kind = next((kind.kind for kind in kinds if option in kind.options), "nothing")
            raise ConfigError(
                f"{option} is for {kind}, and forget holds {chosen.kind}; leave it out"
            )
    return chosen(application)


class _Run:
    """One application being carried out."""

    def __init__(
        self,
        application: Application,
        configs: Mapping[str, Strict],
        subject: Subject,
        device: torch.device,
        progress: Progress | None,
    ):
        self.application, self.configs = application, configs
        self.subject, self.device = subject, device
        self.progress = progress

    def run(self) -> AppliedResult:
        statement = self._identity()
        tried = [_about(name, config) for name, config in self.configs.items()]
        with (
            workplace(self.application.out, {**statement, "methods": tried}) as place,
            _noting_warnings() as statement["warnings"],
        ):
            statement |= _circumstances()
            statement["earlier"], doubt = self._earlier()
            statement["warnings"] += [doubt] if doubt else []
            statement["before"] = self._before()
            best, statement["choice"] = self._best(statement["before"], place)
            statement["method"] |= _about(best.method, best.config)
            statement |= best.facts
            if best.model is None:
                return self._diverged(statement, best.detail, place)
            try:
                statement["after"] = self.subject.measured(best.model)
            except Diverged as error:
                return self._diverged(statement, str(error), place)
            statement["verdict"] = self._verdict(statement)
            change = weight_change(self.subject.original, best.model, best.adapters)
            statement["weight_change"] = change
            audits = self.application.audits
            statement["audits"] = relearned(self.subject, best.model) if audits else {}
            return self._write(statement, best, place)

    def _best(
        self, before: Mapping[str, Any], place: Workplace
    ) -> tuple[Attempt, dict[str, Any] | None]:
        """The only attempt, or the chosen one and how it was chosen."""
        several = len(self.configs) > 1
        trials = {
            name: partial(
                attempt,
                name,
                config,
                self.subject,
                checkpoint=place.checkpoint_of(name) if several else place.checkpoint,
                adapter=place.scratch / f"{ADAPTER}-{name}",
                progress=self.progress,
            )
            for name, config in self.configs.items()
        }
        if several:
            return choose(self.subject, before, trials)
        (run,) = trials.values()
        return run(), None

    def _verdict(self, statement: Mapping[str, Any]) -> dict[str, str]:
        """Towards the goal; without one, of some images as well as unseen ones, else 0."""
        before, key, goal = statement["before"], self.subject.yardstick, self.application.goal
        if goal is None:
            unseen = self.subject.scenario == "random" and "test" in before
            goal = before["test"][key] if unseen else 0.0
        return verdict(before, statement["after"], key, goal)

    def _earlier(self) -> tuple[list[dict[str, Any]], str]:
        subject = self.subject
        return earlier_requests(subject.weights, subject.identity()["input"]["weights_sha256"])

    def _before(self) -> dict[str, Any]:
        try:
            before = self.subject.measured(self.subject.original)
        except Diverged as error:
            raise CheckpointError(
                f"{self.subject.weights}: the model's outputs are not finite ({error.reason}); "
                "give a model that works"
            ) from None
        doubt = self.subject.doubt(before)
        if doubt and not self.application.anyway:
            raise DataError(f"{doubt} If they are as they should be, add --anyway.")
        return before

    def _diverged(self, statement: dict[str, Any], detail: str, place: Workplace) -> AppliedResult:
        statement |= {"status": "diverged", "status_detail": detail, "after": None}
        statement["reading"] = reading(statement, self.subject)
        if processes.is_main():
            with place.writing() as folder:
                write_json(folder / STATEMENT, statement)
        message = (
            f"{statement['method']['name']} {detail}; no model was written, only "
            f"{self.application.out / STATEMENT}; lower lr or steps and choose another folder"
        )
        return AppliedResult("diverged", self.application.out, statement, message)

    def _write(self, statement: dict[str, Any], best: Attempt, place: Workplace) -> AppliedResult:
        out = self.application.out
        assert best.model is not None, "only a model is written"
        if not processes.is_main():
            return AppliedResult("ok", out, {**statement, "reading": ""}, "")
        with place.writing() as folder:
            statement["output"] = self.subject.write(best.model, folder)
            if best.adapter_folder is not None:
                shutil.copytree(best.adapter_folder, folder / ADAPTER)
            statement["reading"] = reading(statement, self.subject)
            write_json(folder / STATEMENT, statement)
            page = sections(statement, self.subject, out.name)
            write_pages(page, statement, self.subject, folder)
        message = f"wrote {out}: the merged model, {STATEMENT}, README.md and report.html"
        return AppliedResult("ok", out, statement, message, page)

    def _identity(self) -> dict[str, Any]:
        application = self.application
        name, config = next(iter(self.configs.items()))
        return {
            "schema_version": SCHEMA,
            "kind": "apply",
            "status": "ok",
            "status_detail": "",
            "modality": self.subject.kind,
            **self.subject.identity(),
            "scenario": self.subject.scenario,
            "method": {**_about(name, config), "preset": application.preset},
            "seed": application.seed,
            "device": str(self.device),
        }


def _circumstances() -> dict[str, Any]:
    """What a statement says of the machine and the time."""
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"environment": environment(), "created": created}


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
