"""Checks of what a method declares of itself."""

from __future__ import annotations

import contextlib

from stable_forgetting.common.base.config import Strict, validate
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.registry import PROBLEMS
from stable_forgetting.common.checks.results import CheckResult
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
