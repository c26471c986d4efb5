"""Which of a suite's defaults a row takes: all of them, or it says which not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, Literal

from stable_forgetting.benchmarks.suite.suite import BUDGETED, REFERENCES, Kind, Row, Suite
from stable_forgetting.common.base.config import Strict, check_known, did_you_mean, merge
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.methods.base import UnlearningMethod, check_read, over, resolve_config

LENGTHS = ("steps", "epochs")
BudgetWord = Literal["", "suite", "own", "counted"]
"""A row has the suite's budget, or one of its own, or no length, so that its passes are counted;
empty where it reads no retain data or the suite has no budget."""


def check_settings(spec: Suite, keys: Iterable[str], origin: str) -> None:
    """A setting that neither a row's method nor another one has is a misspelling."""
    known = _settings_of(spec.method_of.values())
    unknown = [key for key in keys if key not in known]
    if unknown:  # it may be of rows that were not selected
        every = _settings_of(METHODS.names())
        check_known(f"{origin}: no row has", [k for k in unknown if k not in every], sorted(known))


def _settings_of(methods: Iterable[str]) -> set[str]:
    configs = [METHODS[method].Config for method in methods if method in METHODS]
    return {name for config in configs for name in (*config.model_fields, *config.aliases)}


def row_params(spec: Suite, method: str, row: Row, origin: str) -> dict[str, Any]:
    """A row's params over the suite's defaults, which a preset and the row itself replace.

    Raises:
        ConfigError: The row's method cannot take one of the defaults.
    """
    cls = METHODS[method]
    preset = cls.presets.get(row.preset or "", {})
    if method in REFERENCES:
        return row.params
    own = resolve_config(method, row.preset, row.params, origin=f"{origin}.params")
    check_read(method, row.params, origin=f"{origin}.params")
    params, by_field = cls.Config.by_field(row.params), cls.Config.by_field
    defaults = by_field({key: value for key, value in spec.defaults.items() if value is not None})
    for kind in kinds(cls.Config, own):
        defaults = over(defaults, by_field(spec.defaults_of.get(kind, {})))
    for key in map(cls.Config.field_of, row.without):
        if key not in defaults:
            raise ConfigError(
                f"{origin}.without: the suite has no default '{key}' for this row"
                f"{did_you_mean(key, list(defaults))}"
            )
        del defaults[key]
    for key, value in defaults.items():
        missing = key not in type(own).model_fields
        if missing or (isinstance(value, Mapping) and getattr(own, key) is None):
            raise ConfigError(
                f"{origin}: '{method}' has no {key} to take the suite's default; write without: "
                f"[{key}] in the row, or give the default to a kind of rows under defaults_of"
            )
    if {*preset, *params} & {*LENGTHS}:
        defaults = {key: value for key, value in defaults.items() if key not in LENGTHS}
    defaults = over(defaults, _budgeted(spec, cls, own, {*preset, *params}))
    return merge(_beside(defaults, preset), params)


def _budgeted(
    spec: Suite, cls: type[UnlearningMethod], own: Strict, given: Set[str]
) -> dict[str, Any]:
    """What the suite's budget gives a row, whose own params and preset have the keys ``given``."""
    if spec.budget is None:
        return {}
    params = cls.within(own, spec.budget.unit, spec.budget.amount)
    if params and given & {*LENGTHS}:
        return {}
    if "schedule" in type(own).model_fields:
        params["schedule"] = spec.budget.schedule
    return params


def budget_of(
    spec: Suite, method: str, row: Row, config: Strict, varied: Iterable[str]
) -> BudgetWord:
    """How a row stands to its suite's budget; ``varied`` are the params that its trials vary."""
    cls = METHODS[method]
    if spec.budget is None or method in REFERENCES or "retain" not in cls.info.access:
        return ""
    if not cls.within(config, spec.budget.unit, spec.budget.amount):
        return "counted"
    given = {*cls.presets.get(row.preset or "", {}), *row.params, *varied}
    return "own" if given & {*BUDGETED} else "suite"


def _beside(defaults: Mapping[str, Any], preset: Mapping[str, Any]) -> dict[str, Any]:
    """What a preset leaves of the defaults, also inside nested settings."""
    left: dict[str, Any] = {}
    for key, value in defaults.items():
        if key not in preset:
            left[key] = value
        elif isinstance(value, Mapping) and isinstance(preset[key], Mapping):
            left[key] = _beside(value, preset[key])
    return left


def kinds(config: type[Strict], own: Strict) -> Iterator[Kind]:
    """Kinds of a row, by its method's config and by its own without the suite's defaults."""
    for length in LENGTHS:
        field = config.model_fields.get(length)
        if field is not None and field.get_default() is not None:
            yield length  # type: ignore[misc]
    if "lr" in type(own).model_fields:
        yield "full" if getattr(own, "adapter", None) is None else "adapter"
