"""What a process imports before it is of use: each library where it is needed, none sooner."""

from __future__ import annotations

import json

import pytest

LIGHT = (
    "benchmarks.audits.derive",
    "benchmarks.costs.bounded",
    "benchmarks.sweeps.draw",
    "benchmarks.pipeline.planner",
    "benchmarks.machine.verify",
    "benchmarks.sharing.versus",
    "common.audits.attacks",
    "common.audits.recovery",
    "common.audits.representations",
    "common.measure.gaps",
    "common.measure.scores",
    "common.membership.attacks",
    "common.methods.forget_terms",
    "common.methods.preference",
    "common.methods.simple",
    "common.methods.variants",
    "common.store.records",
    "language.benchmarks.tofu",
    "language.data.chunks",
    "language.data.fictitious",
    "language.measure.scoring",
    "language.methods.refusals",
    "language.methods.rmu",
    "language.metrics.rouge",
    "language.models.families",
    "language.probes.dialogue",
    "language.probes.lm_eval",
    "language.probes.original",
    "language.probes.perplexity",
    "vision.benchmark",
)
COMPILER = {"torch._dynamo", "torch._inductor", "sympy", "triton"}
STATISTICS = {"pandas", "scipy.stats", "sklearn"}
HARNESSES = {"datasets", "lm_eval", "optuna", "peft"}
VISION, TEXT = {"timm", "torchvision"}, {"nltk", "transformers"}
WORKING = HARNESSES | STATISTICS | COMPILER | VISION | TEXT | {"accelerate"}
CLI = """
import sys
from stable_forgetting.benchmarks.cli import main

def unlearn(*args):
    sys.argv = ["unlearn", *args]
    try:
        main.main()
    except SystemExit as stop:
        assert not stop.code, (args, stop.code)

"""


@pytest.fixture
def loaded(spawn):
    """Modules in ``sys.modules`` of a fresh interpreter at the end of a script."""

    def run(script: str) -> set[str]:
        end = "\nimport json, sys\nprint()\nprint(json.dumps(sorted(sys.modules)))"
        out, err = spawn(script=CLI + script + end).communicate()
        assert out, err
        return set(json.loads(out.splitlines()[-1]))

    return run


def test_what_lists_plans_and_reports_needs_no_library(loaded, filled):
    path, store = str(filled.paths["class"]), str(filled.store)
    imports = "\n".join(f"import stable_forgetting.{name}" for name in LIGHT)
    commands = [
        ("show", "suites"),
        ("show", "digits-class"),
        ("plan", path, "--store", store),
        ("report", path, "--store", store),
    ]
    calls = "\n".join(f"unlearn(*{command!r})" for command in commands)
    assert loaded(f"{imports}\n{calls}") & (WORKING | {"torch"}) == set()


def test_a_run_of_a_finished_suite_starts_no_worker_and_imports_no_library(loaded, copied):
    path, store = str(copied.paths["class"]), str(copied.store)
    modules = loaded(f"unlearn('run', {path!r}, '--store', {store!r}, '--workers', '2')")
    assert modules & (WORKING | {"torch"}) == set()


def test_an_idle_worker_has_torch_alone(loaded):
    modules = loaded(
        "from stable_forgetting.benchmarks.pipeline.executors import prepare_worker\n"
        "prepare_worker(1, ())"
    )
    assert "torch" in modules and modules & WORKING == set()


def test_images_need_no_library_of_text(loaded, tiny_suite, tmp_path):
    path = tiny_suite(tmp_path, methods={"original": None, "retrain": None, "gd_sine": None})
    modules = loaded(f"unlearn('run', {str(path)!r}, '--store', {str(tmp_path)!r}, '--workers=1')")
    assert "timm" in modules and modules & (TEXT | HARNESSES) == set()


def test_text_needs_no_library_of_images(loaded, tiny_text_suite, tmp_path):
    """torchvision is there: transformers imports it."""
    path = tiny_text_suite(tmp_path)
    modules = loaded(f"unlearn('run', {str(path)!r}, '--store', {str(tmp_path)!r}, '--workers=1')")
    assert "transformers" in modules and modules & ({"timm"} | HARNESSES) == set()


def test_optuna_brings_nothing_heavy_into_planning(loaded):
    modules = loaded("import stable_forgetting.benchmarks.suite.samplers, scipy.stats.qmc, optuna")
    assert modules & (WORKING | {"torch"}) == {"optuna", "scipy.stats"}
