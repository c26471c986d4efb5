"""The ``audit`` stage: one audit of one stored model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from stable_forgetting.benchmarks.pipeline.kinds import StageKind
from stable_forgetting.benchmarks.pipeline.measuring import AUDIT_FILE
from stable_forgetting.benchmarks.pipeline.stage import StageSpec
from stable_forgetting.common.audits import AUDITS
from stable_forgetting.common.audits.base import AuditTask, Featured, ModelAudit, NotApplicable
from stable_forgetting.common.base.config import validate
from stable_forgetting.common.base.errors import Diverged
from stable_forgetting.common.base.files import write_json
from stable_forgetting.common.data.parts import Role

if TYPE_CHECKING:
    from stable_forgetting.benchmarks.pipeline.context import StageContext


class AuditSpec(StageSpec):
    """Fields of an ``audit`` stage; ``config`` as plain values, a ``trial`` of tuning or not."""

    audit: str
    config: dict[str, Any]
    trial: bool = False


class AuditProbe(StageKind[AuditSpec]):
    """Runs one audit on a stored model; it may train the model further."""

    Spec = AuditSpec
    order = 6
    trains = True

    def work(self, context: StageContext, spec: AuditSpec) -> None:
        """Writes ``measures`` by name and ``not_applicable``, a reason or the empty string."""
        cls = AUDITS[spec.audit]
        audit: ModelAudit = cls(validate(cls.Config, spec.config, context.stage.name))
        audit.parts = context.benchmark.part_table
        task = self._task(context, spec)
        result: dict[str, Any] = {"measures": {}, "not_applicable": ""}
        with context.writing() as folder:
            try:
                measures = audit.measure(task)
                result["measures"] = {name: value.to_json() for name, value in measures.items()}
            except NotApplicable as error:
                result["not_applicable"] = error.reason
            except Diverged as error:
                result["not_applicable"] = str(error)
            write_json(folder / AUDIT_FILE, result)

    def _task(self, context: StageContext, spec: AuditSpec) -> AuditTask:
        from stable_forgetting.common.bounded.files import ADAPTER_CONFIG

        benchmark, start = context.benchmark, context.stage.parents["model"].start
        split = context.split()
        if spec.trial:  # tuning may not look at all of it
            role_of = benchmark.role_of
            parts = {p: ids for p, ids in split.parts.items() if role_of(p) is not Role.REPORT}
            split = replace(split, parts=parts)
        # an adapter on an adapter of an earlier request is not the whole update
        adapted = start is not None and start.start is None
        return AuditTask(
            load=lambda: context.model("model"),
            load_original=lambda: context.model("original"),
            adapted=adapted and (context.folder("model") / ADAPTER_CONFIG).is_file(),
            source=benchmark.source,
            split=split,
            family=benchmark,
            collect=benchmark.collect,
            collect_correct=benchmark.collect_correct,
            features=benchmark.features if isinstance(benchmark, Featured) else None,
            recipe=benchmark.recipe,
            batch_size=benchmark.evaluation_batch,
            seed=spec.seed,
            load_reference=partial(context.model, "reference")
            if "reference" in context.stage.parents
            else None,
            stored={whose: parent.key for whose, parent in context.stage.parents.items()},
        )
