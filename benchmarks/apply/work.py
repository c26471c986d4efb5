"""One application: check everything, unlearn, measure, write all or nothing."""

from __future__ import annotations

import contextlib
import copy
import datetime
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.apply.place import Workplace, tidy, workplace
from benchmarks.apply.report import STATEMENT, reading, weight_change
from benchmarks.pipeline.unlearning import unlearned
from benchmarks.pipeline.worksite import check_device
from common.base import processes
from common.base.config import Strict, apply_overrides
from common.base.errors import CheckpointError, ConfigError, DataError, Diverged
from common.base.files import write_json
from common.base.registry import METHODS, SUBJECTS
from common.base.seeding import make_deterministic
from common.data.splits import ForgetSplit
from common.methods.base import resolve_config
from common.methods.task import UnlearnTask
from common.protocol.benchmark import pick_device
from common.protocol.subject import Application, AppliedResult, Subject
from common.store.records import environment
from common.store.stages import check_writable
from common.train.config import FitConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

    from common.train.protocols import Progress

SCHEMA = 1
ADAPTER = "adapter"


def apply(application: Application, *, progress: Progress | None = None) -> AppliedResult:
    """Unlearns ``forget`` and writes model, adapter and statement into ``out``, or nothing.

    Memory: the given model and the one that is changed are held together.  ``progress`` is called
    after every step of the training.

    Raises:
        UserError: Something in the application can be mended; nothing was written.
    """
    config = _method_config(application)
    _check_out(application.out)
    _check_access(application)
    subject = _subject(application)
    _check_applicable(application.method, subject)
    chosen = pick_device(application.device)
    check_device(chosen)
    import torch

    device = torch.device(chosen)
    make_deterministic(application.threads)
    if processes.count() > 1:
        from common.train.launch import join_processes

        join_processes(device)
        processes.wait_for_all()  # until then nobody writes what others refuse to overwrite
    subject.load(device, config)
    return _Run(application, config, subject, device, progress).run()


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


# Checks that need no model -----------------------------------------------------------------------


def _method_config(application: Application) -> Strict:
    params = apply_overrides({}, application.params)
    return resolve_config(application.method, application.preset, params, origin=application.method)


def _check_out(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        tidy(out)
        raise ConfigError(f"{out}: exists and is not an empty folder; nothing is overwritten")
    check_writable(out, "out")


def _check_access(application: Application) -> None:
    name, info = application.method, METHODS[application.method].info
    if not info.changes_model:
        raise ConfigError(f"method '{name}' changes nothing; choose one that unlearns")
    if info.models > 1:
        raise ConfigError(
            f"method '{name}' answers with {info.models} models at inference, so there is no one "
            "checkpoint to write; choose a method that changes one, such as task_vector"
        )
    if "initial" in info.access:
        raise ConfigError(
            f"method '{name}' trains from the start, which needs the original recipe; choose one "
            "that changes a given model"
        )
    if "retain" in info.access and application.retain is None:
        raise ConfigError(f"method '{name}' reads retain data; give --retain")


def _check_applicable(method: str, subject: Subject) -> None:
    info, scenario = METHODS[method].info, subject.scenario or ""
    reason = info.inapplicable(scenario=scenario, modality=subject.modality)
    if reason is not None:
        fits = info.modality in ("", subject.modality)
        asked = f"; these {subject.unit} ask for {scenario} forgetting" if fits else ""
        raise ConfigError(f"method '{method}' is {reason}{asked}; choose another")


# The work ----------------------------------------------------------------------------------------


class _GivenSplit(ForgetSplit):
    """Index sets of a user's folders: retain may be absent where the method does not read it."""

    def __post_init__(self) -> None:
        """Folders are disjoint by construction and never empty."""


class _Run:
    """One application being carried out."""

    def __init__(
        self,
        application: Application,
        config: Strict,
        subject: Subject,
        device: torch.device,
        progress: Progress | None,
    ):
        self.application, self.config = application, config
        self.subject, self.device = subject, device
        self.progress = progress

    def run(self) -> AppliedResult:
        statement = self._identity()
        with (
            workplace(self.application.out, statement) as place,
            _noting_warnings() as statement["warnings"],
        ):
            statement |= _circumstances()
            statement["before"] = self._before()
            task = self._task(place)
            outcome = unlearned(METHODS[self.application.method](self.config), task)
            statement |= {"cost": outcome.cost, "dynamics": outcome.dynamics}
            if outcome.model is None:
                return self._diverged(statement, outcome.detail, place)
            merged, adapters = self._merged(outcome.model, place.scratch)
            try:
                self._check_merged(merged)
                statement["after"] = self.subject.measured(merged)
            except Diverged as error:
                return self._diverged(statement, str(error), place)
            statement["weight_change"] = weight_change(self.subject.original, merged, adapters)
            return self._write(statement, merged, place)

    def _merged(self, model: nn.Module, scratch: Path) -> tuple[nn.Module, dict[str, float] | None]:
        """The model with adapters merged, and their statistics; they are saved in ``scratch``."""
        from common.bounded.attach import adapter_statistics, detach
        from common.bounded.files import save_adapter
        from common.bounded.layer import adapted_layers

        if not any(True for _ in adapted_layers(model)):
            return model, None
        statistics = adapter_statistics(model)
        save_adapter(model, scratch / ADAPTER)
        return detach(model), statistics

    def _task(self, place: Workplace) -> UnlearnTask:
        from common.data.access import DataAccess
        from common.train.protocols import Telemetry

        info, subject = METHODS[self.application.method].info, self.subject
        split = _GivenSplit("apply", subject.parts, subject.source.digest)
        return UnlearnTask(
            model=copy.deepcopy(subject.original),
            data=DataAccess(subject.source, split, info.access, self.application.method),
            family=subject,
            recipe=FitConfig(epochs=1),
            build=_no_fresh_model,
            seed=self.application.seed,
            telemetry=Telemetry(progress=self.progress),
            checkpoint=place.checkpoint,
        )

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

    def _check_merged(self, model: nn.Module) -> None:
        """What is written must load into the architecture that it came from, and be finite."""
        before, after = self.subject.original.state_dict(), model.state_dict()
        assert list(before) == list(after), "the method changed the architecture"
        for name, tensor in after.items():
            assert tensor.shape == before[name].shape, f"the method changed the shape of {name}"
            assert tensor.dtype == before[name].dtype, f"the method changed the type of {name}"
            if not bool(tensor.isfinite().all()):
                raise Diverged(0, f"parameter {name} is not finite")

    def _diverged(self, statement: dict[str, Any], detail: str, place: Workplace) -> AppliedResult:
        statement |= {"status": "diverged", "status_detail": detail, "after": None}
        statement["reading"] = reading(statement, self.subject)
        if processes.is_main():
            with place.writing() as folder:
                write_json(folder / STATEMENT, statement)
        message = (
            f"{self.application.method} {detail}; no model was written, only "
            f"{self.application.out / STATEMENT}; lower lr or steps and choose another folder"
        )
        return AppliedResult("diverged", self.application.out, statement, message)

    def _write(
        self, statement: dict[str, Any], merged: nn.Module, place: Workplace
    ) -> AppliedResult:
        out = self.application.out
        if not processes.is_main():
            return AppliedResult("ok", out, {**statement, "reading": ""}, "")
        with place.writing() as folder:
            statement["output"] = self.subject.write(merged, folder)
            if (place.scratch / ADAPTER).is_dir():
                shutil.copytree(place.scratch / ADAPTER, folder / ADAPTER)
            statement["reading"] = reading(statement, self.subject)
            write_json(folder / STATEMENT, statement)
        message = f"wrote {out}: the merged model and {STATEMENT}"
        return AppliedResult("ok", out, statement, message)

    def _identity(self) -> dict[str, Any]:
        application, info = self.application, METHODS[self.application.method].info
        return {
            "schema_version": SCHEMA,
            "kind": "apply",
            "status": "ok",
            "status_detail": "",
            "modality": self.subject.kind,
            **self.subject.identity(),
            "scenario": self.subject.scenario,
            "method": {
                "name": application.method,
                "version": info.version,
                "paper": info.paper,
                "preset": application.preset,
                "params": self.config.model_dump(mode="json"),
            },
            "seed": application.seed,
            "device": str(self.device),
        }


def _circumstances() -> dict[str, Any]:
    """What a statement says of the machine and the time."""
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"environment": environment(), "created": created}


def _no_fresh_model() -> nn.Module:
    raise AssertionError("refused before: no method with access to 'initial' comes here")


@contextlib.contextmanager
def _noting_warnings() -> Iterator[list[str]]:
    """Collects what the adapters warn of, such as an update that rounding swallows."""
    texts: list[str] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    handler, logger = Noting(logging.WARNING), logging.getLogger("common")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
