"""Where each model of a suite comes from: functions that give stages.  Pure and torch-free.

Everything that a number depends on is in a stage's identity or in its parents' keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from stable_forgetting.benchmarks.pipeline.kinds import KINDS
from stable_forgetting.benchmarks.pipeline.stage import PRETRAINED, ModelSpec, Stage, foreign_code
from stable_forgetting.benchmarks.suite.resolve import ResolvedRow, ResolvedSuite
from stable_forgetting.common.audits.base import ModelAudit
from stable_forgetting.common.base.config import Strict, canonical
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.registry import BENCHMARKS, METHODS, any_plugin
from stable_forgetting.common.measure.rules import stopping_goals
from stable_forgetting.common.store.stages import StageStore

WATCHED = ("stop_below", "evaluate_every", "evaluate_epochs")
"""Settings by which a training is evaluated on its way: its key has what the evaluation depends
on, as its length or its trajectory does."""


class Lineage:
    """The stages of one suite's models; equal ones are one object."""

    def __init__(self, suite: ResolvedSuite, store: StageStore):
        self.suite, self.store = suite, store
        self.benchmark = BENCHMARKS[suite.spec.benchmark]
        self._stages: dict[str, Stage] = {}
        self._identities: dict[str, dict[str, Any]] = {}
        self._plugins = any_plugin()
        self._before = Lineage(suite.after, store) if suite.after else None

    def stage(
        self,
        kind: str,
        name: str,
        identity: Mapping[str, Any],
        parents: Mapping[str, Stage],
        *,
        protocol: Strict | None = None,
        **spec: Any,
    ) -> Stage:
        """A stage of any kind on this suite's benchmark.

        Args:
            name: For people.
            identity: What is hashed besides benchmark and parents.
            parents: Role -> stage.
            protocol: In the place of the suite's.
            spec: Fields of the kind's ``Spec`` besides benchmark and protocol.
        """
        benchmark = BENCHMARKS.stored_name(self.suite.spec.benchmark)
        rehearsal = self.suite.rehearsal
        typed = KINDS[kind].Spec(
            benchmark=benchmark,
            protocol=canonical(protocol) if protocol else self._protocol,
            rehearsal=rehearsal,
            **spec,
        )
        code = foreign_code(kind, typed) if self._plugins else {}
        hashed = _hashed({"benchmark": benchmark, **identity, **code})
        if rehearsal is not None:
            hashed["rehearsal"] = rehearsal
        fold = "" if kind in ("pretrain", "original") else self.suite.fold
        if fold and fold not in name.split("/"):
            name = f"{fold}/{name}"
        stage = Stage(kind, typed, hashed, parents, name)
        return self._stages.setdefault(stage.key, stage)

    def identity(self, part: str, protocol: Strict | None = None) -> dict[str, Any]:
        """What of the benchmark is hashed: version and config of ``split``, ``train`` and so on."""
        if protocol is None and part in self._identities:
            return self._identities[part]
        config = canonical(self.benchmark.identity(protocol or self.suite.protocol, part))
        identity = {"version": getattr(self.benchmark.versions, part), "config": config}
        return identity if protocol else self._identities.setdefault(part, identity)

    @cached_property
    def _protocol(self) -> Any:
        return canonical(self.suite.protocol)

    def done(self, stage: Stage) -> dict[str, Any] | None:
        """What a complete stage says of itself; None if it is not complete."""
        return self.store.done(stage.kind, stage.key)

    def split(
        self,
        seed: int,
        *,
        half: int | None = None,
        request: tuple[int, int] | None = None,
        unseen: str = "",
    ) -> Stage:
        """The index sets of a seed.

        ``half``: only this random half of the forget set is trained on and forgotten.  ``request``
        is (number from 0, count): one of several requests that add up to the forget set.
        ``unseen`` is the part that takes the place of the forget set.
        """
        spec: dict[str, Any] = {"seed": seed}
        name = f"split/seed-{seed}"
        if half is not None:
            spec, name = {**spec, "half": half}, f"half-{half}/seed-{seed}"
        elif request is not None:
            index, count = request
            spec = {**spec, "request": index, "requests": count}
            name = f"request-{index + 1}-of-{count}/seed-{seed}"
        elif unseen:
            spec, name = {**spec, "unseen": unseen}, f"{unseen}/seed-{seed}"
        return self.stage("split", name, {**self.identity("split"), **spec}, {}, **spec)

    def pretrained(self) -> dict[str, Stage]:
        """Role -> what Original and every Retrain start from; empty where nothing is pretrained.

        No seed of a run is in it: all seeds share it, and all suites with the same pretraining.
        """
        protocol = self.benchmark.pretraining(self.suite.protocol)
        if protocol is None:
            return {}
        seed = self.suite.protocol.pretrain.seed  # type: ignore[attr-defined]
        identity = {**self.identity("train", protocol), "seed": seed}
        name = f"pretrain/seed-{seed}"
        stage = self.stage("pretrain", name, identity, {}, protocol=protocol, seed=seed)
        return {PRETRAINED: stage}

    def original(self, seed: int, replicate: int = 0, split: Stage | None = None) -> Stage:
        """Original; a further one of the same seed, or one on the training parts of ``split``."""
        identity = {**self.identity("train"), "seed": seed}
        if replicate or split is not None:
            identity["replicate"] = replicate
        name = f"original-{replicate + 1}/seed-{seed}" if replicate else f"original/seed-{seed}"
        if split is not None:
            name = f"original/{split.name}"
        parents = self.pretrained() | ({} if split is None else {"split": split})
        return self.stage(
            "original", name, identity, parents, seed=seed, replicate=replicate, method="original"
        )

    def retrain(self, seed: int, replicate: int = 0, split: Stage | None = None) -> Stage:
        """Retrain, the ``replicate``-th of its seed; on another split than the suite's if given."""
        identity = {
            **self.identity("train"),
            "seed": seed,
            "replicate": replicate,
            "method_version": METHODS["retrain"].info.version,
        }
        name = f"retrain-{replicate + 1}/seed-{seed}" if replicate else f"retrain/seed-{seed}"
        if split is not None:
            name = f"retrain/{split.name}"
        return self.stage(
            "retrain",
            name,
            identity,
            {**self.pretrained(), "split": split or self.split(seed)},
            seed=seed,
            replicate=replicate,
            method="retrain",
        )

    def unlearned(
        self,
        row: ResolvedRow,
        config: Strict,
        seed: int,
        *,
        start: Stage | None = None,
        split: Stage | None = None,
        replicate: int | None = None,
        moved: bool = False,
        note: str = "",
    ) -> Stage:
        """The model that a row's method makes.

        Args:
            start: The model that it unlearns; when absent Original, or what the same row left in
                the suite of the request before.
            split: What is forgotten; the suite's when absent.
            replicate: Which further model of the same seed; None for the suite's own.
            moved: Whether it starts from weights whose last digits are moved.
            note: Goes into the name, behind the row.
        """
        params = canonical(config)
        identity: dict[str, Any] = {
            "method": row.method,
            "method_version": METHODS[row.method].info.version,
            "params": config.identity(),
            "seed": seed,
        }
        if replicate is not None:
            identity["replicate"] = replicate
        if moved:
            identity["moved"] = "last digit"
        if self.benchmark.versions.unlearn > 1:
            identity["benchmark_version"] = self.benchmark.versions.unlearn
        parents = {"split": split or self.split(seed), "start": start or self._start(row, seed)}
        if params.get("stop_below") == "goal":
            goals = stopping_goals(self.benchmark.gap_of(self.suite.protocol))
            if not goals:
                raise ConfigError(
                    f"{self.suite.name}: methods.{row.label}: stop_below: goal: the benchmark has "
                    "no goal below a constant or a value of Original; give values"
                )
            parents["goal"] = self.evaluated(self.original(seed), seed, trial=True)
            identity["goals"] = [goal.words for goal in goals]
        elif "retrain" in (params.get("stop_below") or {}).values():
            parents["goal"] = self.evaluated(self.retrain(seed), seed, trial=True)
        elif any(params.get(name) for name in WATCHED):  # a goal's key has both
            identity |= {part: self.identity(part) for part in ("score", "measure")}
        return self.stage(
            "unlearn",
            f"{row.label}/{note or f'seed-{seed}'}",
            identity,
            parents,
            seed=seed,
            replicate=replicate or 0,
            method=row.method,
            params=params,
            moved=moved,
        )

    def _start(self, row: ResolvedRow, seed: int) -> Stage:
        if self._before is None:
            return self.original(seed)
        before = self._before.suite.row(row.label)
        return self._before.unlearned(before, before.config, seed)

    def evaluated(
        self,
        model: Stage,
        seed: int,
        replicate: int = 0,
        *,
        split: Stage | None = None,
        trial: bool = False,
    ) -> Stage:
        """A model's record, on the suite's split when none is given; a trial's has no test data."""
        assert isinstance(model.spec, ModelSpec)
        name = model.name + ("/trial" if trial else "")
        parents = {"model": model, "split": split or self.split(seed)}
        scoring = {**self.identity("score"), "trial": trial}
        scores = self.stage("score", name, scoring, parents, seed=seed, trial=trial)
        return self.stage(
            "measure",
            name,
            self.identity("measure"),
            {**parents, "scores": scores},
            seed=seed,
            replicate=replicate,
            trial=trial,
            method=model.spec.method,
            params=model.spec.params,
        )

    def probed(self, model: Stage, seed: int, name: str) -> Stage:
        """The table of a model that a probe of the suite makes."""
        entry = self.suite.probes[name]
        config = canonical(entry.probe.config)
        identity = {"probe": entry.registered, "version": entry.probe.version, "config": config}
        return self.stage(
            "probe",
            f"{name}/{model.name}",
            identity,
            {"model": model},
            seed=seed,
            probe=entry.registered,
            config=config,
        )


def attacked(
    lineage: Lineage,
    model: Stage,
    seed: int,
    name: str,
    attack: ModelAudit,
    *,
    replicate: int = 0,
    trial: bool = False,
) -> Stage:
    """What an attack measures of a model; of a trial's nothing that only reports is read."""
    config = canonical(attack.config)
    identity = {"audit": name, "audit_version": attack.info.version, "config": config}
    parents = {"model": model, "split": lineage.split(seed), "original": lineage.original(seed)}
    if attack.referenced and lineage.suite.spec.retrains > 1:
        parents["reference"] = lineage.retrain(seed, 0 if replicate else 1)
    if trial:
        identity["trial"] = True
    return lineage.stage(
        "audit",
        f"{name}/{model.name}{'/trial' if trial else ''}",
        {**identity, "seed": seed},
        parents,
        seed=seed,
        audit=name,
        config=config,
        trial=trial,
    )


def _hashed(value: Any) -> Any:
    """An identity without what no number depends on: how often checkpoints are written."""
    if isinstance(value, Mapping):
        return {k: _hashed(v) for k, v in value.items() if k != "checkpoint_every"}
    return value
