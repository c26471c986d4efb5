from __future__ import annotations

import csv
import dataclasses
import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from stable_forgetting.benchmarks.audits.after import Shown, _cut_off, ordered, places
from stable_forgetting.benchmarks.audits.after import sections as after_sections
from stable_forgetting.benchmarks.audits.cost import costs, megabytes
from stable_forgetting.benchmarks.audits.derive import AuditReport, AuditTable
from stable_forgetting.benchmarks.audits.plan import AuditPlanner, Shadows, suite_of_record
from stable_forgetting.benchmarks.audits.report import measure_cell
from stable_forgetting.benchmarks.cli.attack import Budget, choose
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.pipeline.unlearning import move_last_digits_
from stable_forgetting.benchmarks.report.cells import significant
from stable_forgetting.benchmarks.report.section import table
from stable_forgetting.benchmarks.report.terminal import pieces
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.benchmarks.suite.suite import FLOOR
from stable_forgetting.common.audits import AUDITS
from stable_forgetting.common.audits.base import Measure, TooFew
from stable_forgetting.common.audits.pairs import JensenShannon
from stable_forgetting.common.audits.twins import LEAST, MARK, Rounding, UnlearningSeed
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.data.splits import ForgetSplit, ids_digest
from stable_forgetting.common.measure.gaps import Summary
from stable_forgetting.common.measure.scores import Scores
from stable_forgetting.common.store.records import RunRecord
from stable_forgetting.common.store.stages import StageStore

ROWS = {"original": None, "retrain": None, "gd_sine": None}
SUITE = {
    "suite": "tiny",
    "methods": ROWS,
    "retrains": 2,
    "defaults": {"steps": 4, "log_every": 2},
    "protocol": {"scenario": {"kind": "class", "num_classes": 2}},
}
FREE = ("js", "disagreement", "ks", "c2st", "retained_kl", "cmia")
POPULATIONS = ("klom", "epsilon", "ulira")


@pytest.fixture(scope="module")
def run(tiny_suite, cli, tmp_path_factory):
    """A tiny class suite, run once; tests add audits and shadows to its store."""
    root = tmp_path_factory.mktemp("audit")
    path = tiny_suite(root, **SUITE)
    store = root / "store"
    cli.ok("run", path, "--store", store)

    def audit(*args, target=path, cli=cli):
        return cli("attack", target, "--store", store, *args)

    ok, report = partial(audit, cli=cli.ok), store / "suites" / "tiny" / "audits.json"
    return SimpleNamespace(path=path, store=store, audit=audit, ok=ok, report=report)


def stages(store):
    return sorted(path.name for path in (store / "stages").iterdir())


def results(run):
    return json.loads(run.report.read_text())["audits"]


def test_the_list_gives_formula_source_and_cost_of_every_audit(cli, one_line_error):
    done = cli.ok("attack", "--list")
    for name in AUDITS.names():
        assert name in done.out
    assert done.out.count("Formula:") == len(AUDITS.names())
    assert done.out.count("Source:") == len(AUDITS.names())
    assert "--list" in one_line_error(cli("attack"))
    for tier in ("free", "minutes", "shadows"):
        assert f"{tier}: " in done.out


def test_free_audits_stand_beside_the_floor_and_train_nothing(run):
    before = stages(run.store)
    done = run.ok()
    assert stages(run.store) == before
    found = results(run)
    assert list(found) == [*FREE, *POPULATIONS]
    for name in FREE:
        assert list(found[name]["rows"]) == [FLOOR, "original", "gd_sine"]
        for row in found[name]["rows"].values():
            assert row["1"]["forget"]["value"] is not None
            assert row["1"]["forget"]["low"] <= row["1"]["forget"]["high"]
    for name in POPULATIONS:
        assert "--shadows" in found[name]["rows"]["gd_sine"]["1"]["not_applicable"]
    assert done.out.count(FLOOR) >= len(FREE)


def test_model_audits_are_stages_that_are_not_done_again(run):
    wanted = "relearn,prototype,linear_probe,remove_adapter,requantise,over_unlearning"
    run.ok("--attacks", wanted, "--with", "relearn.max_steps=3")
    found = results(run)
    for name in wanted.split(","):
        assert {"retrain", FLOOR, "original", "gd_sine"} == set(found[name]["rows"])
    rows = found["relearn"]["rows"]
    assert found["relearn"]["config"]["max_steps"] == 3
    assert "AIN" in rows["gd_sine"]["1"] and "AIN" in rows[FLOOR]["1"]
    assert "AIN" not in rows["retrain"]["1"]
    adapter = found["remove_adapter"]["rows"]
    assert "forget" in adapter["gd_sine"]["1"]
    assert "no adapter" in adapter["original"]["1"]["not_applicable"]
    before, first = stages(run.store), run.report.read_bytes()
    run.audit("--attacks", wanted, "--with", "relearn.max_steps=3")
    assert stages(run.store) == before and run.report.read_bytes() == first
    run.audit("--attacks", "relearn", "--with", "relearn.max_steps=2")
    assert len(stages(run.store)) == len(before) + 4  # another config is another stage


def test_a_suite_runs_and_shows_its_own_audits(run, cli, tiny_suite, tmp_path):
    audits = {"js": None, "relearn": {"max_steps": 3}, "remove_adapter": {}}
    path = tiny_suite(tmp_path, **SUITE, audits=audits)
    assert "attacks" in cli("plan", path, "--store", run.store).out
    done = cli.ok("run", path, "--store", run.store)
    folder = run.store / "suites" / "tiny"
    shown = json.loads((folder / "leaderboard.json").read_text())["audits"]
    assert list(shown) == list(audits) and shown["relearn"]["config"]["max_steps"] == 3
    run.audit("--attacks", ",".join(audits), "--with", "relearn.max_steps=3")
    assert shown == results(run)
    page = (folder / "LEADERBOARD.md").read_text()
    for name in audits:
        assert f"### {name}: " in page and f"{name}: " in done.out
        assert f">{name}: " in (folder / "leaderboard.html").read_text()
    before = stages(run.store)
    assert cli("report", path, "--store", run.store).out.count("AIN") == done.out.count("AIN") > 0
    cli.ok("run", path, "--store", run.store)
    assert stages(run.store) == before


@pytest.mark.parametrize(
    ("audits", "words"),
    [
        ({"jss": None}, "did you mean 'js'?"),
        ({"relearn": {"shot": 3}}, "audits.relearn: shot: unknown key; did you mean 'shots'?"),
        ({"klom": None}, "trains models of its own; leave it out and run: unlearn attack"),
        ({"sequential": None}, "--attacks sequential"),
        ({"rounding": None}, "--attacks rounding"),
        ({"unlearning_seed": None}, "--attacks unlearning_seed"),
    ],
)
def test_wrong_audits_of_a_suite_are_one_line(
    cli, tiny_suite, tmp_path, one_line_error, audits, words
):
    path = tiny_suite(tmp_path, audits=audits)
    assert words in one_line_error(cli("run", path, "--store", tmp_path / "store"))


def test_shadows_say_what_they_cost_and_wait_for_yes(run):
    before = stages(run.store)
    done = run.ok("--shadows", 3)
    assert stages(run.store) == before
    assert "Add --yes" in done.out and "2 epochs" in done.out and "4 steps" in done.out


def test_fixed_shadows_are_the_suites_own_and_more(run):
    suite, store = load_suite(str(run.path)), StageStore(run.store)
    planner = AuditPlanner(suite, store)
    own = {stage.key for stage in make_plan(suite, store).stages()}
    plan = planner.shadow_plan(Shadows(3))
    kinds: dict[str, list] = {}
    for stage in plan.stages():
        kinds.setdefault(stage.kind, []).append(stage)
    assert {kind: len(found) for kind, found in kinds.items()} == {
        "split": 1,
        "original": 3,
        "unlearn": 3,
        "retrain": 6,
        "score": 12,
        "measure": 12,
    }
    shared = {kind: sum(s.key in own for s in found) for kind, found in kinds.items()}
    assert shared == {
        "split": 1,
        "original": 1,
        "unlearn": 1,
        "retrain": 2,
        "score": 4,
        "measure": 4,
    }
    one = planner.shadow_plan(Shadows(3, originals=1))
    originals = {s.parents["start"].key for s in one.stages() if s.kind == "unlearn"}
    assert len(originals) == 1


def test_the_cost_is_that_of_what_was_recorded(run):
    suite, store = load_suite(str(run.path)), StageStore(run.store)
    planner = AuditPlanner(suite, store)
    recorded = list(planner.base.stages())
    found = {c.kind: c for c in costs(planner.shadow_plan(Shadows(9)), store, recorded)}
    cost = found["retrain"]
    assert cost.planned == 18 and cost.length == "2 epochs"
    known = [
        store.done("retrain", p.parents["model"].key)
        for p in (planner.retrain_shadow(1, k) for k in range(18))
    ]
    seconds = [done["stage_seconds"] for done in known if done]
    assert cost.missing == 18 - len(seconds)
    assert cost.seconds == pytest.approx(cost.missing * sum(seconds) / len(seconds))
    assert found["unlearn gd_sine"].length == "4 steps"
    assert found["split"].seconds == 0 and found["split"].missing == 0
    halves = planner.shadow_plan(Shadows(2, "halves"))
    unknown = {c.kind: c for c in costs(halves, StageStore(run.store / "empty"), [])}
    assert unknown["original"].seconds is None


def test_the_disk_of_a_stage_counts_what_lies_in_its_folders(tmp_path):
    stage = SimpleNamespace(kind="unlearn", key="k")
    (tmp_path / "trajectory").mkdir()
    (tmp_path / "trajectory" / "000001.safetensors").write_bytes(bytes(2**20))
    assert megabytes(SimpleNamespace(folder=lambda kind, key: tmp_path), stage) == 1.0


def test_shadows_make_populations_and_resume(run):
    args = ("--attacks", ",".join(POPULATIONS), "--shadows", 3)
    run.ok(*args, "--yes")
    found = results(run)
    for name, column in zip(POPULATIONS, ("forget", "F", "b.acc"), strict=True):
        for label in (FLOOR, "original", "gd_sine"):
            measure = found[name]["rows"][label]["1"][column]
            assert measure["value"] is not None and "only 3 models" in measure["note"]
    before, first = stages(run.store), run.report.read_bytes()
    run.audit("--attacks", ",".join(POPULATIONS))  # reads what is there
    assert run.report.read_bytes() == first
    run.audit(*args, "--yes")
    assert stages(run.store) == before and run.report.read_bytes() == first


def test_seeds_that_share_a_split_are_one_population(cli, tiny_suite, tmp_path):
    path = tiny_suite(
        tmp_path,
        suite="same",
        methods={"original": None, "retrain": None},
        retrains=2,
        seeds=[1, 2],
        protocol={"scenario": {"kind": "class", "classes": [3]}, "train": {"epochs": 1}},
    )
    store = tmp_path / "store"
    cli.ok("run", path, "--store", store)
    cli.ok("attack", path, "--store", store, "--attacks", "klom")
    found = json.loads((store / "suites" / "same" / "audits.json").read_text())
    rows = found["audits"]["klom"]["rows"]
    assert {label: list(cells) for label, cells in rows.items()} == {
        FLOOR: ["1"],
        "original": ["1"],
    }
    assert rows["original"]["1"]["forget"]["n"] == rows[FLOOR]["1"]["forget"]["n"] == 2


def test_halves_never_train_on_what_is_left_out(run):
    run.ok("--attacks", "ulira", "--shadows", 6, "--design", "halves", "--yes")
    rows = results(run)["ulira"]["rows"]
    assert rows["gd_sine, halves"]["1"]["b.acc"]["n"] == 6
    suite, store = load_suite(str(run.path)), StageStore(run.store)
    plan = AuditPlanner(suite, store).shadow_plan(Shadows(6, "halves"))
    for stage in plan.stages():
        if stage.kind == "unlearn":
            original, split = stage.parents["start"], stage.parents["split"]
            path = store.folder("split", split.key) / "split.safetensors"
            parts = ForgetSplit.load(path).parts
            trained = np.union1d(parts["forget"], parts["retain"])
            assert store.done("original", original.key)["trained_on"] == ids_digest(trained)
            assert not np.isin(parts["forget_out"], trained).any()
            assert len(parts["forget_out"]) > 0


def trained_after_yes(run, name):
    """The rows of an attack that trains further models, which only --yes does, and only once."""
    before = stages(run.store)
    done = run.audit("--attacks", name)
    assert done.code == 0 and "Add --yes" in done.out and stages(run.store) == before
    assert "not run" in results(run)[name]["rows"]["gd_sine"]["1"]["not_applicable"]
    done = run.ok("--attacks", name, "--yes")
    rows, after = results(run)[name]["rows"], stages(run.store)
    again = run.audit("--attacks", name)
    assert stages(run.store) == after and "To be trained" not in again.out
    return rows


def test_requests_in_turn_add_up_and_wait_for_yes(run):
    rows = trained_after_yes(run, "sequential")
    assert set(rows) == {*ROWS, FLOOR}
    columns = ["1: FA", "1: RA", "1: TA", "2: FA", "2: earlier", "2: RA", "2: TA"]
    assert list(rows["gd_sine"]["1"]) == columns
    original = rows["original"]["1"]  # the same model after each request
    assert original["1: FA"]["value"] == original["2: earlier"]["value"]


def test_rounding_trains_a_twin_of_each_row_and_waits_for_yes(run):
    rows = trained_after_yes(run, "rounding")
    assert set(rows) == {*ROWS} - {"original", "retrain"}
    assert list(rows["gd_sine"]["1"]) == ["FA", "RA", "TA", "answers"]
    assert 0 <= rows["gd_sine"]["1"]["answers"]["value"] <= 100
    suite, store = load_suite(str(run.path)), StageStore(run.store)
    planner = AuditPlanner(suite, store)
    twin = planner.twin(suite.row("gd_sine"), 1, moved=True)
    own = next(r.stage for r in planner.base.results if r.label == "gd_sine")
    weights = [store.folder("unlearn", s.parents["model"].key) for s in (own, twin)]
    one, two = (load_file(folder / "adapter.safetensors") for folder in weights)
    assert one.keys() == two.keys() and any(not torch.equal(one[n], two[n]) for n in one)


def test_a_row_that_does_not_apply_gets_no_further_models(tiny_suite, tmp_path):
    random = {"scenario": {"kind": "random", "fraction": 0.2}}
    path = tiny_suite(tmp_path, methods={**ROWS, "unsir": None}, protocol=random)
    planner = AuditPlanner(load_suite(str(path)), StageStore(tmp_path / "store"))
    assert [*planner.base.inapplicable] == ["unsir"]
    plans = planner.twin_plan(moved=True), planner.shadow_plan(Shadows(2)), planner.stream_plan(2)
    assert all(r.label != "unsir" for plan in plans for r in plan.results)


def test_every_weight_moves_to_a_neighbour():
    model = torch.nn.Linear(50, 20)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    move_last_digits_(model, 1)
    for name, value in model.state_dict().items():
        up = torch.nextafter(before[name], torch.tensor(torch.inf)) == value
        down = torch.nextafter(before[name], torch.tensor(-torch.inf)) == value
        assert (up | down).all() and up.any() and down.any(), name


def models(**accuracies):
    """Seed -> parts, from the accuracies of each part in percent."""
    parts = {
        name: [
            Scores(
                indices=np.arange(100),
                loss=np.zeros(100),
                probability=np.zeros(100),
                margin=np.zeros(100),
                correct=(np.arange(100) < value).astype(np.float64),
            )
            for value in values
        ]
        for name, values in accuracies.items()
    }
    count = len(next(iter(parts.values())))
    return {seed: {name: each[seed] for name, each in parts.items()} for seed in range(count)}


def test_rounding_marks_what_it_moves_more_than_the_seeds_do():
    own = models(forget=[35, 50, 65], retain=[90, 90, 90], test=[10, 40, 90])
    twins = models(forget=[45, 70, 35], retain=[90, 90, 91], test=[20, 60, 60])
    cells = Rounding().compare(own, twins)
    # forget: sqrt((100 + 400 + 900) / 3 / 2) = 15.3 against a standard deviation of 15
    assert {h for c in cells.values() for h, m in c.items() if m.note == MARK} == {"FA", "RA"}
    assert [cell["FA"].value for cell in cells.values()] == pytest.approx([10, 20, 30])
    few = [{seed: side[seed] for seed in range(LEAST - 1)} for side in (own, twins)]
    assert not any(m.note for c in Rounding().compare(*few).values() for m in c.values())


def test_the_spread_over_seeds_is_divided():
    own = models(forget=[10, 30, 50, 70], retain=[90, 90, 90, 90], test=[40, 60, 40, 60])
    twins = models(forget=[10, 30, 50, 70], retain=[90, 90, 90, 90], test=[60, 40, 60, 40])
    (measures,) = UnlearningSeed().compare(own, twins).values()
    assert measures["FA"].value == 0  # another seed of unlearning changes nothing
    assert measures["TA"].value == 100  # nothing is left between the Originals
    assert measures["RA"].value is None and "nothing varies" in measures["RA"].note
    half = models(forget=[16, 24, 56, 64], retain=[90] * 4, test=[50] * 4)
    (measures,) = UnlearningSeed().compare(own, half).values()
    within = 36 / 2
    between = np.var([13, 27, 53, 67], ddof=1) - within / 2
    assert measures["FA"].value == pytest.approx(100 * within / (within + between))
    assert measures["FA"].low <= measures["FA"].value <= measures["FA"].high
    with pytest.raises(TooFew, match=f"fewer than {LEAST} seeds"):
        UnlearningSeed().compare({0: own[0]}, {0: twins[0]})


def test_a_metric_that_draws_has_a_part_of_evaluation():
    """Seeds lie 10 apart, twins 4, evaluations 2; the accuracy does not draw."""
    own = models(forget=[10, 20, 30, 40], retain=[90] * 4, test=[50] * 4)
    twins = models(forget=[14, 24, 34, 44], retain=[90] * 4, test=[50] * 4)
    audit = UnlearningSeed()
    audit.titles = {"attack": "MIA", "fa": "FA again"}
    draws = iter(np.tile([0, 2, 4], 8))
    audit.evaluate = lambda parts, seed: {
        "attack": parts["forget"].accuracy + float(next(draws)),
        "fa": parts["forget"].accuracy,
    }
    (measures,) = audit.compare(own, twins).values()
    drawn = 4.0  # variance of 0, 2, 4
    unlearned = 4**2 / 2 - drawn / 3
    seeds = np.var([10, 20, 30, 40], ddof=1) - unlearned / 2 - drawn / 6
    whole = drawn + unlearned + seeds
    assert measures["MIA"].value == pytest.approx(100 * unlearned / whole)
    assert measures["MIA, evaluation"].value == pytest.approx(100 * drawn / whole)
    assert "FA again" not in measures and measures["FA"].value == pytest.approx(
        100 * 8 / (8 + np.var([12, 22, 32, 42], ddof=1) - 4)
    )


def test_the_twin_of_another_seed_has_the_same_original(run):
    run.ok("--attacks", "unlearning_seed", "--yes")
    rows = results(run)["unlearning_seed"]["rows"]
    assert "fewer than 3 seeds" in rows["gd_sine"]["1"]["not_applicable"]
    suite, store = load_suite(str(run.path)), StageStore(run.store)
    planner = AuditPlanner(suite, store)
    twin = planner.twin(suite.row("gd_sine"), 1, moved=False).parents["model"]
    own = next(r for r in planner.base.results if r.label == "gd_sine").stage.parents["model"]
    assert twin.parents["start"].key == own.parents["start"].key and twin.key != own.key
    one, two = (
        load_file(store.folder("unlearn", s.key) / "adapter.safetensors") for s in (own, twin)
    )
    assert any(not torch.allclose(one[name], two[name]) for name in one)


def test_a_stream_starts_each_request_from_the_last_and_reuses_the_last_retrain(run):
    suite, store = load_suite(str(run.path)), StageStore(run.store)
    planner = AuditPlanner(suite, store)
    first, second = planner.stream(suite.row("gd_sine"), 1, 2)
    assert second.parents["model"].parents["start"].key == first.parents["model"].key
    assert first.parents["model"].parents["start"].kind == "original"
    own = {stage.key for stage in make_plan(suite, store).stages()}
    one, two = (stage.parents["model"] for stage in planner.stream(suite.row("retrain"), 1, 2))
    assert two.key in own and one.key not in own
    assert one.parents["split"].key == first.parents["split"].key


def test_more_requests_than_classes_are_refused(run, one_line_error):
    done = run.audit("--attacks", "sequential", "--with", "sequential.requests=3", "--yes")
    assert "3 requests need as many forgotten classes" in one_line_error(done)


def test_a_record_is_audited_with_the_suites_own_stages(run):
    suite, store = load_suite(str(run.path)), StageStore(run.store)
    result = next(r for r in make_plan(suite, store).results if r.label == "gd_sine")
    path = store.folder("measure", result.stage.key) / "record.json"
    small = suite_of_record(RunRecord.load(path))
    keys = {r.label: r.stage.key for r in make_plan(small, store).results if not r.replicate}
    assert keys["gd_sine"] == result.stage.key
    done = run.audit("--attacks", "js", target=path)
    assert done.code == 0 and "gd_sine" in done.out and FLOOR in done.out


def test_a_suite_after_another_gets_no_shadows(run):
    suite, store = load_suite(str(run.path)), StageStore(run.store)
    planner = AuditPlanner(suite, store)
    planner.check_trainable()
    planner.suite = replace(suite, after=suite)
    with pytest.raises(ConfigError, match="leave out --shadows"):
        planner.check_trainable()


@pytest.mark.parametrize("args", [("attack",), ("run", "--set", "audits.nf4={}")])
def test_a_suite_without_a_retrain_is_refused_with_the_way_to_add_one(
    cli, tmp_path, one_line_error, args
):
    command, *further = args
    done = cli(command, "tdec-notes", "--store", tmp_path / "store", *further)
    assert "give --set methods.retrain={}" in one_line_error(done)
    assert not (tmp_path / "store" / "stages").exists()
    with_one = load_suite("tdec-notes", [*further[1:], "methods.retrain={}"])
    assert with_one.retrain == "retrain"


def test_without_a_second_retrain_the_floor_says_so(run):
    done = run.ok("--attacks", "js", "--set", "retrains=1")
    assert "no second Retrain" in done.out


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--attacks", "relern"), "did you mean 'relearn'"),
        (("--with", "relearn.max_steps=3"), "choose the attack"),
        (("--with", "js"), "--with js: write it as key.sub=value"),
        (("--with", "js.parts=[]"), "at least 1 item"),
        (("--with", "klom.clip=.nan"), "finite"),
        (("--store", "nowhere"), "run: unlearn run"),
        (("--attacks", "relearn", "--with", "relearn.max_step=3"), "did you mean 'max_steps'"),
        (("--shadows", 1), "two models"),
        (("--shadows", 4, "--design", "thirds"), "fixed or halves"),
        (("--shadows", 4, "--attacks", "js"), "klom, epsilon and ulira"),
        (("--shadows", 4, "--attacks", "klom", "--design", "halves"), "only ulira"),
        (("--shadows", 2, "--attacks", "ulira"), "needs 3 or more"),
        (("--shadows", 4, "--design", "halves", "--originals", 1), "leave it out"),
        (("--seeds", "77"), "run: unlearn run"),
    ],
)
def test_faults_are_one_line(run, one_line_error, args, text):
    assert text in one_line_error(run.audit(*args))


def test_what_is_no_record_is_not_to_be_deleted(run, one_line_error):
    run.audit("--attacks", "js")
    line = one_line_error(run.audit(target=run.report))
    assert "give a run's record.json" in line and "delete" not in line


def test_parts_that_are_not_there_are_named_with_those_that_are(run):
    done = run.audit("--attacks", "js", "--with", "js.parts=[forgot]")
    assert "nothing is called forgot; parts: forget, retain" in done.out


# After attack


def shown(label, after, utility=0.0, before=0.0, reference=False):
    return Shown(
        label, before, "prune", Summary(after, 0.0, after, after, 2), utility, reference, 2
    )


def test_rows_of_equal_utility_come_first_by_what_the_worst_attack_shows():
    rows = [
        shown("damaged", 1.0, utility=-9.0),
        shown("hides", 60.0),
        shown("forgets", 3.04, utility=-1.9),
        shown("also", 2.96),
        shown(FLOOR, 4.0, reference=True),
    ]
    assert [row.label for row in ordered(rows)] == [FLOOR, "also", "forgets", "hides", "damaged"]
    assert places(rows) == {"also": 1, "forgets": 1, "hides": 3}
    table, drawn = after_sections("tiny", rows)
    words = {row[0]: row[-1] for row in table.content.rows}
    assert words == {
        **dict.fromkeys(words, ""),
        "also": "≤ floor",
        "forgets": "≤ floor",
        "damaged": "≤ floor",
    }
    assert drawn.content.svg.count("<polygon") == 5 and drawn.content.file == "after_attack.svg"
    assert all(f">{tick}</text>" in drawn.content.svg for tick in range(0, 61, 10)), "round"


def test_a_row_with_fewer_attacks_than_the_others_is_named():
    """The largest of fewer is smaller, so its place is no better one."""
    rows = [shown("gd", 9.0), dataclasses.replace(shown("wild", 1.0), attacks=1)]
    (text,) = after_sections("tiny", rows)[0].text
    assert text.endswith("An attack without a value on some seed is left out: wild (1 of 2).")
    (text,) = after_sections("tiny", rows[:1])[0].text
    assert "is left out" not in text


@pytest.mark.parametrize(
    ("limit", "cut"), [("U", {"gd"}), ("Retrain", {"gd", "other"}), (None, set())]
)
def test_a_relearning_that_was_cut_off_is_marked_beside_what_it_shows(limit, cut):
    notes = {"gd": "1 of 1 cut off at 9" if limit == "U" else ""}
    notes["retrain"] = "1 of 1 cut off at 9" if limit == "Retrain" else ""
    notes["other"] = ""
    rows = {row: {1: {"steps": Measure(9.0, note=note)}} for row, note in notes.items()}
    table = SimpleNamespace(rows=rows)
    assert {row for row in ("gd", "other") if _cut_off(table, row, "retrain")} == cut
    given = [dataclasses.replace(shown(row, 9.0), cut=row in cut) for row in ("gd", "other")]
    section = after_sections("tiny", given)[0]
    marked = {row[0] for row in section.content.rows if "prune*" in row}
    assert marked == cut and ("ended at its limit" in section.text[0]) == bool(cut)


def test_the_worst_attack_is_the_largest_difference_from_retrain(run):
    names = ("requantise", "nf4", "leak", "snapshots", "remove_adapter")
    done = run.audit("--attacks", ",".join(names))
    report = json.loads(run.report.read_text())
    by_label = {row["label"]: row for row in report["after_attack"]}
    assert set(by_label) == {FLOOR, "original", "gd_sine"} and "Who forgets, who hides" in done.out
    tables = report["audits"]

    def excess(name, column):
        ours, theirs = (tables[name]["rows"][row]["1"][column] for row in ("gd_sine", "retrain"))
        return ours["value"] - theirs["value"]

    columns = {"nf4": "NF4 forget", "leak": "forget", "snapshots": "AUC"}
    found = {name: excess(name, column) for name, column in columns.items()}
    found["requantise"] = max(excess("requantise", f"int{bits} forget") for bits in (8, 4))
    found["none"] = by_label["gd_sine"]["before"]
    assert by_label["gd_sine"]["after"]["mean"] == pytest.approx(max(found.values()))
    assert found[by_label["gd_sine"]["attack"]] == max(found.values())
    with (run.store / "suites/tiny/runs.csv").open() as lines:
        own = {(line["row"], line["replicate"]): line for line in csv.DictReader(lines)}
    ours, theirs = own["gd_sine", "0"], own["retrain", "0"]
    lost = {part: float(ours[part]) - float(theirs[part]) for part in ("ra", "ta")}
    assert by_label["gd_sine"]["utility"] == pytest.approx(min(lost.values()))
    assert lost["ra"] != lost["ta"], "else the lower is not told from the other"


def test_a_budget_is_the_setting_of_the_attacks_that_have_it():
    chosen = choose("relearn_few,leak,prune", False, ["leak.k=3"], Budget(samples=5, steps=7))
    few, leak = chosen["relearn_few"].config, chosen["leak"].config
    assert (few.shots, few.max_steps, leak.k) == (5, 7, 3)


# Tables


@pytest.mark.parametrize(
    ("measures", "value", "ends", "words"),
    [
        ([Measure(1.0, 0.5, 2.0, "95 % bootstrap", 9, "note")], 1.0, (0.5, 2.0), "bootstrap note"),
        # t(0.975, 1) = 12.706, sd / sqrt(2) = 1; an end stays inside the bounds
        ([Measure(v, bounds=(0.0, 100.0)) for v in (1.0, 3.0)], 2.0, (0, 14.706), "2 seeds"),
        ([Measure(None), Measure(4.0, 3.0, 5.0)], 4.0, (3, 5), "undefined for 1 of 2"),
    ],
)
def test_a_row_is_summed_up_over_its_seeds(measures, value, ends, words):
    cells = {seed: {"x": measure} for seed, measure in enumerate(measures)}
    found = AuditTable("js", JensenShannon(), {"row": cells}).summary("row", "x")
    assert (found.value, found.low, found.high) == pytest.approx((value, *ends), abs=1e-3)
    assert words in f"{found.interval} {found.note}"


def test_numbers_are_short():
    assert [significant(v) for v in (None, 0.0, 12.3456, 1234.5)] == ["–", "0", "12.3", "1234"]
    assert measure_cell(None) == "" and measure_cell(Measure(1.0, note="n")) == "1*"
    assert measure_cell(Measure(1.0, 0.5, 2.0)) == "1 [0.5, 2]"


def test_a_wide_table_comes_in_pieces_that_keep_the_rows():
    heads, rows = ["row", *"abcd"], [["r", "1", "22", "333", "4" * 9], ["s", "5", "6", "7", "8"]]
    whole = table(heads, rows, notes={"7": "seven", "9": "nowhere"})
    parts = list(pieces(whole, 14))
    assert [part.heads for part in parts] == [["row", "a", "b"], ["row", "c"], ["row", "d"]]
    assert parts[1].rows == (("r", "333"), ("s", "7"))
    assert [part.notes for part in parts] == [{}, {"7": "seven"}, {}], "notes on marks it shows"
    assert [part.rows for part in pieces(whole, 99)] == [whole.rows]


def test_a_report_needs_no_model_audit_to_have_run(run):
    suite, store = load_suite(str(run.path)), StageStore(run.store)
    audit = AUDITS["relearn"](AUDITS["relearn"].Config(max_steps=77))
    audits = {"relearn": audit}
    plan = AuditPlanner(suite, store).report_plan(audits)
    (table,) = AuditReport(suite, store, audits, plan).tables()
    assert {cell for row in table.rows.values() for cell in row.values()} == {"not run"}
