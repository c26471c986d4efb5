"""A stage kind of one's own: one class and one registration in a plugin file, no other edit."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from stable_forgetting.benchmarks.cli.progress import Display
from stable_forgetting.benchmarks.pipeline import schedule
from stable_forgetting.benchmarks.pipeline.executors import InlineExecutor
from stable_forgetting.benchmarks.pipeline.kinds import KINDS
from stable_forgetting.benchmarks.pipeline.lineage import Lineage
from stable_forgetting.benchmarks.pipeline.planner import plan_rows
from stable_forgetting.benchmarks.pipeline.stage import Result
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.registry import load_plugins
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.store.stages import StageStore

PLUGIN = """
import json

from stable_forgetting.benchmarks.pipeline.kinds import KINDS, StageKind
from stable_forgetting.benchmarks.pipeline.stage import StageSpec


class WeighingSpec(StageSpec):
    order: int


@KINDS.register("weighing", summary="Norm of all weights of a stored model.")
class Weighing(StageKind[WeighingSpec]):
    Spec = WeighingSpec
    order = 6

    def work(self, context, spec):
        model = context.model("model")
        with context.writing() as folder:
            norms = [float(p.detach().norm(spec.order)) for p in model.parameters()]
            (folder / "norm.json").write_text(json.dumps(sum(norms)))
            context.about["tensors"] = len(norms)
"""


@pytest.fixture
def weighing(tmp_path):
    """The plugin, loaded; its registration goes with the test."""
    path = tmp_path / "weighing.py"
    path.write_text(PLUGIN)
    load_plugins([path], installed=False)
    yield path
    del KINDS._entries["weighing"]


def planner(norm):
    """A job of one's own: the suite's models, each weighed."""

    def plan(suite, store):
        lineage = Lineage(suite, store)
        plan = plan_rows(lineage)
        for result in list(plan.results):
            parents = {"model": result.stage.parents["model"]}
            name, identity = f"weighing/{result.stage.name}", {"order": norm}
            stage = lineage.stage("weighing", name, identity, parents, seed=result.seed, order=norm)
            plan.results.append(Result(result.label, result.seed, result.replicate, None, stage))
        return plan

    return plan


def execute(suite, store, norm):
    console = Console(file=io.StringIO(), width=200)
    watching = Display(console, "weighed", StageStore(store), every=0.0)
    with InlineExecutor() as executor, watching as display:
        execution = schedule.run_suite(
            suite, Runtime(store), executor, watcher=display, planner=planner(norm)
        )
    assert not execution.failed
    return execution, console.file.getvalue()


def test_a_stage_kind_is_one_class_and_one_registration(tiny_suite, tmp_path, weighing):
    suite, store = load_suite(str(tiny_suite())), tmp_path / "runs"
    execution, text = execute(suite, store, 2)
    stages = list(execution.plan.stages())
    weighed = [stage for stage in stages if stage.kind == "weighing"]
    assert [stage.parents["model"].kind for stage in weighed] == ["original", "retrain"]
    assert execution.executed == len(stages)
    assert "last: weighing weighing/retrain/seed-1" in text
    values = []
    for stage in weighed:
        done = StageStore(store).done("weighing", stage.key)
        assert done["status"] == "ok" and done["tensors"] > 0
        folder = StageStore(store).folder("weighing", stage.key)
        values.append(json.loads((folder / "norm.json").read_text()))
    assert min(values) > 0 and values[0] != values[1]
    assert execute(suite, store, 2)[0].executed == 0
    assert execute(suite, store, 1)[0].executed == len(weighed)


def test_the_spec_of_a_kind_is_checked(tiny_suite, tmp_path, weighing):
    suite = load_suite(str(tiny_suite()))
    with pytest.raises(ValueError, match="order"):
        planner("two")(suite, StageStore(tmp_path))


def test_a_kind_that_nobody_registered_is_named(tiny_suite, tmp_path):
    suite = load_suite(str(tiny_suite()))
    with pytest.raises(ConfigError, match="unknown stage kind 'weighing'"):
        planner(2)(suite, StageStore(tmp_path))
