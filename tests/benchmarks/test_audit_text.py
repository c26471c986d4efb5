"""``unlearn attack`` on a tiny language run: what carries over to text, and what does not apply."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from stable_forgetting.benchmarks.audits.derive import AuditReport
from stable_forgetting.benchmarks.audits.plan import AuditPlanner
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.benchmarks.suite.suite import FLOOR
from stable_forgetting.common.audits import AUDITS
from stable_forgetting.common.store.stages import StageStore
from stable_forgetting.language.metrics.tofu import normalised_probabilities

ROWS = [FLOOR, "original", "gd_sine"]
PARTS = ("forget", "retain", "test_real_authors", "test_world_facts")
CLASSES_ONLY = ("retained_kl", "cmia", "prototype", "linear_probe", "over_unlearning")


@pytest.fixture(scope="module")
def run(cli, tiny_text_suite, tmp_path_factory):
    """A tiny language suite, run once; tests add audits to its store."""
    root = tmp_path_factory.mktemp("audit-text")
    scenario = {"kind": "authors", "forget_authors": 3}
    path = tiny_text_suite(root, suite="talk", retrains=2, protocol={"scenario": scenario})
    store = root / "store"
    cli.ok("run", path, "--store", store)

    def audit(*args):
        done = cli.ok("attack", path, "--store", store, *args)
        report = json.loads((store / "suites" / "talk" / "audits.json").read_text())
        return done, report["audits"]

    return SimpleNamespace(audit=audit, path=path, store=store)


def test_what_compares_outputs_is_there_for_every_part(run):
    _, found = run.audit("--attacks", "js,disagreement,ks,c2st")
    for name in ("js", "disagreement", "c2st"):
        assert list(found[name]["rows"]) == ROWS
        for row in found[name]["rows"].values():
            assert set(row["1"]) == set(PARTS)
            assert all(measure["value"] is not None for measure in row["1"].values())
    assert set(found["ks"]["rows"]["gd_sine"]["1"]) >= {"forget", "test_real_authors"}


def test_the_compared_distributions_are_those_of_probability_with_options(run):
    suite, store = load_suite(str(run.path)), StageStore(run.store)
    audits = {"js": AUDITS["js"]()}
    report = AuditReport(suite, store, audits, AuditPlanner(suite, store).report_plan(audits))
    (result,) = (r for r in report.finals if r.label == "gd_sine")
    for part in PARTS:
        scores = report.scores(result.stage)[part]
        np.testing.assert_allclose(scores.probs.sum(axis=1), 1)
        right = normalised_probabilities(scores.extra, "clean")
        np.testing.assert_allclose(scores.probs[:, 0], right)
    assert report.scores(result.stage)["holdout"].probs is None


def test_what_needs_classes_says_so_in_one_line_and_runs_nothing(run):
    before = sorted(run.store.glob("stages/*"))
    done, found = run.audit("--attacks", ",".join(CLASSES_ONLY))
    assert sorted(run.store.glob("stages/*")) == before
    line = "not applicable: only where whole classes are forgotten, and this scenario is authors"
    shown = [text.strip().removeprefix("- ") for text in done.out.splitlines()]
    assert shown.count(line) == len(CLASSES_ONLY)
    for name in CLASSES_ONLY:
        assert list(found[name]["rows"]) == ROWS
        assert all(row["1"] == {"not_applicable": line} for row in found[name]["rows"].values())


def test_attacks_on_the_stored_models_work_on_answers(run):
    settings = ("--with", "relearn.max_steps=2", "--with", "relearn.repeats=1")
    done, found = run.audit("--attacks", "relearn,remove_adapter,requantise", *settings)
    adapter = found["remove_adapter"]["rows"]
    assert set(adapter["gd_sine"]["1"]) == {
        "forget",
        "test_real_authors",
        "test_world_facts",
        "recovered",
    }
    assert adapter["original"]["1"]["not_applicable"].startswith("not applicable: no adapter")
    (row,) = (line for line in done.out.splitlines() if line.split()[:2] == ["original", "n/a"])
    assert row.split()[1:] == ["n/a"] * (len(row.split()) - 1)
    rounded = found["requantise"]["rows"]["retrain"]["1"]
    assert "int8 change" in rounded and "int4 test_world_facts" in rounded
    assert "AIN" in found["relearn"]["rows"]["gd_sine"]["1"]


def test_populations_compare_mean_token_margins_of_answers(run):
    _, found = run.audit("--attacks", "klom,epsilon", "--shadows", 2, "--yes")
    for name, columns in (("klom", PARTS), ("epsilon", ("F", "score"))):
        for label in ROWS:
            row = found[name]["rows"][label]["1"]
            assert all(row[column]["n"] == 2 for column in columns)
            assert all(row[column]["value"] is not None for column in columns)
