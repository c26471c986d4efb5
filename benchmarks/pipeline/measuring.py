"""The ``measure`` stage: metrics of stored scores; and how records and scores are read."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from stable_forgetting.benchmarks.pipeline.kinds import StageKind
from stable_forgetting.benchmarks.pipeline.scoring import SCORES
from stable_forgetting.benchmarks.pipeline.stage import ASSUMED, PRETRAINED, ModelSpec, Placed
from stable_forgetting.common.base.errors import DataError, Diverged
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.measure.goal import References, Role
from stable_forgetting.common.measure.rules import Rule
from stable_forgetting.common.store.records import RECORD, RunRecord, clean_metrics, environment
from stable_forgetting.common.store.stages import StageStore

if TYPE_CHECKING:
    from stable_forgetting.benchmarks.pipeline.worksite import Worksite
    from stable_forgetting.common.measure.scores import Scores

T = TypeVar("T")


class MeasureSpec(ModelSpec):
    """Of one model.

    Attributes:
        trial: Whether tuning asks, which must not see test data.
    """

    trial: bool


class Measure(StageKind[MeasureSpec]):
    """Computes the benchmark's metrics from stored scores; runs no model and reads no data."""

    Spec = MeasureSpec
    order = 5

    def work(self, site: Worksite, spec: MeasureSpec) -> None:
        """Writes the record."""
        from stable_forgetting.common.measure.scores import load_scores

        facts = site.facts("scores")
        status, detail = facts["status"], facts.get("status_detail", "")
        metrics: dict[str, float | None] = {}
        with site.writing() as folder:
            if status == "ok":
                scores = load_scores(site.folder("scores") / SCORES)
                try:
                    metrics = site.benchmark.evaluate(scores, trial=spec.trial, seed=spec.seed)
                except Diverged as error:
                    status, detail = "diverged", error.reason
            site.about |= {"status": status, "status_detail": detail}
            _record(site, spec, metrics).save(folder / RECORD)


def _record(site: Worksite, spec: MeasureSpec, metrics: dict[str, float | None]) -> RunRecord:
    scores, model = site.facts("scores"), site.facts("model")
    keys = {site.stage.kind: site.stage.key}
    keys |= {role: parent.key for role, parent in site.stage.parents.items()}
    reference = site.reference_facts("model")
    origin = {"trained_on": ASSUMED} if reference.get("trained_on") == ASSUMED else {}
    if PRETRAINED in reference:
        origin[PRETRAINED] = reference[PRETRAINED]
    return RunRecord(
        status=site.about["status"],
        status_detail=site.about["status_detail"],
        benchmark=spec.benchmark,
        benchmark_version=site.benchmark.versions.measure,
        protocol=spec.protocol,
        method=spec.method,
        method_version=METHODS[spec.method].info.version,
        params=spec.params,
        seed=spec.seed,
        replicate=spec.replicate,
        trial=spec.trial,
        metrics=clean_metrics(metrics),
        dynamics=clean_metrics(model.get("dynamics", {})),
        cost=clean_metrics(model.get("cost", {})),
        stopped=model.get("stopped", ""),
        split=scores["split"],
        data={**scores["data"], **origin},
        stages=keys,
        environment=environment() | site.hardware,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def read_record(store: StageStore, stage: Placed) -> RunRecord | None:
    """The record of an evaluated model; None while it is not done."""
    if store.done(stage.kind, stage.key) is None:
        return None
    return RunRecord.load(store.checked(stage.kind, stage.key, RECORD) / RECORD)


def read_stored(store: StageStore, stage: Placed, file: str, parse: Callable[[str], T]) -> T | None:
    """What ``parse`` makes of the text of a stage's file; None while the stage is not done.

    Raises:
        DataError: The file is not there, or damaged.
    """
    if store.done(stage.kind, stage.key) is None:
        return None
    path = store.checked(stage.kind, stage.key, file) / file
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, LookupError, TypeError):
        raise DataError(f"{path}: damaged; delete {path.parent} and rerun") from None


def read_scores(store: StageStore, stage: Placed) -> dict[str, Scores]:
    """Part -> the scores that a record was measured from.

    Raises:
        DataError: They are not there, or damaged.
    """
    from stable_forgetting.common.measure.scores import load_scores

    scores = stage.parents["scores"]
    return load_scores(store.checked(scores.kind, scores.key, SCORES) / SCORES)


def references(records: Mapping[Role, RunRecord | None]) -> References:
    """The metrics of reference models; those that diverged or are not there have none."""
    metrics = {
        r: record.metrics for r, record in records.items() if record and record.status == "ok"
    }
    return References(metrics.get("original"), metrics.get("retrain"))


def trial_gap(record: RunRecord, targets: References, rule: Rule) -> float:
    """A trial's distance by the rule; infinite if it diverged or is unknown."""
    if record.status != "ok":
        return math.inf
    distance = rule.distance(record.metrics, targets, trial=True)
    return math.inf if distance is None else distance
