"""Sweeps: what is derived from cells, what is planned, and one tiny sweep end to end."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import shutil
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch import nn

from stable_forgetting.benchmarks.leaderboard.derive import make_leaderboard
from stable_forgetting.benchmarks.leaderboard.report import sections as board_sections
from stable_forgetting.benchmarks.leaderboard.run import Leaderboard
from stable_forgetting.benchmarks.pipeline.block import Readout, cell_row, run_block
from stable_forgetting.benchmarks.pipeline.cells import Cell, Edge, judge
from stable_forgetting.benchmarks.pipeline.grid import next_rate, runs_together
from stable_forgetting.benchmarks.pipeline.measuring import read_record
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.pipeline.sweeping import GridReader, GridSpec
from stable_forgetting.benchmarks.report import html, markdown
from stable_forgetting.benchmarks.suite.grid import acceptance
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.benchmarks.suite.suite import FLOOR, REFERENCES, sweeps
from stable_forgetting.benchmarks.sweeps.board import Sweep, further_metrics, related, to_json
from stable_forgetting.benchmarks.sweeps.derive import (
    band,
    compare_lines,
    derive_ceiling,
    derive_line,
    letters,
    sign_test,
)
from stable_forgetting.benchmarks.sweeps.draw import _power, picture
from stable_forgetting.benchmarks.sweeps.report import place_table, sections, share_table
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.bounded.attach import attach, detach
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.methods.base import resolve_config
from stable_forgetting.common.store.stages import StageStore
from stable_forgetting.vision.benchmark import VisionBenchmark
from stable_forgetting.vision.metrics import SWEEP_AXES

TARGET = {"fa": 0.0, "ra": 100.0, "ta": 98.0, "forget_loss": 6.0}
RULE = acceptance(SWEEP_AXES, {}, "test")
EDGES = {"low": Edge(1e-3, True), "high": Edge(1e-1, False)}


def cell(lr=1e-2, lam=1.0, fa=0.0, ra=100.0, ta=98.0, seed=1, step=100, **over):
    fields = {"delta_ratio": 0.1, "bound_share": None, "nonfinite": False}
    fields |= {"extension": False, **over}
    metrics = {"fa": fa, "ra": ra, "ta": ta, "forget_loss": 6.0}
    return Cell("m", seed=seed, lr=lr, lam=lam, step=step, metrics=metrics, **fields)


def dead(**over):
    return replaced(cell(**over), dict.fromkeys(TARGET), delta_ratio=None, nonfinite=True)


def replaced(old, metrics, **over):
    return dataclasses.replace(old, metrics={**old.metrics, **metrics}, **over)


@pytest.mark.parametrize(
    ("values", "mark"),
    [
        ({}, ""),
        ({"fa": 5.0, "ra": 99.0, "ta": 96.0}, ""),
        ({"fa": 5.1}, "U"),
        ({"ra": 98.9}, "D"),
        ({"ta": 95.9}, "D"),
        ({"fa": 80.0, "ta": 10.0}, "UD"),
    ],
)
def test_the_rule_at_its_edges(values, mark):
    assert judge(cell(**values), TARGET, RULE) == mark


@pytest.mark.parametrize(("fa", "mark"), [(85.0, ""), (75.0, ""), (85.1, "U"), (74.9, "D")])
def test_the_two_sided_rule(fa, mark):
    rule = acceptance(SWEEP_AXES, {"two_sided": True}, "test")
    assert judge(cell(fa=fa), {**TARGET, "fa": 80.0}, rule) == mark


def test_strict_and_loose_halve_and_double():
    nearly = cell(fa=4.0, ra=99.4, ta=97.0)
    assert [bool(judge(nearly, TARGET, RULE.scaled(f))) for f in (0.5, 1, 2)] == [1, 0, 0]
    assert judge(cell(ra=98.0), TARGET, RULE)
    assert not judge(cell(ra=98.0), TARGET, RULE.scaled(2))


def grid():
    """One seed, two lambdas, rates 1e-3, 1e-2, 1e-1: lambda 1 passes at the last two, 10 at one."""
    return [
        cell(1e-3, 1.0, fa=60.0),
        cell(1e-2, 1.0, ta=97.5),
        cell(1e-1, 1.0),
        cell(1e-3, 10.0, fa=4.0, ta=97.0),
        cell(1e-2, 10.0, ra=40.0, ta=50.0),
        dead(lr=1e-1, lam=10.0),
    ]


def line(cells=None, label="m", edges=EDGES):
    cells = grid() if cells is None else cells
    return derive_line(label, cells, {c.seed: TARGET for c in cells}, RULE, edges)


def test_a_line_worked_by_hand():
    got = line()
    assert got.accepted == (50.0,) and got.diverged == 1
    assert got.strict == (pytest.approx(100 / 3),)  # 4 % FA is beyond half of 5
    assert got.band == (pytest.approx(0.5),)  # (1 decade + 0) / 2 lambdas
    assert got.widest == pytest.approx(2.0)
    assert got.worst_retained == (40.0,) and got.median_retained == (
        100.0,
    )  # the diverged cell has none
    assert (got.best.lr, got.best.lam, got.best.utility.mean) == (1e-1, 1.0, 98.0)
    assert got.by_lr == {1e-3: 50.0, 1e-2: 50.0, 1e-1: 50.0}
    assert got.by_lam[1.0] == pytest.approx(200 / 3)
    assert [(s.lr, s.lam, s.share, s.letters) for s in got.squares] == [
        (1e-3, 1.0, 0.0, "U"),
        (1e-3, 10.0, 100.0, ""),
        (1e-2, 1.0, 100.0, ""),
        (1e-2, 10.0, 0.0, "D"),
        (1e-1, 1.0, 100.0, ""),
        (1e-1, 10.0, 0.0, "D"),
    ]
    assert [s.retained_drop for s in got.squares] == [0.0, 0.0, 0.0, 60.0, 0.0, None]


def test_extensions_widen_the_band_and_nothing_else():
    wide = line([*grid(), cell(1.0, 1.0, extension=True), cell(1.0, 10.0, extension=True, ra=0.0)])
    plain = line()
    assert wide.band == (pytest.approx(1.0),) and wide.widest == pytest.approx(3.0)
    assert (wide.accepted, wide.worst_retained) == (plain.accepted, plain.worst_retained)
    assert wide.best == plain.best


def test_a_gap_ends_a_band():
    marks = [(1e-4, ""), (1e-3, ""), (1e-2, "D"), (1e-1, ""), (1.0, ""), (10.0, "")]
    assert band([(cell(lr), mark) for lr, mark in marks]) == pytest.approx(2.0)
    assert band([(cell(1e-2), ""), (cell(1e-1), "U")]) == 0.0


def test_letters_are_the_commonest_failure():
    group = [(cell(), mark) for mark in ("U", "U", "D", "UD")]
    assert letters(group) == "UD"
    assert letters(group[:3]) == "U"
    assert letters([*group[:2], (cell(), ""), (cell(), "")]) == ""


def test_the_ceiling_uses_the_same_rule():
    second = {1: {**TARGET, "ta": 96.5}, 2: {**TARGET, "ta": 95.0}}
    got = derive_ceiling({1: TARGET, 2: TARGET, 3: TARGET}, second, RULE)
    assert got.seeds == (1, 2)
    assert (got.accepted, got.strict, got.loose) == ((True, False), (False, False), (True, True))


def test_comparisons_pair_seeds():
    cells = [dataclasses.replace(c, seed=s) for s in (1, 2, 3) for c in grid()]
    worse = [replaced(c, {"fa": 50.0}) if not c.nonfinite else c for c in cells]
    got = compare_lines(line(cells), line(worse, "n"))
    assert got.differences == (50.0, 50.0, 50.0) and got.p_value == 0.25
    assert got.summary.mean == 50.0
    assert [sign_test(*n) for n in ((5, 0), (0, 0), (2, 2), (4, 1))] == [0.0625, 1.0, 1.0, 0.375]


def test_tables_and_picture_of_hand_made_cells():
    board = hand_made_board()
    rows = {row[0]: list(row) for row in share_table(board).rows}
    assert rows["retrain*"][1:4] == ["1 of 2", "0 of 2", "2 of 2"]
    assert rows["a"][1] == "50.0±0.0" and rows["a"][4:6] == ["0.50±0.00", "2.0"]
    assert rows["a"][6:] == ["40.0", "100.0±0.0", "2", "–"]
    where = {row[0]: list(row[1:]) for row in place_table(board).rows}
    assert where["a"][:2] == ["fails at 0.001", "not found by 0.1"]
    assert where["a"][2:] == ["lr 0.1, λ 1, step 100", "2/2", "98.0±0.0"]
    assert where["b"][2:] == ["none", "–", "–"]
    assert "b - a: -50.0±0.0 points of accepted cells (-50, -50; sign" in markdown.write(
        sections(board)
    )
    assert "2 of them cannot give a p below 0.5" in markdown.write(sections(board))
    packed = to_json(board)
    json.dumps(packed, allow_nan=False)
    assert packed["grid"]["rule"] == {"fa": 5, "ra": 1, "ta": 2, "two_sided": False}
    assert packed["lines"][0]["worst_ra"] == (40.0, 40.0)
    assert packed["lines"][0]["best"]["ta"]["mean"] == 98.0
    assert packed["lines"][0]["squares"][3]["ra_drop"] == 60.0
    words = [node.text for node in ET.fromstring(picture(board).svg).iter() if node.text]
    assert {"U", "D", "∅", "60", "a: 50 %", "b: 0 %"} <= set(words)
    assert words.count("1e-2") == 2  # one axis per method


def test_rates_of_an_axis_are_not_rounded_into_each_other():
    """An axis that is not 1, 3, 10 is extended by half decades, and a user may give any rate."""
    rates = (1e-5, 0.0015, 0.002, next_rate(0.02, up=True), 1.0, 1000.0)
    shown = [_power(rate) for rate in rates]
    assert shown == ["1e-5", "1.5e-3", "2e-3", "6.32e-2", "1e0", "1e3"]


def test_a_sweep_says_how_much_of_the_ceiling_its_cells_reached():
    """Of Original's largest cross-entropy of 12 nats; a diverged cell has no share."""
    suite = load_suite("digits-class-sweep")
    loud = replaced(cell(1e-1, 10.0), {"forget_loss": 9.0})
    cells = related(suite, [cell(), loud, dead()], {"ceiling.loss": 12.0})
    assert [c.metrics["ceiling.reached"] for c in cells] == [50.0, 75.0, None]
    assert related(suite, None, {"ceiling.loss": 12.0}) is None
    names = [metric.name for metric in further_metrics(suite)]
    got = derive_line("m", cells, {1: TARGET}, RULE, EDGES, names)
    assert got.highest == {"ceiling.reached": 75.0}
    board = dataclasses.replace(hand_made_board(), lines=[got])
    (head,) = [c for c in share_table(board).columns if c.head == "of ceiling"]
    assert "highest" in head.doc and share_table(board).rows[-1][-1] == "75.0"


def test_the_page_says_all_that_the_markdown_says(section_pages):
    board = hand_made_board()
    section_pages(sections(board))
    assert "![sweep](leaderboard.svg)" in markdown.write(sections(board))
    assert "<svg " in html.write(sections(board))


def hand_made_board():
    cells = [dataclasses.replace(c, seed=s) for s in (1, 2) for c in grid()]
    worse = [c if c.nonfinite else replaced(c, {"fa": 50.0}) for c in cells]
    lines = [line(cells, "a"), line(worse, "b")]
    second = {1: {**TARGET, "ta": 96.5}, 2: {**TARGET, "ta": 95.0}}
    targets = {1: TARGET, 2: TARGET}
    ceiling = derive_ceiling(targets, second, RULE)
    comparisons = [compare_lines(lines[1], lines[0])]
    suite = load_suite("digits-class-sweep")
    return Sweep(suite, lines, ceiling, comparisons, cells, targets, 0)


def test_the_axis_goes_in_half_decades():
    ups, lr = [], 1e-1
    for _ in range(3):
        lr = next_rate(lr, True)
        ups.append(lr)
    assert ups == [0.3, 1.0, 3.0]
    assert [next_rate(3e-5, False), next_rate(1e-5, False)] == [1e-5, 3e-6]
    assert next_rate(2e-3, True) == pytest.approx(2e-3 * math.sqrt(10), rel=1e-2)


@pytest.mark.parametrize(
    ("name", "params", "together"),
    [
        ("gd_ball", {}, True),
        ("gd_sine", {}, True),
        ("gd", {}, False),
        ("gd_relu", {}, False),
        ("gd_penalty", {}, False),
        ("finetune", {}, False),
        ("gd_lora", {"max_grad_norm": 1.0}, False),
        ("gd_lora", {"optimizer": "sgd"}, False),
        ("gd_lora", {"mixed_precision": "bf16"}, False),
        ("gd_lora", {"warmup_epochs": 0.5}, False),
        ("gd_lora", {"lr_of": {"*A": 1e-3}}, False),
        ("gd_sine", {"adapter": {"mode": "polynomial"}}, False),
        ("gd_sine", {"adapter": {"mode": "auto"}}, False),
    ],
)
def test_which_methods_share_a_forward(name, params, together):
    config = resolve_config(name, None, params, origin="test")
    assert runs_together(METHODS[name], config) is together


def test_adapters_on_1x1_convolutions_are_swept_one_config_at_a_time(tiny):
    """Copies of an adapter share a forward on plain linear layers alone."""
    head = nn.Linear(8, tiny.classes)
    net = nn.Sequential(nn.Unflatten(1, (6, 1, 1)), nn.Conv2d(6, 8, 1), nn.Flatten(), head)
    source, points, steps = tiny.Source(), ((1e-3, 0.1), (1e-2, 1.0)), (1, 2)
    params = {"batch_size": 8, "steps": 2, "adapter": {"targets": ["1"]}}
    spec = GridSpec(
        benchmark="vision",
        protocol={},
        method="gd_sine",
        seed=1,
        points=points,
        params=tuple({**params, "lr": lr, "lam": lam} for lr, lam in points),
        steps=steps,
        together=True,
    )
    moved = []

    def row(model, point, step, bound):
        now = detach(copy.deepcopy(model))[1].weight.detach()
        moved.append(float((now - net[1].weight.detach()).abs().max()))
        return cell_row(point, step)

    def task(access):
        return tiny.task(source, tiny.split(source), access=access, model=copy.deepcopy(net))

    rows = run_block(spec, SimpleNamespace(original=net, row=row), task)
    cells = [(row["lr"], row["lam"], row["step"]) for row in rows]
    assert cells == [(*point, step) for point in points for step in steps]
    assert min(moved) > 0


@pytest.mark.parametrize("kind", ["nb_lora", "lora"])
def test_the_way_of_an_adapter_that_is_not_ours_is_that_of_its_merged_weights(kind):
    if kind == "lora":
        pytest.importorskip("peft")
    original = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3))
    model, readout = copy.deepcopy(original), Readout.__new__(Readout)
    readout.original = original
    attach(model, ["0"], AdapterConfig(peft=kind, rank=2), torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(0.1)
    moved = readout.movement(model)
    now, before = detach(model)[0].weight.detach(), original[0].weight.detach()
    assert 0 < moved == pytest.approx(float((now - before).norm() / before.norm()))


@pytest.mark.parametrize("name", sweeps())
def test_built_in_sweeps_load_and_match_first_steps(name):
    suite = load_suite(name)
    rates = {}
    grids = [row.grid for row in suite.rows if row.method not in REFERENCES]
    for row, (lr, lam) in ((grid, point) for grid in grids for point in grid.points):
        config = row.config(lr, lam)
        assert (config.lr, config.steps) == (lr, max(suite.spec.grid.steps))
        assert row.axis is None or getattr(config, row.axis) == lam
        if getattr(config, "adapter", None) is None:
            continue
        power = 2 if config.optimizer == "sgd" else 1
        rates.setdefault(lr, set()).add(round(config.engine().lr * config.adapter.slope**power, 12))
    assert all(len(found) == 1 for found in rates.values())
    assert {*suite.spec.seeds}.isdisjoint({0, 1, 2, 3, 5}) and suite.spec.retrains == 2


# A tiny sweep -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_sweep(tiny_suite, tmp_path_factory):
    """Writes a tiny suite with a grid; keywords replace parts of the grid, ``top`` of the suite."""
    folder = tmp_path_factory.mktemp("sweep")

    def write(top=None, **over):
        grid = {
            "lrs": [1e-3, 1e-1],
            "lambdas": [0.1, 1.0],
            "steps": [2, 4],
            "block": 3,
            "extend": {"low": 1, "high": 0},
            "rule": {"ra": 100, "ta": 100, "fa": 100},
            **over,
        }
        data = {
            "suite": "tiny-sweep",
            "retrains": 2,
            "methods": {
                "gd_ball": None,
                "gd_lora": None,
                "ft": {"method": "finetune", "params": {"evaluate_epochs": 1}},  # not heeded
                "salun": None,
                "npo": {"method": "npo_gdr_lora", "params": {"beta": 1}},
            },
            "defaults": {"batch_size": 8},
            "compare": [["gd_ball", "gd_lora"]],
            **(top or {}),
        }
        if "rows" not in grid and "methods" not in (top or {}):
            grid["rows"] = {
                "ft": {"axis": None, "lrs": [1e-3, 3e-3]},
                "salun": {"axis": "density", "lrs": [1e-3, 3e-3], "lambdas": [0.5]},
                "npo": {"axis": "forget_weight", "lambdas": [1]},
            }
        data["methods"] = {"original": None, "retrain": None, **data["methods"]}
        return tiny_suite(folder, **data, grid=grid)

    return write


LORA = {"gd_lora": None}


@pytest.mark.parametrize(
    ("top", "over", "words"),
    [
        ({}, {"lrs": [1e-1, 1e-3]}, "grid: lrs must increase"),
        ({}, {"steps": [0]}, "grid.steps.0"),
        ({"methods": {"gd_balll": None}}, {}, "did you mean 'gd_ball'?"),
        ({"methods": {"random_label": None}}, {}, "has no 'lam'; write grid: {rows: {random_label"),
        ({"methods": {"ssd": None}}, {}, "has no 'lr'"),
        ({"methods": {"ascent": None}}, {}, "axis: method 'ascent' does not read forget_weight"),
        ({"compare": [["gd_ball", "x"]]}, {}, "compare names 'x'"),
        ({"defaults": {"batchsize": 8}}, {}, "did you mean 'batch_size'?"),
        ({}, {"rule": {"rra": 1}}, "did you mean 'ra'?"),
        ({}, {"rows": {"gd_bal": {"axis": None}}}, "did you mean 'gd_ball'?"),
        ({}, {"rows": {"gd_ball": {"lrs": []}}}, "gd_ball.lrs: Tuple should have at least 1"),
        ({"seeds": [1, 1]}, {}, "a seed twice"),
        ({"methods": LORA, "tune": {"seeds": [0], "trials": 1}}, {}, "has no tune; write tune: n"),
        ({}, {"lr": [1]}, "did you mean 'lrs'?"),
        *(
            (
                {"methods": {"gd_lora": {"params": {name: 0.5}}}},
                {},
                "is an axis of the grid; leave it",
            )
            for name in ("lr", "steps", "lam")
        ),
    ],
)
def test_what_is_wrong_with_a_grid_is_one_line(tiny_sweep, cli, one_line_error, top, over, words):
    top = {"compare": [], "defaults": {}, **top}
    assert words in one_line_error(cli("plan", tiny_sweep(top, **over)))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("defaults.steps=3", "defaults.steps is an axis of the grid; write grid.steps"),
        ("defaults_of.adapter.lr=0.1", "adapter.lr is an axis of the grid; write grid.lrs"),
        ("defaults.lam=3", "defaults.lam is an axis of the grid; write grid.lambdas"),
        ("budget.amount=3", "budget.amount is an axis of the grid; write grid.steps"),
        ("defaults={stop_below: {ra: retrain}, evaluate_every: 1}", "gd_ball: stop_below ends a"),
        ("defaults={stop_below: {ra: 90}, evaluate_every: 1}", "gd_ball: stop_below ends a run"),
    ],
)
def test_a_default_that_a_grid_would_not_heed_is_refused(tiny_sweep, override, words):
    path = str(tiny_sweep())
    with pytest.raises(ConfigError, match=words):
        load_suite(path, [override])
    assert load_suite(path, ["defaults={schedule: cosine, steps: null}"])


def test_lambda_may_be_given_beside_a_row_with_an_axis_of_its_own(tiny_sweep):
    rows = {"gd_ball": {"axis": "adapter.c", "lambdas": [0.5]}}
    top = {"methods": {"gd_ball": None}, "compare": [], "defaults": {"lam": 0.5}}
    path = str(tiny_sweep(top, rows=rows))
    assert load_suite(path, ["defaults.lam=0.3"])
    with pytest.raises(ConfigError, match=r"write grid\.lrs"):
        load_suite(path, ["defaults.lr=0.3"])


def test_a_sweep_is_judged_beside_retrain(tiny_suite, cli, one_line_error):
    path = tiny_suite(suite="alone", methods={"gd_lora": None}, grid={"lambdas": [1]})
    assert "0 rows of method retrain; every gap is to it" in one_line_error(cli("plan", path))


def test_listing_and_planning(tiny_sweep, cli):
    assert "digits-class-sweep" in cli("show", "sweeps").out
    done = cli("plan", tiny_sweep())
    assert done.code == 0 and "gd_ball" in done.out and "at once" in done.out


def test_a_shipped_sweep_is_read(cli, tmp_path):
    shown = cli("report", "digits-class-bound", "--store", tmp_path)
    assert shown.code == 0 and "ul_tanh_c0.3" in shown.out and "comes with the project" in shown.err


def test_rows_of_another_suite_run_on_a_grid(tmp_path):
    path = tmp_path / "mine.yaml"
    grid = {"lrs": [1e-3, 1e-2], "lambdas": [1.0], "steps": [5]}
    data = {"extends": "digits-class", "suite": "mine", "rows": ["gd_sine"], "grid": grid}
    path.write_text(yaml.safe_dump(data))
    (row,) = [row for row in load_suite(str(path)).rows if row.method not in REFERENCES]
    assert row.grid.points == [(1e-3, 1.0), (1e-2, 1.0)] and row.config.steps == 5
    assert row.config.epochs is None, "the grid's steps hold, not the suite's budget"


def test_a_tiny_sweep_end_to_end(tiny_sweep, cli, tmp_path, nothing_half):
    path, store = tiny_sweep(), tmp_path / "store"
    cli.ok("run", path, "--store", store)
    nothing_half(store)
    folder = store / "suites" / "tiny-sweep"
    rows = [json.loads(text) for text in (folder / "cells.jsonl").read_text().splitlines()]
    shared = [row for row in rows if not row["extension"]]
    assert len(shared) == 8 + 8 + 3 * 4  # 2 x 2 x 2 cells, or two rates and one other value
    # a rule that accepts everything: one column below is tried, then the edge is said to be open
    assert sorted({r["lr"] for r in rows if r["label"] == "gd_ball"}) == [3e-4, 1e-3, 1e-1]
    assert "not found by 0.0003" in (folder / "LEADERBOARD.md").read_text()
    whole = json.loads((folder / "leaderboard.json").read_text())
    board = whole["sweep"]
    assert (
        whole["complete"]
        and board["complete"]
        and {item["accepted"][0] for item in board["lines"]} == {100.0}
    )
    assert board["ceiling"]["accepted"] == [True]
    ET.fromstring((folder / "leaderboard.svg").read_text())
    for row in rows:
        ball = row["label"] == "gd_ball"
        assert row["delta_ratio"] > 0 and (row["bound_share"] is not None) == ball
        assert row["delta_ratio"] <= 0.25 * (1 + 1e-4) or not ball

    # what is in the store is not run again; a lost block alone is
    stages = sorted((store / "stages").glob("map-*"))
    before = {path: path.stat().st_mtime_ns for path in stages}
    lost = stages[0]
    for file in lost.iterdir():
        file.unlink()
    lost.rmdir()
    report = cli.ok("report", path, "--store", store)
    assert "Incomplete; missing blocks of the grid: 1." in report.out
    cli.ok("run", path, "--store", store)
    after = {path: path.stat().st_mtime_ns for path in sorted((store / "stages").glob("map-*"))}
    assert {p for p in after if after[p] != before[p]} == {lost}
    assert rows == [json.loads(t) for t in (folder / "cells.jsonl").read_text().splitlines()]

    # one by one, through the methods themselves, gives the same cells
    assert_alone_agrees(load_suite(str(path), only=["gd_ball"]), store, tmp_path)
    board = make_leaderboard(load_suite(str(path)), StageStore(store))
    assert share_table(board.sweep).rows[0][0] == "retrain*"
    assert "Notes" not in markdown.write(board_sections(board)), "it has none"
    shown = Leaderboard.of(board, {}, folder).plot().svg
    assert shown == (folder / "leaderboard.svg").read_text(), "its cells, as in the report"


def test_the_audits_are_of_the_best_cell_trained_anew(tiny_sweep, cli, tmp_path, monkeypatch):
    top = {
        "methods": {"gd_ball": None, "gd_lora": None},
        "audits": {"relearn": {"max_steps": 3, "repeats": 1}},
    }
    over = {"extend": {"low": 0, "high": 0}}
    path, store = tiny_sweep(top, **over), tmp_path / "store"
    assert (
        "Then the attacks on every row's best cell and of Retrain: relearn."
        in cli("plan", path).out
    )
    done = cli.ok("run", path, "--store", store)
    board = json.loads((store / "suites" / "tiny-sweep" / "leaderboard.json").read_text())
    rows = board["audits"]["relearn"]["rows"]
    assert set(rows) == {"retrain", FLOOR, "original", "gd_ball", "gd_lora"}
    page = (store / "suites" / "tiny-sweep" / "LEADERBOARD.md").read_text()
    assert "AIN" in rows["gd_ball"]["1"] and "## Best cells" in page

    kept = StageStore(store)
    plan = make_plan(load_suite(str(path)), kept)
    for line in board["sweep"]["lines"]:
        best, label = line["best"], line["label"]
        stage = next(r.stage for r in plan.results if r.label == label)
        record, cells = read_record(kept, stage), (store / "suites" / "tiny-sweep" / "cells.jsonl")
        cell = next(
            row
            for row in map(json.loads, cells.read_text().splitlines())
            if row["label"] == label
            and (row["lr"], row["lam"], row["step"]) == (best["lr"], best["lam"], best["step"])
        )
        assert record.params["steps"] == best["step"]
        for name in ("fa", "ra", "ta", "forget_loss"):
            assert record.metrics[name] == pytest.approx(cell[name], rel=1e-3, abs=1e-3)

    # nothing is done again; without an accepted cell there is nothing to probe
    before = sorted((store / "stages").iterdir())
    assert cli("report", path, "--store", store).out.count("AIN") == done.out.count("AIN")
    cli.ok("run", path, "--store", store)
    monkeypatch.setattr("stable_forgetting.benchmarks.pipeline.cells.TOLERANCE", -200.0)
    none = tiny_sweep({**top, "suite": "none"}, **over, rule={"ra": 0, "ta": 0, "fa": 0})
    refused = cli("report", none, "--store", store)
    assert "No accepted cell: gd_ball, gd_lora." in refused.out
    assert sorted((store / "stages").iterdir()) == before

    lost = next((store / "stages").glob("map-*"))
    shutil.rmtree(lost)
    assert "wait for the missing blocks" in cli("report", path, "--store", store).out


def assert_alone_agrees(suite, store, tmp_path, names=("fa", "ra", "ta", "forget_loss")):
    """Does one stored block again without sharing the forward."""
    from stable_forgetting.benchmarks.pipeline.runner import run_stage
    from stable_forgetting.common.protocol.benchmark import Runtime

    plan = make_plan(suite, StageStore(store))
    block = next(b for b in plan.blocks if not b.extension)
    together = GridReader(suite, StageStore(store), plan.results).cells(block)
    assert block.stage.spec.together
    other = tmp_path / "alone"
    shutil.copytree(store, other)
    shutil.rmtree(StageStore(other).folder("map", block.stage.key))
    stage = dataclasses.replace(
        block.stage, spec=block.stage.spec.model_copy(update={"together": False})
    )
    run_stage(stage, Runtime(store=other, device="cpu"))
    alone = GridReader(suite, StageStore(other), plan.results).cells(block)
    for first, second in zip(together, alone, strict=True):
        mine, theirs = first.line(), second.line()
        for name in (*names, "delta_ratio"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-3), name
        assert (first.lr, first.lam, first.step) == (second.lr, second.lam, second.step)


def test_an_unknown_grid_waits_for_its_cells(tiny_sweep, tmp_path):
    plan = make_plan(load_suite(str(tiny_sweep())), StageStore(tmp_path))
    assert set(plan.waiting) == {"gd_ball", "gd_lora", "ft", "salun", "npo"}
    assert len([b for b in plan.blocks if b.label == "gd_ball"]) == 2  # 3 + 1 points
    assert len({stage.key for stage in plan.stages()}) == len(list(plan.stages()))


def test_a_block_depends_on_its_configs_not_on_how_it_is_judged(tiny_sweep, tmp_path):
    def keys(top=None, **over):
        plan = make_plan(load_suite(str(tiny_sweep(top, **over))), StageStore(tmp_path))
        return {block.stage.key for block in plan.blocks if block.label == "gd_ball"}

    base = keys()
    assert keys({"compare": []}, rule={"ra": 1}, extend={"low": 0, "high": 3}) == base
    assert not keys(steps=[2, 5]) & base
    assert not keys({"defaults": {"batch_size": 16}}) & base
    longer = keys(lrs=[1e-3, 1e-1, 3e-1], block=2)
    assert keys(block=2) < longer  # new columns keep the blocks before them


def test_columns_are_added_until_one_fails(tiny_sweep, put_record, tmp_path):
    grid = {"lrs": [1e-2, 1e-1], "lambdas": [1.0], "rule": {"ra": 1, "ta": 2, "fa": 5}}
    top = {"methods": {"gd_lora": None}, "compare": []}
    suite = load_suite(str(tiny_sweep(top, **grid, steps=[2], extend={"low": 2, "high": 1})))
    store = StageStore(tmp_path)
    plan = make_plan(suite, store)
    record = next(r for r in plan.results if r.label == "retrain" and not r.replicate)
    put_record(store, record.stage, TARGET)
    done = set()
    assert plan.waiting == ["gd_lora"]
    while plan.waiting:
        for block in plan.blocks:
            if block.stage.key not in done:
                done.add(block.stage.key)
                fill(store, block, accepted=lambda lr: lr > 3e-3)
        plan = make_plan(suite, store)
    assert sorted(block.lrs[0] for block in plan.blocks) == [3e-3, 1e-2, 0.3]
    (got,) = make_leaderboard(suite, store).sweep.lines
    assert got.edges == {"low": Edge(3e-3, True), "high": Edge(0.3, False)}
    assert got.accepted == (100.0,) and got.band == (pytest.approx(math.log10(30)),)


def fill(store, block, accepted):
    """Completes a block by hand: a cell passes where ``accepted`` says so of its rate."""
    with store.writing("map", block.stage.key, {"status": "ok"}) as folder:
        rows = []
        for lr, lam in block.stage.spec.points:
            row = cell(lr, lam, ra=100.0 if accepted(lr) else 0.0, step=2).line()
            rows.append({k: v for k, v in row.items() if k not in ("label", "seed", "extension")})
        (folder / "cells.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_damaged_block_is_one_line(tiny_sweep, cli, tmp_path, one_line_error):
    path = tiny_sweep(extend={"low": 0, "high": 0})
    store = StageStore(tmp_path)
    block = make_plan(load_suite(str(path)), store).blocks[0]
    with store.writing("map", block.stage.key, {"status": "ok"}) as folder:
        (folder / "cells.jsonl").write_text("{\n")
    assert "damaged" in one_line_error(cli("report", path, "--store", tmp_path))


def text_sweep(folder, **over):
    """A grid over the rows of the tiny text suite."""
    grid = {
        "lrs": [1e-12, 1e-1],
        "lambdas": [1.0],
        "steps": [3],
        "extend": {"low": 0, "high": 0},
        "rule": {"forget_prob": 100, "retain_prob": 100, "mu_likelihood": 1},
    }
    path = folder / f"{over['suite']}.yaml"
    path.write_text(yaml.safe_dump({"extends": "tiny-text.yaml", "grid": grid, **over}))
    return path


def test_a_text_suite_has_a_sweep_of_its_own_metrics(tiny_text_suite, cli, tmp_path):
    tiny_text_suite(tmp_path)
    defaults = {"batch_size": 4, "average": "tokens"}
    path = text_sweep(tmp_path, suite="text-sweep", defaults=defaults)
    store = tmp_path / "store"
    cli.ok("run", path, "--store", store)
    folder = store / "suites" / "text-sweep"
    rows = [json.loads(text) for text in (folder / "cells.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all(0 < row["forget_prob"] < 100 for row in rows)
    board = json.loads((folder / "leaderboard.json").read_text())["sweep"]
    axes = {"forget_prob", "retain_prob", "mu_likelihood"}
    assert set(board["targets"]["1"]) == {*axes, "forget_loss"}
    assert all(row["forget_loss"] > 0 for row in rows)  # what the ceiling is a ceiling of
    assert board["lines"][0]["accepted"] == [100.0] and "worst_retain_prob" in board["lines"][0]
    assert "retain P >= Retrain - 100" in (folder / "LEADERBOARD.md").read_text()

    # a cell that did not move has Original's numbers, without the texts that were generated there
    names = ("forget_prob", "retain_prob", "mu_likelihood")
    metrics = original_metrics(path, store)
    assert [rows[0][n] for n in names] == pytest.approx([metrics[n] for n in names], rel=1e-4)
    assert rows[1]["forget_prob"] != pytest.approx(rows[0]["forget_prob"], rel=1e-2)
    assert_alone_agrees(
        load_suite(str(path)), store, tmp_path, names
    )  # losses averaged over tokens


def original_metrics(path, store):
    """Of the record of Original."""
    plan = make_plan(load_suite(str(path)), StageStore(store))
    stage = next(r.stage for r in plan.results if r.label == "original")
    return read_record(StageStore(store), stage).metrics


def test_a_block_of_text_depends_on_how_its_scores_are_measured(tiny_text_suite, tmp_path):
    tiny_text_suite(tmp_path)
    path = str(text_sweep(tmp_path, suite="measured"))

    def keys(*overrides):
        plan = make_plan(load_suite(path, overrides), StageStore(tmp_path))
        return {block.stage.key for block in plan.blocks}

    assert keys() and not keys() & keys("protocol.evaluation.truth=mass")


def test_weights_in_bfloat16_are_swept_one_config_at_a_time(tiny_text_suite, cli, tmp_path):
    tiny_text_suite(tmp_path)
    head = {"gd_lora": {"params": {"adapter": {"train_head": True}}}}
    low = {"model": {"dtype": "bfloat16"}}
    path, store = text_sweep(tmp_path, suite="m", methods=head, protocol=low), tmp_path / "store"
    cli.ok("run", path, "--store", store)
    lines = (store / "suites" / "m" / "cells.jsonl").read_text().splitlines()
    still, moved, *head = (json.loads(text) for text in lines)
    assert [row["nonfinite"] for row in head] == [False, False]  # the embedding is float32 there
    before = original_metrics(path, store)["forget_prob"]
    assert still["forget_prob"] == pytest.approx(before, rel=1e-2)
    assert moved["forget_prob"] != pytest.approx(before, rel=1e-2)
    assert 0 < still["delta_ratio"] < 1e-8 < moved["delta_ratio"]


def test_a_benchmark_without_axes_has_no_sweep(tiny_sweep, monkeypatch):
    monkeypatch.setattr(VisionBenchmark, "sweep_axes", None)
    with pytest.raises(ConfigError, match="declares no sweep_axes"):
        load_suite(str(tiny_sweep({"compare": []})))
