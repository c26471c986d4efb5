"""``run --free-weights``: what it deletes, what it leaves, and what comes back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from stable_forgetting.benchmarks.leaderboard.freeing import FILES, free, freeable, remove_rows
from stable_forgetting.benchmarks.pipeline.measuring import AUDIT_FILE
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.suite.remembered import suite_files
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.store.stages import DONE, FREED, StageStore

ROWS = {"original": None, "retrain": None, "gd_sine": None}
MORE = {**ROWS, "ft": None}


@pytest.fixture(scope="module")
def full(tiny_suite, cli, tmp_path_factory):
    """A suite and its store."""
    folder = tmp_path_factory.mktemp("freeing")
    path = tiny_suite(folder, methods=ROWS, defaults={"steps": 3})
    cli.ok("run", path, "--store", folder / "runs")
    return path, folder / "runs"


@pytest.fixture
def filled(full, tmp_path):
    path, store = full
    return path, shutil.copytree(store, tmp_path / "runs")


def weights(store):
    return {p for name in FILES for p in (store / "stages").rglob(name)}


def test_a_finished_suite_keeps_its_records_alone(filled, cli):
    path, store = filled
    planned = cli("plan", path, "--store", store)
    size = sum(p.stat().st_size for p in weights(store))
    words = f"{size / 1e6:,.1f} MB of weights in {len(weights(store))} stages"
    assert words in planned.out and weights(store)
    before = cli("report", path, "--store", store).out
    done = cli("run", path, "--store", store, "--free-weights")
    assert done.code == 0 and f"deleting {words}" in done.out
    assert not weights(store)
    assert cli("report", path, "--store", store).out == before
    again = cli("run", path, "--store", store, "--free-weights")
    assert "0.0 MB of weights in 0 stages" in again.out and again.code == 0
    assert all(not problem for _, problem in StageStore(store).verify())


def test_what_a_kill_left_is_freed_too(filled, monkeypatch):
    path, root = filled
    suite, store, held = load_suite(str(path)), StageStore(root), weights(root)

    def killed(file, **_):
        if file in held:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", killed)
        free(freeable(suite, store), store)
    assert weights(root) == held
    free(freeable(suite, store), store)
    assert not weights(root) and not freeable(suite, store)


def test_a_built_in_suite_may_lie_in_the_same_store(filled):
    """Its file there is no suite of the user's, which may not have a built-in name."""
    path, store = filled
    (store / "suites" / "digits-random").mkdir()
    for name, text in suite_files(load_suite("digits-random")).items():
        (store / "suites" / "digits-random" / name).write_text(text)
    assert freeable(load_suite(str(path)), StageStore(store))


def test_a_suite_that_cannot_be_read_stops_no_plan(filled, cli):
    """It does stop the deletion: what it needs is not known."""
    path, store = filled
    (store / "suites" / "lost").mkdir()
    (store / "suites" / "lost" / "suite.yaml").write_text("suite: lost\nplugins: [gone.py]\n")
    planned = cli("plan", path, "--store", store)
    assert planned.code == 0 and "needed is not known" in " ".join(planned.out.split())
    done = cli("run", path, "--store", store, "--free-weights")
    assert done.code == 2 and weights(store)


def test_what_is_still_to_do_keeps_its_parents(filled):
    path, root = filled
    suite, store = load_suite(str(path)), StageStore(root)
    stages = list(make_plan(suite, store).stages())
    score = next(s for s in stages if s.kind == "score" and s.name.startswith("gd_sine"))
    shutil.rmtree(store.folder(score.kind, score.key))
    assert {stage.kind for stage, _ in freeable(suite, store)} == {"retrain"}


def test_another_suite_of_the_store_keeps_what_it_needs(filled, tiny_suite):
    path, root = filled
    other = tiny_suite(path.parent, suite="other", methods=MORE, defaults={"steps": 3})
    left = root / "suites" / "other" / "suite.yaml"  # by a run that was cut short
    left.parent.mkdir()
    shutil.copy(other, left)
    kinds = {stage.kind for stage, _ in freeable(load_suite(str(path)), StageStore(root))}
    assert kinds == {"retrain", "unlearn"}, "ft is to start from Original"


def test_freed_weights_come_back_when_a_row_needs_them(filled, tiny_suite, cli, caplog):
    path, root = filled
    cli.ok("run", path, "--store", root, "--free-weights")
    (freed,) = (json.loads(p.read_text()) for p in root.glob(f"stages/original-*/{DONE}"))
    more = tiny_suite(path.parent, methods=MORE, defaults={"steps": 3})
    done = cli("run", more, "--store", root)
    assert done.code == 0 and "had its weights freed" in caplog.text
    (made,) = (json.loads(p.read_text()) for p in root.glob(f"stages/original-*/{DONE}"))
    name = "model.safetensors"
    assert made["files"][name] == freed[FREED][name] and FREED not in made
    assert "retrain" not in {p.parent.name.partition("-")[0] for p in weights(root)}


def test_a_fresh_tuned_row_keeps_no_attack_of_its_trials(tiny_suite, put_record, tmp_path):
    """And Retrain keeps its own."""
    tune = {"trials": 2, "after_attack": "prune", "grids": {"default": {"lr": [1e-3, 1e-2]}}}
    suite, store = load_suite(str(tiny_suite(methods=ROWS, tune=tune))), StageStore(tmp_path)
    values, plan = dict.fromkeys(("ua", "ra", "va", "mia_validation"), 9.0), None
    while plan is None or plan.waiting:
        plan = make_plan(suite, store)
        for stage in plan.stages():
            if stage.kind == "measure":
                put_record(store, stage, values)
            else:
                with store.writing(stage.kind, stage.key, {"status": "ok"}) as folder:
                    (folder / AUDIT_FILE).write_text('{"not_applicable": "-", "measures": {}}')
    remove_rows(suite, ["gd_sine"], store)
    left = [s for s in plan.attacks if store.done(s.kind, s.key)]
    assert {s.parents["model"].kind for s in plan.attacks} == {"unlearn", "retrain"}
    assert {s.parents["model"].kind for s in left} == {"retrain"}
