"""The contract of a benchmark, checked under one protocol without training anything."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from stable_forgetting.common.base.config import Strict, canonical, digest, validate
from stable_forgetting.common.base.errors import named_line
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.bounded.attach import attach
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.checks.tiny_task import CheckResult, seeded_streams
from stable_forgetting.common.data.batch import ordered_batches
from stable_forgetting.common.data.parts import Role
from stable_forgetting.common.data.splits import TRAIN_PARTS, ForgetSplit
from stable_forgetting.common.measure.metric import MetricSpec
from stable_forgetting.common.measure.scores import without_probs
from stable_forgetting.common.protocol.benchmark import Benchmark, Runtime, Versions
from stable_forgetting.common.store.weights import tensors_digest
from stable_forgetting.common.train.config import FitConfig

HEAVY = ("torch", "timm", "transformers", "sklearn", "accelerate")
"""Packages that take seconds to import; planning and listing must do without."""

KINDS = ("split", "train", "score", "measure")
_SAMPLES = 24
_IDENTITY_SCRIPT = """
import importlib.util, json, sys
module_name, file, class_name, config = json.loads(sys.argv[1])
spec = importlib.util.spec_from_file_location(module_name, file)
try:
    module = importlib.import_module(module_name)
except ImportError:
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
from stable_forgetting.common.base.config import digest
cls = getattr(module, class_name)
parsed = cls.Config.model_validate(config)
digests = [digest(cls.identity(parsed, kind)) for kind in KINDS]
print(json.dumps([digests, sorted(set(sys.modules) & set(HEAVY))]))
"""


def check_benchmark(
    name: str, config: Mapping[str, Any] | Strict, runtime: Runtime
) -> list[CheckResult]:
    """Every promise of a registered benchmark under one protocol, without training anything.

    On a card a label beyond the model's classes ends CUDA for the process; a CPU says which it is.

    Raises:
        ConfigError: No such benchmark, or the protocol is not valid.
        DataError: The data is missing.
    """
    cls = BENCHMARKS[name]
    raw = config.model_dump(mode="json") if isinstance(config, Strict) else dict(config)
    parsed = validate(cls.Config, raw, f"protocol of {name}")
    results = [_check_versions(cls), _check_specs(cls), _check_identity(cls, parsed)]
    return results + _BenchmarkRuns(cls(parsed, runtime)).check()


def _check_versions(cls: type[Benchmark]) -> CheckResult:
    versions = cls.versions
    if hasattr(cls, "version") or not isinstance(versions, Versions):
        return CheckResult("versions", False, "give versions = Versions(split=..., measure=...)")
    for kind, version in dataclasses.asdict(versions).items():
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            problem = f"versions: {kind} must be from 1, not {version!r}"
            return CheckResult("versions", False, problem)
    return CheckResult("versions", True, "")


def _check_specs(cls: type[Benchmark]) -> CheckResult:
    specs = getattr(cls, "metrics", ())
    names = [spec.name for spec in specs if isinstance(spec, MetricSpec)]
    problem = ""
    if not names or len(names) != len(specs):
        problem = "metrics must be one or more MetricSpecs"
    elif len(set(names)) != len(names):
        problem = f"a metric is listed twice: {sorted(n for n in names if names.count(n) > 1)[0]}"
    else:
        bare = [spec.name for spec in specs if not (spec.title.strip() and spec.doc.strip())]
        problem = f"'{bare[0]}' needs a title and a doc" if bare else ""
    return CheckResult("metrics", not problem, problem or f"{len(names)} metrics")


def _check_identity(cls: type[Benchmark], config: Strict) -> CheckResult:
    """Hashed the same here and in a process of its own, where nothing heavy may be imported."""
    try:
        here = [digest(cls.identity(config, kind)) for kind in KINDS]
    except Exception as error:
        return CheckResult("identity", False, f"cannot be hashed ({named_line(error)})")
    file = getattr(sys.modules[cls.__module__], "__file__", None)
    about = json.dumps([cls.__module__, file, cls.__qualname__, canonical(config)])
    script = f"HEAVY, KINDS = {HEAVY!r}, {KINDS!r}\n{_IDENTITY_SCRIPT}"
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", script, about],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return CheckResult("identity", False, f"fails in a process of its own ({last[:160]})")
    there, heavy = json.loads(done.stdout.strip().splitlines()[-1])
    if heavy:
        return CheckResult("identity", False, f"importing it loads {', '.join(heavy)}")
    same = here == there
    return CheckResult("identity", same, "" if same else "another process hashes it differently")


class _BenchmarkRuns:
    """The checks that need data and a model."""

    def __init__(self, benchmark: Benchmark):
        self.benchmark = benchmark
        self.split: ForgetSplit = benchmark.split(1)
        self.model: nn.Module = benchmark.build(1)

    def check(self) -> list[CheckResult]:
        checks = (
            ("split", self._split),
            ("parts", self._parts),
            ("build", self._build),
            ("forward", self._forward),
            ("targets", self._targets),
            ("recipe", self._recipe),
            ("evaluate", self._evaluate),
        )
        results = []
        for name, check in checks:
            try:
                problem = check()
            except Exception as error:
                problem = named_line(error)
            results.append(CheckResult(name, not problem, problem))
        return results

    def _split(self) -> str:
        again = self.benchmark.split(1)
        if again.digest != self.split.digest:
            return "the same seed gives other index sets"
        if self.split.source_digest != self.benchmark.source.digest:
            return "source_digest is not the data's"
        sizes = {part: len(ids) for part, ids in self.split.parts.items()}
        missing = [part for part in TRAIN_PARTS if not sizes.get(part)]
        if not any(size for part, size in sizes.items() if self._reports(part)):
            missing.append("test")
        return f"part '{missing[0]}' is missing or empty" if missing else ""

    def _reports(self, part: str) -> bool:
        return self.benchmark.role_of(part) is Role.REPORT

    def _parts(self) -> str:
        for trial in (False, True):
            chosen = self.benchmark.parts(self.split, trial=trial, seed=1)
            again = self.benchmark.parts(self.split, trial=trial, seed=1)
            if list(chosen) != list(again) or any(
                not np.array_equal(ids, again[part]) for part, ids in chosen.items()
            ):
                return "the same seed chooses other samples to score"
            for part, ids in chosen.items():
                if part not in self.split.parts or not np.isin(ids, self.split.parts[part]).all():
                    return f"'{part}' holds samples that the split does not have there"
            if trial and any(self._reports(part) for part in chosen):
                return "a trial scores test data"
            if not {"forget", "retain"} <= chosen.keys():
                return "forget and retain must be scored"
        return ""

    def _build(self) -> str:
        with seeded_streams(2) as moved:
            again = self.benchmark.build(1)
            blank = self.benchmark.blank()
            names = moved()
        first, second = self.model.state_dict(), again.state_dict()
        if list(first) != list(second) or tensors_digest(first) != tensors_digest(second):
            return "the same seed builds other weights"
        if {k: v.shape for k, v in blank.state_dict().items()} != {
            k: v.shape for k, v in first.items()
        }:
            return "blank() has another architecture than build()"
        return f"changes {', '.join(names)}" if names else ""

    def _forward(self) -> str:
        ids = self.split.parts["retain"][:4]
        batch = next(ordered_batches(self.benchmark.source, ids, 4))
        with torch.no_grad():
            logits = self.benchmark.forward(self.model.eval(), batch)
        wanted = (*batch.labels.shape, self.benchmark.num_classes)
        if tuple(logits.shape) != wanted:
            return f"logits have shape {tuple(logits.shape)}, expected {wanted}"
        return "" if bool(logits.isfinite().all()) else "logits are not finite"

    def _targets(self) -> str:
        for placement in ("mlp", "attention", "all"):
            patterns = self.benchmark.targets.get(placement)
            if not patterns:
                return f"no target patterns for placement '{placement}'"
            adapter = AdapterConfig(rank=1, placement=placement)
            attach(copy.deepcopy(self.model), patterns, adapter, torch.Generator())
        tied = self.model.named_parameters(remove_duplicate=False)  # a head may be the embeddings
        names = [name for name, _ in tied]
        if not any(fnmatch.fnmatch(name, p) for name in names for p in self.benchmark.head):
            return "head patterns match no parameter"
        components = {self.benchmark.component_of(name) for name in names}
        unknown = components - {"mlp", "attention", "head", "other"}
        return f"unknown component '{min(unknown)}'" if unknown else ""

    def _recipe(self) -> str:
        return "" if isinstance(self.benchmark.recipe, FitConfig) else "recipe must be a FitConfig"

    def _evaluate(self) -> str:
        """An untrained model on a few samples: are all numbers declared, and all that are asked?"""
        names = {spec.name for spec in self.benchmark.metrics}
        for trial in (True, False):
            parts = self.benchmark.parts(self.split, trial=trial, seed=1)
            few = {part: ids[:: max(1, len(ids) // _SAMPLES)] for part, ids in parts.items()}
            scores = self.benchmark.score(self.model, few, trial=trial)
            if trial:
                scores = without_probs(scores)
            metrics = self.benchmark.evaluate(scores, trial=trial, seed=1)
            if not metrics:
                return "evaluate returns nothing"
            if undeclared := sorted(metrics.keys() - names):
                return f"'{undeclared[0]}' has no MetricSpec"
        return ""
