"""A suite's budget: equal for every row that reads retain data, marked where a row has another."""

from __future__ import annotations

import json

import pytest

from stable_forgetting.benchmarks.leaderboard.derive import make_leaderboard
from stable_forgetting.benchmarks.leaderboard.report import budget_lines
from stable_forgetting.benchmarks.pipeline.context import StageContext
from stable_forgetting.benchmarks.pipeline.measuring import read_split
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.store.stages import StageStore

EPOCHS = {"unit": "epochs", "amount": 2}
BOTH = {"original": None, "retrain": None}
ROWS = {
    **BOTH,
    "finetune": None,
    "gd": {"params": {"batch_size": 16}},
    "random_label": None,
    "scrub": None,
    "sfron": None,
    "unsir": {"params": {"noise_steps": 2, "noise_repeats": 1}},
    "short": {"method": "gd", "params": {"steps": 3}},
    "ssd": None,
    "ascent": {"params": {"steps": 2}},
}


def rows_of(path):
    return {row.label: row for row in load_suite(str(path)).rows[len(BOTH) :]}


def test_a_budget_reaches_every_row_of_its_kind(tiny_suite):
    rows = rows_of(tiny_suite(methods=ROWS, budget=EPOCHS))
    words = {label: row.budget for label, row in rows.items()}
    assert [label for label, word in words.items() if word == "own"] == ["short"]
    assert [label for label, word in words.items() if word == "counted"] == ["ssd"]
    assert words["ascent"] == "" and words["gd"] == "suite"
    gd, short, ascent = (rows[label].config for label in ("gd", "short", "ascent"))
    assert (gd.epochs, gd.steps, gd.epochs_of, gd.schedule) == (2, None, "retain", "cosine")
    assert (short.steps, short.epochs, short.schedule) == (3, None, "constant")
    assert (ascent.steps, ascent.schedule) == (2, "cosine")
    steps = rows_of(tiny_suite(methods={**BOTH, "gd": None}, budget={"unit": "steps", "amount": 7}))
    assert (steps["gd"].config.steps, steps["gd"].config.epochs_of) == (7, "forget")


def test_passes_over_retain_are_no_length_where_it_only_starts_the_adapters(tiny_suite):
    methods = {**BOTH, "ga_fila": None, "npo_fila": None, "gd_fila": None}
    rows = rows_of(tiny_suite(methods=methods, budget=EPOCHS))
    words = {label: (row.budget, row.config.epochs_of) for label, row in rows.items()}
    forgets = ("counted", "forget")
    assert words == {"ga_fila": forgets, "npo_fila": forgets, "gd_fila": ("suite", "retain")}


def test_what_unsir_spends_is_counted_where_repair_would_come_on_top(tiny_suite):
    words = []
    for budget in ({"unit": "steps", "amount": 7}, {"unit": "epochs", "amount": 1}, EPOCHS):
        (row,) = rows_of(tiny_suite(methods={**BOTH, "unsir": None}, budget=budget)).values()
        words.append((row.budget, row.config.steps, row.config.epochs, row.config.repair_epochs))
    assert words == [("counted", None, 1, 1), ("counted", None, 1, 1), ("suite", None, 1, 1)]


def test_the_later_of_steps_and_epochs_holds(tiny_suite):
    rows = {**BOTH, "gd": None, "finetune": {"params": {"epochs": 3}}}
    both = {"defaults": {"steps": 5}, "defaults_of": {"adapter": {"epochs": 2}}}
    space = {"gd": {"epochs": {"low": 1, "high": 4}}, "finetune": {"steps": {"low": 1, "high": 9}}}
    suite = tiny_suite(methods={**rows, "gd_sine": None}, **both)
    lengths = {label: (r.config.steps, r.config.epochs) for label, r in rows_of(suite).items()}
    assert lengths == {"gd": (5, None), "finetune": (None, 3), "gd_sine": (None, 2)}
    tuned = rows_of(tiny_suite(methods=rows, budget=EPOCHS, tune={"trials": 2, "spaces": space}))
    assert all(draw.config.epochs is None for draw in tuned["finetune"].draws)
    assert {row.budget for row in tuned.values()} == {"own"}


def test_a_weight_that_a_row_does_not_read_is_refused_in_its_own_params(tiny_suite):
    path = tiny_suite(methods={**BOTH, "gd": None, "finetune": None}, defaults={"lam": 0.5})
    assert rows_of(path)["gd"].config.forget_weight == 0.5
    with pytest.raises(ConfigError, match=r"finetune.params: method 'finetune' does not read lam"):
        load_suite(str(path), ["methods.finetune.params.lam=2"])


def test_the_later_and_more_specific_length_holds(tiny_suite, tmp_path):
    methods = {**BOTH, "gd": None, "short": {"method": "gd", "params": {"steps": 3}}}
    methods |= {"ascent": None}
    over = {"defaults": {"steps": 4}, "defaults_of": {"full": {"batch_size": 16}}}
    path = str(tiny_suite(methods=methods, budget=EPOCHS, **over))

    def lengths(file, *overrides):
        rows = load_suite(str(file), overrides).rows[len(BOTH) :]
        return {row.label: (row.config.steps, row.config.epochs) for row in rows}

    both = {"gd": (None, 2), "short": (3, None), "ascent": (4, None)}
    assert lengths(path) == both, "a budget is over the defaults of the same file"
    assert lengths(path, "defaults.steps=300") == {
        **{"gd": (300, None), "short": (3, None)},
        "ascent": (300, None),
    }
    assert lengths(path, "defaults.epochs=5")["gd"] == (None, 5)
    assert lengths(path, "budget.amount=7")["gd"] == (None, 7)
    assert lengths(path, "defaults.steps=300", "budget.amount=7")["gd"] == (None, 7)
    assert lengths(path, "methods.short.params.steps=9")["short"] == (9, None)
    child = tmp_path / "child.yaml"
    child.write_text(f"extends: {path}\nsuite: child\ndefaults: {{steps: 8, schedule: linear}}\n")
    assert lengths(child)["gd"] == (8, None)
    assert load_suite(str(child)).row("gd").config.schedule == "linear"
    assert lengths(child, "defaults.epochs=1")["gd"] == (None, 1)


def test_no_retrain_starts_where_original_or_another_retrain_did(tiny_suite, tmp_path):
    plan = make_plan(load_suite(str(tiny_suite(retrains=2))), StageStore(tmp_path))
    models = [s for s in plan.stages() if s.kind in ("original", "retrain")]
    starts = set()
    for stage in models:
        context = StageContext(stage, Runtime(store=tmp_path, device="cpu"))
        task = context.task(context.benchmark.split(1), frozenset({"initial"}))
        starts.add(task.fresh_model().get_parameter("blocks.0.mlp.fc1.weight").sum().item())
    assert len(models) == len(starts) == 3


def records(cli, path, store):
    cli.ok("run", path, "--store", store)
    board = make_leaderboard(load_suite(str(path)), StageStore(store))
    return board, {label: record.cost for label, record in board.records}


def test_rows_of_a_vision_suite_read_equally_many_retain_samples(cli, tiny_suite, tmp_path):
    path = tiny_suite(methods=ROWS, budget=EPOCHS)
    board, costs = records(cli, path, tmp_path)
    retain = costs["retrain"]["retain_samples"] / 2  # two epochs
    for label in ("finetune", "gd", "random_label", "scrub"):
        assert costs[label]["retain_samples"] == 2 * retain, label
        assert costs[label]["retain_passes"] == 2
    # a mask is measured on retain data before the two passes; noise takes the shape of one sample
    assert costs["sfron"]["retain_passes"] == 3
    assert costs["unsir"]["retain_samples"] == 2 * retain + 1
    assert costs["short"]["retain_samples"] == 3 * 32 and costs["ascent"]["retain_samples"] == 0
    assert costs["ssd"]["retain_samples"] > 0 and costs["ssd"]["steps"] == 0
    assert costs["finetune"]["forget_samples"] == 0 < costs["ascent"]["forget_samples"]
    lines = " ".join(budget_lines(board.suite))
    assert "2 passes over the retain set, cosine" in lines
    assert "stated by the row: short." in lines and "is counted: ssd." in lines
    report = tmp_path / "suites" / "tiny" / "LEADERBOARD.md"
    assert "| method | retain passes | retain samples |" in report.read_text(encoding="utf-8")


def test_a_text_suite_tunes_on_requests_of_its_own(cli, tiny_text_suite, tmp_path):
    path = tiny_text_suite(
        protocol={
            "data": {"authors": 3},
            "scenario": {"kind": "authors", "forget_authors": 2, "draw": "disjoint"},
        },
        seeds=[1, 2],
        methods={**BOTH, "finetune": None, "gd": None, "npo_gdr": None},
        defaults={"batch_size": 4, "average": "tokens", "steps": None},
        budget={"unit": "steps", "amount": 3, "schedule": "linear"},
        tune={"trials": 1, "spaces": {"default": {"lr": {"low": 1e-4, "high": 1e-3}}}},
    )
    board, costs = records(cli, path, tmp_path)
    assert {costs[label]["retain_samples"] for label in ("finetune", "gd", "npo_gdr")} == {12}
    assert {row.config.average for row in board.suite.rows[2:]} == {"tokens"}
    store = StageStore(tmp_path)
    splits = {s: read_split(store, board.stages["gd", 0, s].parents["split"]) for s in (1, 2)}
    assert not set(splits[1].parts["forget"]) & set(splits[2].parts["forget"])
    page = (tmp_path / "suites" / "tiny-text" / "LEADERBOARD.md").read_text(encoding="utf-8")
    assert "none of its forget samples is forgotten on a seed above" in page
    assert "no validation data" in page
    spent = json.loads((tmp_path / "suites" / "tiny-text" / "leaderboard.json").read_text())["rows"]
    assert all("retain_passes" in row["cost"] for row in spent)
