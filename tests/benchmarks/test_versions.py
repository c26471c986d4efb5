"""A changed metric or a changed scoring re-runs its own stages on a finished suite, no training."""

from __future__ import annotations

import pytest

from stable_forgetting.benchmarks.pipeline.measuring import read_record
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.pipeline.training import Original, Retrain
from stable_forgetting.benchmarks.pipeline.unlearning import Unlearn
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.measure.metric import MetricSpec
from stable_forgetting.common.protocol.benchmark import Versions
from stable_forgetting.common.store.stages import StageStore
from stable_forgetting.vision.benchmark import VisionBenchmark

OLD = VisionBenchmark.versions


@pytest.fixture
def finished(copied, cli, monkeypatch):
    """The finished class suite: counts of ``unlearn plan`` and a run in this process."""

    def refuse(*_, **__):
        raise AssertionError("this is in the store")

    class Finished:
        path, store = copied.paths["class"], StageStore(copied.store)

        def missing(self):
            stages = make_plan(load_suite(str(self.path)), self.store).stages()
            return {s.kind for s in stages if self.store.done(s.kind, s.key) is None}

        def counts(self):
            out = cli("plan", self.path, "--store", self.store.root).out
            rows = (line.split() for line in out.splitlines())
            return {r[0]: (int(r[2]), int(r[3])) for r in rows if len(r) == 4 and r[3].isdigit()}

        def run(self, *refused):
            for cls, name in refused:
                monkeypatch.setattr(cls, name, refuse)
            return cli("run", self.path, "--store", self.store.root)

    return Finished()


def test_a_metric_over_stored_scores_adds_only_measure_stages(finished, monkeypatch):
    assert finished.missing() == set()
    before = finished.counts()
    spread = MetricSpec("spread", "lower", "spread", unit="nats", doc="of the forget set's loss")
    evaluate = VisionBenchmark.evaluate

    def more(self, scores, *, trial, seed):
        metrics = evaluate(self, scores, trial=trial, seed=seed)
        return {**metrics, "spread": float(scores["forget"].loss.std())}

    monkeypatch.setattr(VisionBenchmark, "metrics", (*VisionBenchmark.metrics, spread))
    monkeypatch.setattr(VisionBenchmark, "evaluate", more)
    monkeypatch.setattr(VisionBenchmark, "versions", Versions(measure=OLD.measure + 1))
    assert finished.missing() == {"measure"}
    assert before["measure"] == (0, 12)
    assert finished.counts() == {**before, "measure": (12, 0)}
    trainings = ((Original, "work"), (Retrain, "work"), (Unlearn, "work"))
    done = finished.run(*trainings, (VisionBenchmark, "score"), (VisionBenchmark, "source"))
    assert done.code == 0, done.err
    assert finished.missing() == set()
    plan = make_plan(load_suite(str(finished.path)), finished.store)
    records = {result.label: read_record(finished.store, result.stage) for result in plan.results}
    assert records["gd"].metrics["spread"] > 0
    assert records["gd"].benchmark_version == OLD.measure + 1
    assert records["gd_bad"].status == "diverged"


def test_a_changed_scoring_scores_and_measures_and_trains_nothing(finished, monkeypatch):
    changed = Versions(score=OLD.score + 1, measure=OLD.measure)
    monkeypatch.setattr(VisionBenchmark, "versions", changed)
    assert finished.missing() == {"score", "measure"}
    done = finished.run((Original, "work"), (Retrain, "work"), (Unlearn, "work"))
    assert done.code == 0, done.err
    assert finished.missing() == set()


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("split", {"split", "retrain", "unlearn", "score", "measure"}),
        ("train", {"original", "retrain", "unlearn", "score", "measure"}),
        ("unlearn", {"unlearn", "score", "measure"}),
    ],
)
def test_a_version_moves_what_is_built_on_it(finished, monkeypatch, kind, missing):
    changed = {"measure": OLD.measure, kind: getattr(OLD, kind) + 1}
    monkeypatch.setattr(VisionBenchmark, "versions", Versions(**changed))
    assert finished.missing() == missing


@pytest.mark.parametrize("kind", ["score", "measure"])
def test_a_training_that_is_evaluated_on_its_way_depends_on_its_measure(
    tiny_suite, tmp_path, monkeypatch, kind
):
    """Whether it ends at a measured number, or keeps a trajectory alone."""
    params = {"evaluate_every": 1, "stop_below": {"fa": 50}}
    rows = {"original": None, "retrain": None, "gd": {"params": params}, "gd_lora": None}
    rows["gd_sine"] = {"params": {"evaluate_every": 1}}
    suite = load_suite(str(tiny_suite(methods=rows)))

    def keys():
        stages = make_plan(suite, StageStore(tmp_path)).stages()
        return {s.spec.method: s.key for s in stages if s.kind == "unlearn"}

    before = keys()
    changed = {"measure": OLD.measure, kind: getattr(OLD, kind) + 1}
    monkeypatch.setattr(VisionBenchmark, "versions", Versions(**changed))
    assert {row for row, key in keys().items() if key != before[row]} == {"gd", "gd_sine"}
