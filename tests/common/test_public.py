"""The public surface: every name resolves, is documented and typed, and costs nothing unused."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from stable_forgetting import common

STUB = Path(common.__file__).with_name("__init__.pyi")
PROMISED = (
    *("METHODS", "BENCHMARKS", "AUDITS", "PHIS", "MethodInfo", "UnlearningMethod", "Objective"),
    *("GradientMethod", "GradientConfig", "Finetune", "gradient_difference", "AdapterConfig"),
    *("attach", "detach", "fit", "Diverged", "ConfigError", "Scores", "MetricSpec", "Benchmark"),
    *("Audit", "AuditInfo", "AuditTask", "Measure", "ModelAudit", "NotApplicable", "PairAudit"),
)


@pytest.mark.parametrize("name", common.__all__)
def test_every_name_resolves_and_is_in_the_docstring(name):
    assert getattr(common, name) is not None
    assert f"``{name}``" in common.__doc__


def test_what_is_promised_stays():
    assert set(PROMISED) <= set(common.__all__) <= set(dir(common))


def test_type_checkers_see_the_same_names():
    imports = [n for n in ast.parse(STUB.read_text()).body if isinstance(n, ast.ImportFrom)]
    aliases = [alias for node in imports for alias in node.names]
    assert all(alias.asname == alias.name for alias in aliases), "not offered: no `X as X`"
    assert sorted(alias.name for alias in aliases) == common.__all__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="attribute nothing"):
        common.nothing  # noqa: B018
    with pytest.raises(ImportError):
        from stable_forgetting.common import nothing  # noqa: F401
