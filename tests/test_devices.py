"""Train, unlearn, evaluate, audit, sweep and apply of both arms, where a CPU tensor may meet none.

In processes of their own: the device cannot be taken away again (``tests/pretend_device.py``).
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CASES = {
    "refused": "device_cases.py -k 'cuda or missing'",
    "suites": "device_cases.py -k 'suite or fisher_of_two'",
    "methods": "device_cases.py -k 'method_mixes and not vision and not language'",
    "image methods": "device_cases.py -k 'method_mixes and vision'",
    "text methods": "device_cases.py -k 'method_mixes and language'",
    "image jobs": "test_audit.py::test_model_audits_are_stages_that_are_not_done_again"
    " test_sweeps.py::test_a_tiny_sweep_end_to_end test_apply.py::test_gd_sine_end_to_end",
    "text jobs": "test_audit_text.py::test_attacks_on_the_stored_models_work_on_answers"
    " test_sweeps.py::test_a_text_suite_has_a_sweep_of_its_own_metrics"
    " test_apply_text.py::test_end_to_end",
}
"""What a process runs: tests that are there for the CPU, and cases of this device alone."""


@pytest.mark.slow
@pytest.mark.parametrize("jobs", CASES)
def test_tensors_of_two_devices_never_meet(jobs):
    asked = shlex.split(CASES[jobs])
    nodes = [str(HERE / "benchmarks" / word) if ".py" in word else word for word in asked]
    paths = os.pathsep.join(map(str, (HERE, HERE.parent / "src", HERE.parent)))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "pretend_device", "-n", "0", *nodes],
        cwd=HERE.parent,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
