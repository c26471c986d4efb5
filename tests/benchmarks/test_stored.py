"""The plan beside the records: reports read it, and make it only where it is not there."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace

import pytest

from stable_forgetting.benchmarks.audits import plan as audits
from stable_forgetting.benchmarks.audits import stored
from stable_forgetting.benchmarks.audits.stored import FILE, stored_plan
from stable_forgetting.benchmarks.leaderboard.derive import make_leaderboard
from stable_forgetting.benchmarks.pipeline import planner
from stable_forgetting.benchmarks.pipeline.kinds import KINDS
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.audits import AUDITS
from stable_forgetting.common.store.stages import StageStore


@pytest.fixture
def ran(filled):
    suite, store = load_suite(str(filled.paths["class"])), StageStore(filled.store)
    return suite, store, store.root / "suites" / suite.name / FILE


@pytest.fixture
def no_planning(monkeypatch):
    def refuse(*_):
        raise AssertionError("a report plans")

    monkeypatch.setattr(planner, "make_plan", refuse)
    monkeypatch.setattr(audits, "plan_rows", refuse)


def test_a_run_leaves_the_keys_of_all_its_results(ran):
    suite, store, path = ran
    assert path.is_file()
    of_run = make_plan(suite, store)
    stored = stored_plan(suite, store)
    wanted = [(r.label, r.seed, r.replicate, r.stage.key) for r in of_run.results]
    assert [(r.label, r.seed, r.replicate, r.stage.key) for r in stored.results] == wanted
    for ours, theirs in zip(stored.results, of_run.results, strict=True):
        parents = {role: parent.key for role, parent in theirs.stage.parents.items()}
        assert {role: parent.key for role, parent in ours.stage.parents.items()} == parents


def test_a_report_of_a_finished_suite_plans_nothing(ran, no_planning):
    suite, store, _ = ran
    board = make_leaderboard(suite, store)
    assert board.complete and {r.label for r in board.rows} >= {r.label for r in suite.rows}


def test_a_run_without_a_stored_plan_is_planned_once(ran, monkeypatch):
    suite, store, path = ran
    before = path.read_text()
    path.unlink()
    board = make_leaderboard(suite, store)
    assert json.loads(path.read_text()) == json.loads(before)
    monkeypatch.setattr(planner, "make_plan", None)
    again = make_leaderboard(suite, store)
    assert again.rows == board.rows


@pytest.mark.parametrize("text", ["", "{", '{"plan": {}}', "[]"])
def test_a_damaged_plan_is_made_again(ran, text):
    suite, store, path = ran
    before = path.read_text()
    path.write_text(text)
    stored_plan(suite, store)
    assert path.read_text() == before


def test_a_plan_of_other_rows_is_not_read(ran):
    suite, store, path = ran
    before = path.read_text()
    fewer = replace(suite, rows=suite.rows[:2])
    try:
        assert {r.label for r in stored_plan(fewer, store).results} == {
            row.label for row in fewer.rows
        }
    finally:
        path.write_text(before)


def test_a_plan_of_an_earlier_kind_or_attack_is_not_read(tiny_suite, tmp_path, monkeypatch):
    tune = {"trials": 1, "after_attack": "prune", "grids": {"default": {"lr": [1e-3]}}}
    rows = {"original": None, "retrain": None, "gd": None}
    suite, store = load_suite(str(tiny_suite(methods=rows, tune=tune))), StageStore(tmp_path)
    states = [stored_plan(suite, store).state]
    with monkeypatch.context() as patch:
        patch.setattr(KINDS["map"], "version", 2)
        states.append(stored_plan(suite, store).state)
    attack = AUDITS["prune"]
    monkeypatch.setattr(attack, "info", replace(attack.info, version=attack.info.version + 1))
    states.append(stored_plan(suite, store).state)
    assert len({*states}) == 3


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_store_that_cannot_be_written_is_read(tiny_suite, tmp_path, monkeypatch, number):
    """Without rights, mounted to be read only, or full."""

    def refuse(path, text):
        raise OSError(number, os.strerror(number), str(path))

    suite = load_suite(str(tiny_suite()))
    (tmp_path / "suites" / suite.name).mkdir(parents=True)
    monkeypatch.setattr(stored, "write_text", refuse)
    assert stored_plan(suite, StageStore(tmp_path)).results


def test_a_suite_that_was_never_run_gets_no_file(ran, tmp_path):
    stored_plan(ran[0], StageStore(tmp_path / "empty"))
    assert not (tmp_path / "empty").exists()
