"""Stages that split, score, measure and probe; and how their files are read."""

from __future__ import annotations

import datetime
import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from stable_forgetting.benchmarks.pipeline.kinds import StageKind
from stable_forgetting.benchmarks.pipeline.stage import (
    ASSUMED,
    PRETRAINED,
    ModelSpec,
    Placed,
    StageSpec,
)
from stable_forgetting.common.audits import base as audits
from stable_forgetting.common.base.errors import DataError, Diverged
from stable_forgetting.common.base.files import write_json
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.data.splits import (
    ForgetSplit,
    half_split,
    request_split,
    unseen_split,
)
from stable_forgetting.common.measure.goal import References, Role
from stable_forgetting.common.measure.rules import Rule, TargetRule
from stable_forgetting.common.measure.scores import Scores, load_scores, save_scores, without_probs
from stable_forgetting.common.protocol.probe import ProbeTable, make_probe
from stable_forgetting.common.store.records import RECORD, RunRecord, clean_metrics, environment
from stable_forgetting.common.store.stages import StageStore

if TYPE_CHECKING:
    from stable_forgetting.benchmarks.pipeline.context import StageContext


T = TypeVar("T")


class ScoreSpec(StageSpec):
    """Of one model.

    Attributes:
        trial: Whether tuning asks, which must not see test data.
    """

    trial: bool


class MeasureSpec(ModelSpec, ScoreSpec):
    """Of one model's scores."""


class Measure(StageKind[MeasureSpec]):
    """Computes the benchmark's metrics from stored scores; runs no model and reads no data."""

    Spec = MeasureSpec
    order = 5

    def work(self, context: StageContext, spec: MeasureSpec) -> None:
        """Writes the record."""
        facts = context.facts("scores")
        status, detail = facts["status"], facts.get("status_detail", "")
        metrics: dict[str, float | None] = {}
        with context.writing() as folder:
            if status == "ok":
                scores = load_scores(context.folder("scores") / SCORES)
                try:
                    metrics = context.benchmark.evaluate(scores, trial=spec.trial, seed=spec.seed)
                except Diverged as error:
                    status, detail = "diverged", error.reason
            context.about |= {"status": status, "status_detail": detail}
            _record(context, spec, metrics).save(folder / RECORD)


def _record(
    context: StageContext, spec: MeasureSpec, metrics: dict[str, float | None]
) -> RunRecord:
    scores, model = context.facts("scores"), context.facts("model")
    keys = {context.stage.kind: context.stage.key}
    keys |= {role: parent.key for role, parent in context.stage.parents.items()}
    reference = context.facts_of(context.stage.parents["model"].first)
    origin = {"trained_on": ASSUMED} if reference.get("trained_on") == ASSUMED else {}
    if PRETRAINED in reference:
        origin[PRETRAINED] = reference[PRETRAINED]
    return RunRecord(
        status=context.about["status"],
        status_detail=context.about["status_detail"],
        benchmark=spec.benchmark,
        benchmark_version=context.benchmark.versions.measure,
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
        environment=environment() | context.hardware,
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


AUDIT_FILE = "audit.json"


def read_attack(store: StageStore, stage: Placed) -> audits.Measures | str | None:
    """What an attack measured, or why it has no meaning; None while the stage is not done."""

    def parse(text: str) -> audits.Measures | str:
        content = json.loads(text)
        measures = {name: audits.Measure.from_json(v) for name, v in content["measures"].items()}
        return content["not_applicable"] or measures

    return read_stored(store, stage, AUDIT_FILE, parse)


def read_scores(store: StageStore, stage: Placed) -> dict[str, Scores]:
    """Part -> the scores that a record was measured from."""
    scores = stage.parents["scores"]
    return load_scores(store.checked(scores.kind, scores.key, SCORES) / SCORES)


def references(records: Mapping[Role, RunRecord | None]) -> References:
    """The metrics of reference models; those that diverged or are not there have none."""
    good = {r: record.metrics for r, record in records.items() if record and record.status == "ok"}
    return References(good.get("original"), good.get("retrain"))


def trial_gap(record: RunRecord, targets: References, rule: Rule | TargetRule) -> float:
    """A trial's distance by the rule; infinite if it diverged or is unknown."""
    if record.status != "ok":
        return math.inf
    distance = rule.distance(record.metrics, targets, trial=True)
    return math.inf if distance is None else distance


SPLIT_FILE = "split.safetensors"


class SplitSpec(StageSpec):
    """Which split of a seed.

    Attributes:
        half: Number of a random half of the forget set, the other half being unseen.
        request: Number of one of several forget requests that together are the forget set.
        unseen: Part that takes the place of the forget set.
    """

    half: int | None = None
    request: int | None = None
    requests: int | None = None
    unseen: str | None = None


class Split(StageKind[SplitSpec]):
    """Freezes the index sets."""

    Spec = SplitSpec
    order = 0

    def work(self, context: StageContext, spec: SplitSpec) -> None:
        """Writes the index sets, with their digest and sizes as facts."""
        from stable_forgetting.common.data.batch import class_labels

        split = context.benchmark.split(spec.seed)
        if spec.half is not None:
            split = half_split(split, spec.seed, spec.half)
        elif spec.request is not None and spec.requests is not None:
            labels = functools.partial(class_labels, context.benchmark.source)
            split = request_split(split, labels, spec.seed, spec.request, spec.requests)
        elif spec.unseen is not None:
            split = unseen_split(split, spec.unseen)
        with context.writing() as folder:
            split.save(folder / SPLIT_FILE)
            context.about |= {
                "split": split.digest,
                "data": split.source_digest,
                "sizes": {part: len(ids) for part, ids in split.parts.items()},
            }


def read_split(store: StageStore, stage: Placed) -> ForgetSplit | None:
    """The index sets of a split stage; None while it is not done."""
    if store.done(stage.kind, stage.key) is None:
        return None
    return ForgetSplit.load(store.folder(stage.kind, stage.key) / SPLIT_FILE)


SCORES = "scores.safetensors"


class Score(StageKind[ScoreSpec]):
    """Scores every part of a split once."""

    Spec = ScoreSpec
    order = 4
    facts = ("status", "split", "data")

    def work(self, context: StageContext, spec: ScoreSpec) -> None:
        """Writes the scores; a trial's without test parts and softmax, since there are many."""
        split, benchmark = context.split(), context.benchmark
        model = context.facts("model")
        status, detail = model["status"], model.get("status_detail", "")
        with context.writing() as folder:
            if status == "ok":
                parts = benchmark.parts(split, trial=spec.trial, seed=spec.seed)
                if context.stage.parents["model"].kind != "original":
                    parts = {p: ids for p, ids in parts.items() if not benchmark.of_goal(p)}
                try:
                    with context.scoring("model") as loaded:
                        scores = benchmark.score(loaded, parts, trial=spec.trial)
                    save_scores(without_probs(scores) if spec.trial else scores, folder / SCORES)
                except Diverged as error:
                    status, detail = "diverged", error.reason
            context.about |= {
                "status": status,
                "status_detail": detail,
                "split": {"digest": split.digest, "name": split.name, **split.notes},
                "data": {"digest": split.source_digest, "provenance": benchmark.provenance},
            }


TABLE = "probe.json"


class ProbeSpec(StageSpec):
    """Fields of a ``probe`` stage; ``config`` as plain values."""

    probe: str
    config: dict[str, Any]


class ProbeModel(StageKind[ProbeSpec]):
    """Measures a stored model with one probe."""

    Spec = ProbeSpec
    order = 6

    def work(self, context: StageContext, spec: ProbeSpec) -> None:
        """Writes the table; none for a model that diverged."""
        facts, told = context.facts("model"), ("status", "status_detail")
        probe = make_probe(spec.probe, spec.config, context.stage.name)
        with context.writing() as folder:
            table = ProbeTable({})
            if facts["status"] == "ok":
                try:
                    with context.scoring("model") as model:
                        table = probe.measure(model, context.benchmark)
                except Diverged as error:
                    facts = {"status": "diverged", "status_detail": error.reason}
            context.about |= {key: facts[key] for key in told if key in facts}
            write_json(folder / TABLE, {"rows": table.rows, "notes": table.notes})


def read_table(store: StageStore, stage: Placed) -> ProbeTable | None:
    """A probe's table, empty where the model diverged; None while it is not done."""

    def parse(text: str) -> ProbeTable:
        content = json.loads(text)
        return ProbeTable(content["rows"], content["notes"])

    return read_stored(store, stage, TABLE, parse)
