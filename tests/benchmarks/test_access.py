"""A plugin that reads more than it declares fails in a real run, in one line."""

from __future__ import annotations

import pytest

PLUGIN = '''
import contextlib
import torch
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.data.loader import Loader
from stable_forgetting.common.methods.base import MethodInfo, UnlearningMethod

@METHODS.register("curious")
class Curious(UnlearningMethod):
    """Looks at data that it does not declare."""
    info = MethodInfo(1, "nobody", frozenset({{"forget"}}))
    def unlearn(self, task):
        {body}
        return task.model
'''

READS = {
    "the part": ('task.split.parts["test"]', "test"),
    "some indices": ('task.indices("retain")', "retain"),
    "the source": (
        "[task.source.fetch(torch.tensor([i])) for i in range(99)]",
        ("retain", "validation", "test"),
    ),
    "a loader": (
        'Loader(task.source, range(99), 99, task.generator("x")).next()',
        ("retain", "validation", "test"),
    ),
    "a fresh model": ("task.fresh_model()", "initial"),
}


@pytest.mark.parametrize("how", READS)
def test_what_is_not_declared_cannot_be_read(
    how, tmp_path, copied, tiny_suite, cli, one_line_error
):
    body, parts = READS[how]
    plugin = tmp_path / "curious.py"
    plugin.write_text(PLUGIN.format(body=body))
    rows = {"original": None, "retrain": None, "curious": None}
    path = tiny_suite(tmp_path, suite="curious", methods=rows, retrains=2)
    done = cli("run", path, "--store", copied.store, "--workers", 1, "--plugin", plugin)
    line = one_line_error(done)
    parts = (parts,) if isinstance(parts, str) else parts
    assert any(f"method 'curious' reads '{part}'" in line for part in parts)
    assert "declare it in MethodInfo.access (now: forget)" in line
