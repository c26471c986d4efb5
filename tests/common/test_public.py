"""The public surface: every name resolves, is documented and typed, and costs nothing unused."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import common
from common.base.public import PUBLIC, RENAMED, stale_imports

ROOT = Path(common.__file__).parent
PROMISED = (
    *("METHODS", "BENCHMARKS", "AUDITS", "PHIS", "MethodInfo", "UnlearningMethod", "Objective"),
    *("GradientMethod", "GradientConfig", "Finetune", "gradient_difference", "AdapterConfig"),
    *("attach", "detach", "fit", "Diverged", "ConfigError", "Scores", "MetricSpec", "Benchmark"),
)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_name_resolves_and_is_in_the_docstring(name):
    assert getattr(common, name) is getattr(import_module(PUBLIC[name]), name)
    assert f"``{name}``" in common.__doc__


def test_what_is_promised_stays():
    assert set(PROMISED) <= PUBLIC.keys()
    assert set(RENAMED.values()) <= PUBLIC.keys()
    assert common.__all__ == sorted(PUBLIC) and set(PUBLIC) <= set(dir(common))


def test_type_checkers_see_the_same_names():
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    aliases = [alias for node in imports for alias in node.names]
    assert all(alias.asname == alias.name for alias in aliases), "not offered: no `X as X`"
    assert {alias.name for alias in aliases} == PUBLIC.keys() and len(aliases) == len(PUBLIC)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'common' has no attribute 'nothing'"):
        common.nothing  # noqa: B018
    with pytest.raises(ImportError):
        from common import nothing  # noqa: F401


def test_registries_and_method_bodies_load_no_torch():
    light = "METHODS, PHIS, PRESETS, AUDITS, GradientMethod, GradientConfig, Finetune, MethodInfo"
    code = f"from common import {light}; import sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    "text",
    [
        "from common import METHODS, fit",
        "from common.methods.simple import Finetune",
        "from common.bounded import presets\nimport common.bounded.phi",
        "from vision.data.source import *",
        "import torch\nfrom somewhere.common import methods",
    ],
)
def test_imports_that_work_are_not_called_stale(text):
    assert stale_imports(text) is None


def test_a_private_name_that_moved_points_to_the_public_ones():
    told = stale_imports("from language.hidden import captured")
    assert told == "language.hidden.captured has moved; write: from common import METHODS, ..."
