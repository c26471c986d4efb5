"""The ``evaluate`` stage, and how its record and scores are read."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.pipeline.kinds import StageKind
from benchmarks.pipeline.stage import ModelSpec, Stage
from common.base.errors import Diverged
from common.base.registry import METHODS
from common.store.records import RunRecord, clean_metrics, environment
from common.store.stages import StageStore

if TYPE_CHECKING:
    from benchmarks.pipeline.worksite import Worksite
    from common.data.splits import ForgetSplit
    from common.measure.scores import Scores

RECORD = "record.json"
SCORES = "scores.safetensors"


class EvaluateSpec(ModelSpec):
    """Of one model.

    Attributes:
        trial: Whether tuning asks, which must not see test data.
    """

    trial: bool


class Evaluate(StageKind[EvaluateSpec]):
    """Scores every part of a split once and measures."""

    Spec = EvaluateSpec
    order = 4

    def work(self, site: Worksite, spec: EvaluateSpec) -> None:
        """Writes the record, and the scores unless it is a trial."""
        from common.measure.scores import save_scores

        split = site.split()
        model_facts = site.facts("model")
        with site.writing() as folder:
            status, detail = model_facts["status"], model_facts.get("status_detail", "")
            metrics: dict[str, float | None] = {}
            if status == "ok":
                try:
                    parts = site.benchmark.parts(split, trial=spec.trial, seed=spec.seed)
                    model = site.model("model", exact=True).eval()
                    scores = site.benchmark.score(model, parts)
                    metrics = site.benchmark.evaluate(scores, trial=spec.trial, seed=spec.seed)
                    if not spec.trial:
                        save_scores(scores, folder / SCORES)
                except Diverged as error:
                    status, detail = "diverged", error.reason
            site.about |= {"status": status, "status_detail": detail}
            _record(site, spec, split, model_facts, metrics).save(folder / RECORD)


def _record(
    site: Worksite,
    spec: EvaluateSpec,
    split: ForgetSplit,
    model_facts: Mapping[str, Any],
    metrics: Mapping[str, float | None],
) -> RunRecord:
    keys = {site.stage.kind: site.stage.key}
    keys |= {role: parent.key for role, parent in site.stage.parents.items()}
    return RunRecord(
        status=site.about["status"],
        status_detail=site.about["status_detail"],
        benchmark=spec.benchmark,
        benchmark_version=type(site.benchmark).version,
        protocol=spec.protocol,
        method=spec.method,
        method_version=METHODS[spec.method].info.version,
        params=spec.params,
        seed=spec.seed,
        replicate=spec.replicate,
        trial=spec.trial,
        metrics=clean_metrics(metrics),
        dynamics=clean_metrics(model_facts.get("dynamics", {})),
        cost=clean_metrics(model_facts.get("cost", {})),
        split={"digest": split.digest, "name": split.name, **split.notes},
        data={"digest": split.source_digest, "provenance": site.benchmark.provenance},
        stages=keys,
        environment=environment(),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def read_record(store: StageStore, stage: Stage) -> RunRecord | None:
    """The record of an evaluated model; None while it is not done."""
    if store.done(stage.kind, stage.key) is None:
        return None
    return RunRecord.load(store.folder(stage.kind, stage.key) / RECORD)


def read_scores(store: StageStore, stage: Stage) -> dict[str, Scores]:
    """Part -> scores of an evaluated model.

    Raises:
        DataError: They are not there, or damaged.
    """
    from common.measure.scores import load_scores

    return load_scores(store.folder(stage.kind, stage.key) / SCORES)
