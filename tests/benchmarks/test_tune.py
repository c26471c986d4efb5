from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from stable_forgetting import benchmarks
from stable_forgetting.benchmarks.audits.plan import AuditPlanner
from stable_forgetting.benchmarks.leaderboard.board import BoardRow, Trial
from stable_forgetting.benchmarks.leaderboard.data import to_json
from stable_forgetting.benchmarks.leaderboard.derive import make_leaderboard
from stable_forgetting.benchmarks.leaderboard.tuning import _trial, close_calls
from stable_forgetting.benchmarks.leaderboard.write import FORMATS
from stable_forgetting.benchmarks.pipeline import schedule
from stable_forgetting.benchmarks.pipeline.measuring import read_attack
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.report.cells import settings
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.benchmarks.suite.samplers import Dimension, propose
from stable_forgetting.common.base.config import canonical
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.measure.gaps import summarise
from stable_forgetting.common.store.records import RunRecord
from stable_forgetting.common.store.stages import StageStore

ROOT = Path(benchmarks.__file__).resolve().parents[1]
ROWS = {
    "original": None,
    "retrain": None,
    "gd": None,
    "gd_lora": None,
    "gd_sine": None,
    "finetune": None,
    "fixed": {"method": "gd", "tune": False},
}
RATE = {"low": 1e-4, "high": "1e-2", "log": True}
SPACES = {
    "default": {"lr": RATE, "lam": [0.1, 0.3, 1.0]},
    "gd_sine": {"lam": [0.1, 0.3, 1.0], "lr": RATE},
    "gd_lora": {"adapter.rank": {"low": 2, "high": 16}, "lr": RATE},
}
TUNE = {
    "seeds": [0],
    "trials": 6,
    "spaces": SPACES,
    "grids": {"finetune": {"lr": [1e-4, 3e-4, "1e-3", 2e-3, 3e-3, 1e-2]}},
}
SMALL = {"original": None, "retrain": None, "gd": None}
TPE = {
    "seeds": [0],
    "trials": 7,
    "sampler": "tpe",
    "round": 3,
    "spaces": {"default": {"lr": RATE, "lam": [0.1, 0.3, 1.0]}},
}


@pytest.fixture
def load(tiny_suite):
    def build(**tune):
        return load_suite(str(tiny_suite(methods=ROWS, tune={**TUNE, **tune})))

    return build


def drawn(suite, label):
    return [dict(draw.values) for draw in suite.row(label).draws]


# Draws -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["qmc", "random"])
def test_draws_are_different_readable_and_in_range(load, sampler):
    suite = load(sampler=sampler, trials=6)
    values = drawn(suite, "gd_lora")
    assert len({json.dumps(v) for v in values}) == 6
    for value, draw in zip(values, suite.row("gd_lora").draws, strict=True):
        config = draw.config
        assert type(value["adapter.rank"]) is int and 2 <= config.adapter.rank <= 16
        assert 1e-4 <= config.lr <= 1e-2 and float(f"{config.lr:.3g}") == config.lr
        assert (config.lr, config.adapter.rank) == (value["lr"], value["adapter.rank"])
    assert {v["forget_weight"] for v in drawn(suite, "gd")} <= {0.1, 0.3, 1.0}


@pytest.mark.parametrize("sampler", ["qmc", "random"])
def test_draws_depend_on_tuning_seeds_and_space_only(load, sampler):
    suite, again = load(sampler=sampler), load(sampler=sampler)
    for label in ("gd", "gd_sine", "gd_lora"):
        assert drawn(suite, label) == drawn(again, label)
    assert drawn(suite, "gd") == drawn(suite, "gd_sine"), "one space, one draw, in any order"
    assert drawn(suite, "gd") != drawn(load(sampler=sampler, seeds=[9]), "gd")
    fewer = load(sampler=sampler, trials=3, grids={"finetune": {"lr": [1e-4, 3e-4, 1e-3]}})
    assert drawn(fewer, "gd") == drawn(suite, "gd")[:3], "more trials keep those that are done"


def test_qmc_fills_the_range_evenly():
    proposals = propose("qmc", {"lr": Dimension(low=1e-4, high=1e-2, log=True)}, set(), seed=3)
    eighths = [int(4 * (math.log10(next(proposals)["lr"]) + 4)) for _ in range(8)]
    assert sorted(eighths) == list(range(8)), "also the first point is of the sequence"


def test_every_row_has_the_same_budget(load):
    suite = load()
    tuned = [row for row in suite.rows if row.search]
    assert [row.label for row in tuned] == ["gd", "gd_lora", "gd_sine", "finetune"]
    assert {len(row.draws) for row in tuned} == {6}
    assert suite.row("finetune").search.sampler == "grid" and suite.row("fixed").draws == ()


def test_a_space_of_just_enough_values_is_drawn_whole(tiny_suite):
    space = {"gd": {"lr": [1e-3, "1e-3", 2e-3], "lam": [0.1, 0.3]}}
    for sampler in ("qmc", "random"):
        tune = {"trials": 4, "sampler": sampler, "spaces": space}
        suite = load_suite(str(tiny_suite(methods=SMALL, tune=tune)))
        assert {(d.config.lr, d.config.forget_weight) for d in suite.row("gd").draws} == {
            (lr, lam) for lr in (1e-3, 2e-3) for lam in (0.1, 0.3)
        }


def test_a_child_replaces_an_inherited_grid_by_a_space(tiny_suite, tmp_path):
    grids = {"default": {"lr": [1e-3, 2e-3]}}
    tiny_suite(tmp_path, suite="parent", methods=SMALL, tune={"trials": 2, "grids": grids})
    child = tmp_path / "child.yaml"
    text = (
        "extends: parent.yaml\nsuite: child\ntune: {spaces: {default: {lr: {low: 1, high: 2}}}%s}\n"
    )
    child.write_text(text % "")
    with pytest.raises(ConfigError, match="'default' has a grid and a space; keep one of them"):
        load_suite(str(child))
    child.write_text(text % ", grids: {default: null}")
    assert load_suite(str(child)).row("gd").search.sampler == "qmc"


def test_the_documented_example_is_valid(tiny_suite):
    text = (ROOT / "CONTRIBUTING.md").read_text().split("```yaml\ntune:")[1].split("```")[0]
    suite = load_suite(str(tiny_suite(methods=ROWS, tune=yaml.safe_load("tune:" + text)["tune"])))
    assert {len(row.draws) for row in suite.rows if row.search} == {8}
    assert suite.row("finetune").search.sampler == "grid"


@pytest.mark.parametrize(
    ("dimension", "value", "edge"),
    [
        ({"low": 1e-4, "high": 1e-2, "log": True}, 1.5e-4, True),
        ({"low": 1e-4, "high": 1e-2, "log": True}, 1e-3, False),
        ({"low": 1e-4, "high": 1e-2, "log": True}, 7e-3, True),
        ({"low": 0, "high": 10}, 7, False),
        ({"low": 0, "high": 10}, 9.1, True),
        (["3e-3", "1e-2", 1e-1], "3e-3", True),
        ([0.1, 0.3, 1.0], 0.3, False),
        ([0.3], 0.3, False),
        (["mlp", "all"], "mlp", False),
        ([True, False], True, False),
    ],
)
def test_edges(dimension, value, edge):
    assert Dimension.model_validate(dimension).at_edge(value) is edge


# Rounds ------------------------------------------------------------------------------------------


def metrics(fa, **more):
    return {"fa": fa, "ua": 100 - fa, "ra": 90.0, "va": 80.0, "mia_validation": 50.0, **more}


def distance(stage):
    """A gap with its minimum at lr 3e-4, lam 0.3."""
    params = stage.spec.params
    return 10 * abs(math.log10(params["lr"] / 3e-4)) + 5 * abs(params["forget_weight"] - 0.3)


class Sweep:
    """Fills the trials of a plan by hand."""

    def __init__(self, suite, store, put_record, gap=distance, **more):
        self.suite, self.store, self.put_record = suite, store, put_record
        self.gap, self.more = gap, more

    def fill(self, most=99):
        """Up to ``most`` records that are missing; the plan after them."""
        for result in make_plan(self.suite, self.store).results:
            done = self.store.done("measure", result.stage.key)
            if result.trial is None or done or not most:
                continue
            most -= 1
            if result.trial < 0:
                self.put_record(self.store, result.stage, metrics(0.0))
                continue
            gap = self.gap(result.stage)
            good = None if gap is None else metrics(gap, **self.more)
            self.put_record(self.store, result.stage, good)
        return make_plan(self.suite, self.store)

    def finish(self):
        """The plan once every round is done."""
        plan = self.fill()
        while plan.waiting:
            plan = self.fill()
        return plan


@pytest.fixture
def sweep(tiny_suite, put_record, tmp_path):
    def build(name="store", gap=distance, tune=TPE, rows=SMALL, more=None):
        suite = load_suite(str(tiny_suite(methods=rows, tune=tune)))
        return Sweep(suite, StageStore(tmp_path / name), put_record, gap, **(more or {}))

    return build


def trial_keys(plan):
    return [r.stage.key for r in plan.results if r.trial is not None and r.trial >= 0]


def test_tpe_draws_a_round_once_the_one_before_is_there(sweep):
    work = sweep()
    plan = make_plan(work.suite, work.store)
    assert (len(plan.draws["gd"]), plan.undrawn, plan.waiting) == (3, 4, ["gd"])
    assert make_leaderboard(work.suite, work.store).missing == 4 + 4 + 2 + 1
    plan = work.fill(most=3)
    assert (len(plan.draws["gd"]), plan.undrawn) == (3, 4), "one of the round is missing"
    sizes = []
    while plan.waiting:
        plan = work.fill()
        sizes.append((len(plan.draws["gd"]), plan.undrawn, len(trial_keys(plan))))
    assert sizes == [(6, 1, 6), (7, 0, 7), (7, 0, 7)]
    assert len({json.dumps(canonical(d.config)) for d in plan.draws["gd"]}) == 7
    gaps = [distance(r.stage) for r in plan.results if r.label == "gd" and r.trial is not None]
    assert plan.chosen == {"gd": gaps.index(min(gaps))}
    final = next(r.stage for r in plan.results if r.label == "gd" and r.trial is None)
    chosen = plan.draws["gd"][plan.chosen["gd"]].config
    assert final.spec.params == canonical(chosen)
    assert AuditPlanner(work.suite, work.store).config_of(work.suite.row("gd")) == chosen
    with_qmc = sweep(tune={**TPE, "sampler": "qmc"})
    assert plan.draws["gd"][:3] == list(with_qmc.suite.row("gd").draws)[:3]


def test_tpe_resumes_in_the_middle_of_a_round_with_the_same_bits(sweep):
    whole = trial_keys(sweep("whole").finish())
    work = sweep("cut")
    for most in (2, 1, 2, 1, 1, 1):
        plan = work.fill(most)
        assert trial_keys(plan) == whole[: len(trial_keys(plan))]
    assert trial_keys(work.finish()) == whole


def test_a_larger_budget_keeps_the_trials_that_are_done(sweep):
    fewer = trial_keys(sweep("fewer", tune={**TPE, "trials": 5}).finish())
    assert trial_keys(sweep("more").finish())[:5] == fewer, "also of a round that was cut short"


def test_tpe_reads_the_gaps_of_the_rounds_before(sweep):
    usual = sweep("usual").finish()
    other = sweep("other", gap=lambda stage: 100 - distance(stage)).finish()
    assert trial_keys(usual)[:3] == trial_keys(other)[:3]
    assert trial_keys(usual)[3:] != trial_keys(other)[3:]


def test_tpe_gets_nearer():
    space = {"lr": Dimension(low=1e-5, high=1e-1, log=True)}

    def off(point):
        return abs(math.log10(point["lr"] / 1e-4))

    start = propose("qmc", space, set(), seed=1)
    tried = [next(start) for _ in range(12)]
    told = [(point, off(point)) for point in tried]
    further = propose("tpe", space, set(), seed=2, trials=told)
    later = [off(next(further)) for _ in range(8)]
    assert sum(later) / 8 < 0.6 * sum(map(off, tried)) / 12


def test_diverged_trials_are_the_worst_of_a_tpe_sweep(sweep):
    def gap(stage):
        return None if stage.spec.params["lr"] > 1e-3 else distance(stage)

    plan = sweep(gap=gap).finish()
    rates = [draw.config.lr for draw in plan.draws["gd"]]
    assert max(rates) > 1e-3 >= rates[plan.chosen["gd"]]


def test_a_sweep_without_a_finite_gap_is_an_error(sweep):
    with pytest.raises(ConfigError, match="row 'gd': none of its 7 trials has a finite gap"):
        sweep(gap=lambda _: None).finish()


@pytest.mark.parametrize("sampler", ["qmc", "tpe"])
def test_sweeps_look_at_the_validation_gap_only(sweep, sampler):
    tune = {**TPE, "sampler": sampler}
    plain = sweep("plain", tune=tune).finish()
    noise = {"ta": 1.0, "ta_f": 2.0, "mia": 3.0, "mia_auc": 4.0, "test_loss": 5.0}
    tested = sweep("tested", tune=tune, more=noise).finish()
    assert plain.chosen == tested.chosen and trial_keys(plain) == trial_keys(tested)


def test_tpe_counts_in_plan_and_show(cli, tiny_suite, tmp_path):
    path = tiny_suite(tmp_path, methods=SMALL, tune={**TPE, "seeds": [0, 7]}, seeds=[1, 2])
    out = " ".join(cli("plan", path, "--store", tmp_path / "none").out.split())
    assert "Further rounds of tuning: 8 trial runs more" in out
    assert "After tuning: 1 rows x 2 seeds more (gd)." in out
    assert "measure 12 12 0" in out, "3 trials and Retrain on 2 seeds, 2 references on 2 seeds"
    out = cli("show", path).out
    assert "Tuning: 7 trials per row on seed 0, 7" in out and "first round" in out
    assert "lr 0.0001 to 0.01 (log)" in " ".join(out.split())
    for draw in load_suite(str(path)).row("gd").draws:
        assert f"lr={draw.values['lr']:g}" in out


# Reports -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gaps", "distances", "close"),
    [
        ([5.0, 4.0, 9.0], [3.0, 6.0], True),  # one apart, and a spread of 2.1
        ([5.0, 2.5, 9.0], [3.0, 6.0], False),
        ([4.0, math.inf, math.inf], [3.0, 6.0], False),
        ([4.0, 4.1], [3.0], False),  # one seed has no spread
        ([4.0], [3.0, 6.0], False),
        ([math.inf, math.inf], [3.0, 6.0], False),
    ],
)
def test_a_choice_is_close_where_the_next_trial_is_within_a_deviation(gaps, distances, close):
    row = BoardRow("a", "gd", derived={"ag": summarise(distances)})
    trials = [Trial("a", {}, gap, gap == min(gaps)) for gap in gaps]
    others = [Trial("b", {}, gap, False) for gap in (3.9, 4.0, 4.05)]
    assert close_calls([row], [*trials, *others]) == ["a"] * close


def test_a_choice_of_an_attack_is_not_close_for_two_trials_that_were_not_chosen():
    row = BoardRow("a", "gd", derived={"ag": summarise([3.0, 6.0])})
    trials = [Trial("a", {}, gap, gap == 9.0) for gap in (4.0, 4.1, 9.0)]
    assert close_calls([row], trials) == []


def test_the_whole_sweep_is_shown(sweep):
    grid = {"finetune": {"lr": [1e-4, 2e-4, 3e-4, 4e-4, 5e-4, 6e-4, 7e-4]}}
    wrapping = {"method": "with_contrast", "params": {"base": "finetune", "params": {"steps": 4}}}
    rows = {**SMALL, "finetune": None, "finetune+cl": wrapping}
    spaces = {**TPE["spaces"], "finetune+cl": {"params.lr": RATE}}

    def gap(stage):
        own = {"finetune": lambda p: 1e4 * p["lr"], "with_contrast": lambda p: p["params"]["lr"]}
        rule = own.get(stage.spec.method)
        return rule(stage.spec.params) if rule else distance(stage)

    work = sweep(rows=rows, tune={**TPE, "grids": grid, "spaces": spaces}, gap=gap)
    plan = work.finish()
    for result in plan.results:
        if result.trial is None:
            work.put_record(work.store, result.stage, {"fa": 1.0})
    board = make_leaderboard(work.suite, work.store)
    assert board.missing == 1, "all but the split, without which there are no verdicts"
    assert [row.trials for row in board.rows if row.trials] == [7, 7, 7]
    text, html = (FORMATS[name][1](board) for name in ("md", "html"))
    (best,) = (trial for trial in board.trials if trial.label == "gd" and trial.chosen)
    others = sorted(t.gap for t in board.trials if t.label == "gd" and not t.chosen)
    assert not best.edges
    ends = f"{best.gap:.2f} | {others[0]:.2f} | {others[-1]:.2f}"
    assert f"| gd | {settings(best.params)} | {ends} |" in text
    assert "| finetune | lr=0.0001 (lr at the edge) | 0.25 | " in text
    assert "| finetune+cl | params.lr=" in text
    assert not [t.params for t in board.trials if any("resolved" in name for name in t.params)]
    for shown in (text, html):
        drawn = (
            "gd: tpe (Optuna; the first round is qmc), forget_weight of 0.1, 0.3, 1.0; lr 0.0001"
        )
        assert drawn in shown
        assert "finetune: a grid, lr of 0.0001, 0.0002" in shown
        assert "where a wider one may do better: finetune (lr)" in shown
    told = to_json(board)["tuning"]
    assert len(told["sweep"]) == 21 and sum(trial["chosen"] for trial in told["sweep"]) == 3
    assert [source["sampler"] for source in told["sources"]] == ["tpe", "grid", "tpe"]


# End to end --------------------------------------------------------------------------------------


def records_of(suite, store):
    """(label, seed, trial) -> what was measured, once every stage is there."""
    plan = make_plan(suite, store)
    assert not plan.waiting
    found = {}
    for result in plan.results:
        path = store.folder("measure", result.stage.key) / "record.json"
        record = RunRecord.load(path)
        key = (result.label, result.seed, result.trial)
        found[key] = (record.status, record.metrics, record.params)
    return plan.chosen, found


def test_a_killed_tpe_sweep_goes_on_to_the_same_bits(cli, tiny_suite, tmp_path, monkeypatch):
    space = {"default": {"lr": {"low": 1e-4, "high": 1e-1, "log": True}}}
    tune = {"seeds": [0], "trials": 5, "sampler": "tpe", "round": 2, "spaces": space}
    path = tiny_suite(tmp_path, methods=SMALL, defaults={"steps": 2}, tune=tune)
    suite, whole, cut = load_suite(str(path)), tmp_path / "whole", tmp_path / "cut"
    args = ("run", path, "--store")
    cli.ok(*args, whole)
    shutil.copytree(whole, cut)
    for stage in make_plan(suite, StageStore(whole)).stages():
        if stage.name.startswith("gd/"):
            shutil.rmtree(StageStore(cut).folder(stage.kind, stage.key))
    real = schedule.run_stage

    def killed(stage, *rest, **options):
        if stage.name == "gd/seed-0/trial-3":
            raise KeyboardInterrupt
        return real(stage, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(schedule, "run_stage", killed)
        assert cli(*args, cut).code == 130
    left = make_plan(suite, StageStore(cut))
    assert (len(left.draws["gd"]), left.undrawn) == (4, 1), "in the middle of the second round"
    cli.ok(*args, cut)
    assert records_of(suite, StageStore(cut)) == records_of(suite, StageStore(whole))


def test_lam_and_forget_weight_are_one_word(tiny_suite):
    rows = {"original": None, "retrain": None, "gd": None, "npo_gdr": None, "finetune": None}
    space = {"low": 0.1, "high": 1.0, "log": True}
    for word in ("lam", "forget_weight"):
        tune = {"trials": 2, "spaces": {"default": {word: space}, "finetune": {"lr": space}}}
        suite = load_suite(str(tiny_suite(methods=rows, tune=tune)))
        assert all(0.1 <= d.config.forget_weight <= 1 for d in suite.row("gd").draws)
        assert all(0.1 <= d.config.forget_weight <= 1 for d in suite.row("npo_gdr").draws)
        given = load_suite(str(tiny_suite(methods=rows, defaults={word: 0.7})))
        assert (
            given.row("gd").config.forget_weight,
            given.row("npo_gdr").config.forget_weight,
        ) == (0.7, 0.7)
        own = {**rows, "gd": {"params": {word: 0.2}, "without": [word]}}
        assert (
            load_suite(str(tiny_suite(methods=own, defaults={"lam": 1})))
            .row("gd")
            .config.forget_weight
            == 0.2
        )


def test_the_default_space_skips_what_a_row_does_not_have_and_says_so(tiny_suite, cli, tmp_path):
    rows = {"original": None, "retrain": None, "gd": None, "salun": None}
    wide = {"low": 0.001, "high": 0.01}
    tune = {"trials": 2, "spaces": {"default": {"lr": wide, "lam": {"low": 0.1, "high": 1}}}}
    path = tiny_suite(methods=rows, tune=tune)
    row = load_suite(str(path)).row("salun")
    assert [*row.search.space] == ["lr"] and row.search.skipped == ("lam",)
    shown = " ".join(cli("plan", path, "--store", tmp_path / "store").out.split())
    assert "Without lam of the default space, which they do not have: salun." in shown
    tune["spaces"]["default"].pop("lr")
    with pytest.raises(ConfigError, match=r"lam: unknown key.*write tune: .*spaces: .*salun"):
        load_suite(str(tiny_suite(methods=rows, tune=tune)))


def test_an_attack_decides_among_trials_that_are_near_enough(
    cli, tiny_suite, tmp_path, monkeypatch
):
    """With every trial near enough, the one that shows least after the attack is chosen."""
    from stable_forgetting.benchmarks.pipeline import planner

    monkeypatch.setattr(planner, "SLACK", 1e6)
    tune = {"trials": 2, "seeds": [9], "after_attack": "prune"}
    grid = {"default": {"lr": [1e-6, 1e-2]}}
    store = tmp_path / "store"
    path = tiny_suite(
        tmp_path,
        suite="tuned",
        methods={"original": None, "retrain": None, "gd_sine": None},
        defaults={"steps": 3, "log_every": 2},
        protocol={"scenario": {"kind": "class", "num_classes": 2}},
        tune={**tune, "grids": grid},
    )
    done = cli.ok("run", path, "--store", store)
    assert "and by prune among those within" in done.out
    report = (store / "suites/tuned/LEADERBOARD.md").read_text()
    words = "on seed 9, chosen by the smallest AG4 there, and by prune among those within 1.5 times"
    assert words in report
    suite, stages = load_suite(str(path)), StageStore(store)
    plan = make_plan(suite, stages)
    found = {stage.key: read_attack(stages, stage) for stage in plan.attacks}
    assert len(found) == 3 and all(isinstance(measures, dict) for measures in found.values())
    retrain = found[plan.attacks[1].key]
    shown = [
        max(0.0, max(found[s.key][n].value - retrain[n].value for n in retrain if "forget" in n))
        for s in plan.attacks[::2]
    ]
    gaps = [
        trial["gap"]
        for trial in json.loads((store / "suites/tuned/leaderboard.json").read_text())["tuning"][
            "sweep"
        ]
    ]
    assert plan.chosen["gd_sine"] == min((0, 1), key=lambda k: (shown[k], gaps[k]))
    assert not any("test" in name for measures in found.values() for name in measures)


def test_a_plan_of_an_earlier_version_names_its_trials_by_today_s_fields(tiny_suite):
    tune = {"trials": 2, "spaces": {"default": {"lr": RATE, "lam": [0.1, 1.0]}}}
    methods = {"original": None, "retrain": None, "gd": None}
    row = load_suite(str(tiny_suite(methods=methods, tune=tune))).row("gd")
    values = [{"lr": 1e-3, "lam": lam} for lam in (0.1, 1.0)]
    drawn = [{"values": each, "config": each} for each in values]
    trial = _trial(row, SimpleNamespace(trials={"gd": drawn}, chosen={"gd": 1}), 1, [2.0])
    assert trial.params == {"forget_weight": 1.0} and "forget_weight" in trial.edges
