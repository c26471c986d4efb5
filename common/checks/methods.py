"""The contract of an unlearning method: what it declares, and what it does on the tiny task."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stable_forgetting.common.base.config import Strict, validate
from stable_forgetting.common.base.errors import ConfigError, named_line
from stable_forgetting.common.base.registry import METHODS, PROBLEMS
from stable_forgetting.common.bounded.attach import detach
from stable_forgetting.common.bounded.layer import adapted_layers
from stable_forgetting.common.checks.tiny_task import (
    CheckResult,
    WatchedTask,
    problem_of,
    seeded_streams,
)
from stable_forgetting.common.methods.base import MethodInfo, UnlearningMethod, resolve_config

_MIN_DOC_WORDS = 5
DECLARABLE = frozenset({"forget", "retain", "initial", "validation", "validation_forget"})


def _check_info(cls: type[UnlearningMethod]) -> CheckResult:
    info = getattr(cls, "info", None)
    problem = ""
    if not isinstance(info, MethodInfo):
        problem = "info must be a MethodInfo"
    elif not isinstance(info.version, int) or info.version < 1:
        problem = f"info.version must be a whole number from 1, not {info.version!r}"
    elif not info.paper.strip():
        problem = "info.paper is empty; say where the method comes from"
    elif not info.access <= DECLARABLE:
        problem = f"info.access may name {sorted(DECLARABLE)} only, not {sorted(info.access)}"
    elif not all(isinstance(scenario, str) and scenario for scenario in info.scenarios):
        problem = "info.scenarios must hold names"
    elif info.modality and info.modality not in PROBLEMS:
        problem = f"info.modality '{info.modality}' is none of {PROBLEMS.names()}"
    return CheckResult("info", not problem, problem)


def _check_docstring(cls: type[UnlearningMethod]) -> CheckResult:
    words = (cls.__dict__.get("__doc__") or "").split()
    ok = len(words) >= _MIN_DOC_WORDS
    problem = "the class needs a docstring of its own that says more than its name"
    return CheckResult("docstring", ok, "" if ok else problem)


def _check_config(cls: type[UnlearningMethod]) -> CheckResult:
    problem = ""
    if not (isinstance(cls.Config, type) and issubclass(cls.Config, Strict)):
        problem = "Config must derive from common.base.config.Strict"
    else:
        try:
            cls.Config()
        except ValueError as error:
            problem = f"Config() needs a default for everything ({str(error).splitlines()[0]})"
        else:
            with contextlib.suppress(ConfigError):
                validate(cls.Config, {"no_such_key": 1}, "check")
                problem = "Config accepts unknown keys"
    return CheckResult("config", not problem, problem)


def _check_presets(name: str, cls: type[UnlearningMethod]) -> CheckResult:
    for preset in cls.presets:
        try:
            resolve_config(name, preset, {}, origin=f"preset {preset}")
        except ConfigError as error:
            return CheckResult("presets", False, str(error))
    return CheckResult("presets", True, ", ".join(cls.presets) or "none")


def _names(values: frozenset[str]) -> str:
    return ", ".join(sorted(values)) or "none"


_SHORT_STEPS, _SHORT_EPOCHS = 4, 1


def check_method(name: str, params: Mapping[str, Any] | None = None) -> list[CheckResult]:
    """Every promise of a registered method, in order; later ones need the earlier ones.

    Runs are shortened through ``steps`` or ``epochs`` where the config has them, unless ``params``
    sets them.

    Raises:
        ConfigError: No such method, or ``params`` does not fit its config.
    """
    cls = METHODS[name]
    results = [_check_info(cls), _check_docstring(cls), _check_config(cls)]
    if not (results[0].ok and results[2].ok):
        return results
    results.append(_check_presets(name, cls))
    return results + _MethodRuns(cls, _short_config(name, cls, params or {})).check()


def _short_config(name: str, cls: type[UnlearningMethod], params: Mapping[str, Any]) -> Strict:
    defaults, short = cls.Config(), dict(cls.quick)
    if getattr(defaults, "steps", None):
        short["steps"] = _SHORT_STEPS
    elif getattr(defaults, "epochs", None):
        short["epochs"] = _SHORT_EPOCHS
    if {"steps", "epochs"} & params.keys():
        short = {}
    with contextlib.suppress(ConfigError):
        return resolve_config(name, None, {**short, **params}, origin=name)
    return resolve_config(name, None, params, origin=name)


@dataclass
class _Trial:
    """One run of a method: what it returned or raised, and what it left behind."""

    task: WatchedTask
    error: Exception | None
    moved: list[str]
    model: nn.Module
    merged: dict[str, Tensor]


class _MethodRuns:
    """The checks that run the method."""

    def __init__(self, cls: type[UnlearningMethod], config: Strict):
        self.cls, self.config = cls, config
        self.info: MethodInfo = cls.info
        wanted = self.info.scenarios
        self.layouts = [] if wanted == {"class"} else ["random"]
        if not wanted or "class" in wanted:
            self.layouts.append("class")
        self.problem = problem_of(self.info.modality)
        self.original = self.problem.original
        self.recipe, self.targets = self.problem.recipe, dict(self.problem.targets)
        self.pristine = {k: v.clone() for k, v in self.original.state_dict().items()}
        joined = cls.empty_model(config, lambda: copy.deepcopy(self.original))
        self.before = {k: v.clone() for k, v in joined.state_dict().items()}

    def check(self) -> list[CheckResult]:
        first = self._run()
        reads = self._reads(first)
        if not reads.ok:
            first = self._run(guarded=False)
        error = first.error
        results = [reads, CheckResult("runs", not error, named_line(error) if error else "")]
        if not error:
            results += [
                self._width(first),
                self._finite(first),
                self._architecture(first),
                self._change(first),
                self._adapter_start(first),
                self._frozen(first),
                self._inputs(first),
                self._global_state(first),
                self._determinism(first, guarded=reads.ok),
                self._scenarios(guarded=reads.ok),
            ]
        return results

    def _run(
        self, *, seed: int = 1, salt: int = 1, layout: str | None = None, guarded: bool = True
    ) -> _Trial:
        access = self.info.access if guarded else DECLARABLE | {"test"}
        model: nn.Module = copy.deepcopy(self.original)
        task = self.problem.task(model, layout or self.layouts[0], seed, access)
        error: Exception | None = None
        merged: dict[str, Tensor] = {}
        with seeded_streams(salt) as moved:
            try:
                model = self.cls(self.config).unlearn(task)
                if not isinstance(model, nn.Module):
                    raise TypeError(f"unlearn returned {type(model).__name__}, not a module")
                whole = copy.deepcopy(model)
                merged = (whole if self.info.models > 1 else detach(whole)).state_dict()
            except Exception as caught:
                error = caught
            names = moved()
        return _Trial(task, error, names, model, merged)

    def _reads(self, trial: _Trial) -> CheckResult:
        violations = trial.task.data.violations
        problem = f"reads '{violations[0]}', not in info.access" if violations else ""
        return CheckResult("declared data", not problem, problem or _names(self.info.access))

    def _width(self, trial: _Trial) -> CheckResult:
        try:
            shape = tuple(self.problem.outputs(trial.model).shape)
        except Exception as error:
            return CheckResult("output width", False, named_line(error))
        wanted = tuple(self.problem.outputs(self.original).shape)
        return CheckResult("output width", shape == wanted, f"{shape}, expected {wanted}")

    def _finite(self, trial: _Trial) -> CheckResult:
        bad = [name for name, value in trial.merged.items() if not value.isfinite().all()]
        problem = f"'{bad[0]}' is not finite" if bad else ""
        with contextlib.suppress(Exception):  # a wrong shape is another check's finding
            if not problem and not self.problem.outputs(trial.model).isfinite().all():
                problem = "logits are not finite"
        return CheckResult("finite", not problem, problem)

    def _architecture(self, trial: _Trial) -> CheckResult:
        tensors, wanted = trial.merged, self.before
        problem = ""
        alone = self.info.models == 1
        if alone and list(tensors) != list(wanted):
            other = sorted(set(tensors) ^ set(wanted))
            problem = f"state-dict keys differ: {other[:3] or 'their order'}"
        elif alone and (bad := [k for k, v in wanted.items() if _kind(tensors[k]) != _kind(v)]):
            problem = f"'{bad[0]}' is {_kind(tensors[bad[0]])}, not {_kind(wanted[bad[0]])}"
        else:
            fresh = self.cls.empty_model(self.config, self.problem.net)
            fresh.load_state_dict(tensors)
            if not torch.allclose(
                self.problem.outputs(fresh),
                self.problem.outputs(trial.model),
                atol=1e-4,
                equal_nan=True,
            ):
                problem = "what it computes is not in its weights: they alone are stored"
        return CheckResult("architecture", not problem, problem)

    def _change(self, trial: _Trial) -> CheckResult:
        tensors = trial.merged
        changed = [k for k, v in self.before.items() if not _same(tensors.get(k), v)]
        detail = f"{len(changed)} of {len(self.before)} tensors changed"
        ok = bool(changed) == self.info.changes_model
        if not ok and not changed:
            mine = {id(p) for p in trial.model.parameters()}
            lost = trial.task.fitted and not trial.task.fitted & mine
            detail = "the returned model is Original, bit for bit"
            detail += "; another model was trained" if lost else ""
        return CheckResult("change", ok, detail)

    def _adapter_start(self, trial: _Trial) -> CheckResult:
        start = trial.task.start
        if start is None:
            return CheckResult("adapter start", True, "trains no adapters")
        return CheckResult("adapter start", start == 0.0, f"max |dW| = {start:g} before training")

    def _frozen(self, trial: _Trial) -> CheckResult:
        """Under adapters the base must stay Original's: only the adapter is stored."""
        model = trial.model
        adapted = {name for name, _ in adapted_layers(model)}
        if self.info.models > 1:
            return CheckResult("frozen weights", True, "every tensor is stored")
        if not adapted:
            return CheckResult("frozen weights", True, "returns no adapters")
        tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        changed = [
            name
            for name, value in self.before.items()
            if not _same(tensors.get(name), value)
            and (
                name.rpartition(".")[0] in adapted
                or not getattr(tensors.get(name), "requires_grad", False)
            )
        ]
        detail = f"'{changed[0]}' changed under the adapters" if changed else ""
        return CheckResult("frozen weights", not changed, detail)

    def _inputs(self, trial: _Trial) -> CheckResult:
        task = trial.task
        pristine = self.problem.source()
        layout = self.problem.split(task.split.name.split("/")[1])
        problem = ""
        if task.source.digest != pristine.digest:
            problem = "the data source was changed"
        elif not all(np.array_equal(ids, layout.parts[p]) for p, ids in task.split.parts.items()):
            problem = "the index sets were changed"
        elif not all(_same(v, self.pristine[k]) for k, v in self.original.state_dict().items()):
            problem = "Original's own weights were changed"
        elif task.recipe != self.recipe or dict(self.problem.targets) != self.targets:
            problem = "the recipe or the targets were changed"
        return CheckResult("inputs untouched", not problem, problem)

    def _global_state(self, trial: _Trial) -> CheckResult:
        moved = trial.moved
        detail = (
            f"changed {', '.join(moved)}; random numbers come from task.generator" if moved else ""
        )
        return CheckResult("global state", not moved, detail)

    def _determinism(self, first: _Trial, *, guarded: bool) -> CheckResult:
        again = self._run(salt=2, guarded=guarded)
        other = self._run(seed=2, salt=1, guarded=guarded)
        error = again.error or other.error
        if error is not None:
            return CheckResult("determinism", False, f"a second run failed: {named_line(error)}")
        one, two = first.merged, again.merged
        differing = [name for name in one if not _same(two.get(name), one[name])]
        if differing:
            return CheckResult("determinism", False, f"same seed, other bits in '{differing[0]}'")
        varies = any(not _same(other.merged.get(name), one[name]) for name in one)
        return CheckResult(
            "determinism", True, f"another seed gives {'other' if varies else 'the same'} bits"
        )

    def _scenarios(self, *, guarded: bool) -> CheckResult:
        for layout in self.layouts[1:]:
            trial = self._run(layout=layout, guarded=guarded)
            if trial.error is not None:
                return CheckResult("scenarios", False, f"{layout}: {named_line(trial.error)}")
            if not all(bool(value.isfinite().all()) for value in trial.merged.values()):
                return CheckResult("scenarios", False, f"{layout}: weights are not finite")
        return CheckResult("scenarios", True, _names(self.info.scenarios or frozenset({"all"})))


def _same(tensor: Tensor | None, wanted: Tensor) -> bool:
    return tensor is not None and tensor.shape == wanted.shape and torch.equal(tensor, wanted)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
