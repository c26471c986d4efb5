"""What is accepted against what is relearned, on cells and audits made by hand."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from stable_forgetting.benchmarks.audits.derive import AuditTable
from stable_forgetting.benchmarks.pipeline.cells import Edge
from stable_forgetting.benchmarks.report import markdown
from stable_forgetting.benchmarks.report.shipped import RESULTS
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.benchmarks.sweeps.board import Sweep
from stable_forgetting.benchmarks.sweeps.depth import (
    ABSOLUTE,
    FREE,
    depth_picture,
    depth_table,
    lines_of,
    panels,
)
from stable_forgetting.benchmarks.sweeps.derive import Ceiling, SweepLine
from stable_forgetting.benchmarks.sweeps.report import sections
from stable_forgetting.common.audits import make_audit
from stable_forgetting.common.audits.base import Measure

NARROW = 830
"""Pixels of a README's column."""


@pytest.fixture(scope="module")
def suite():
    return load_suite("digits-class-bound-sizes")


def width(label, *accepted):
    """A line of which only the accepted shares matter."""
    edges = {side: Edge(1.0, True) for side in ("low", "high")}
    none = (None,) * len(accepted)
    seeds = tuple(range(21, 21 + len(accepted)))
    shares = (tuple(map(float, accepted)),) * 3
    rest = (0, None, edges, {}, {}, {}, (), {})
    return SweepLine(label, seeds, *shares, (0.0,) * len(accepted), 4.0, none, none, *rest)


def relearnt(name, rows, **config):
    """An audit's table: label -> steps per seed, a trailing ``+`` where one was cut off."""
    table = AuditTable(name, make_audit(name, config, "test"))
    for label, steps in rows.items():
        for seed, value in enumerate(steps, 21):
            note = "1 of 3 cut off at 100" if isinstance(value, str) else ""
            number = float(str(value).rstrip("+"))
            table.rows.setdefault(label, {})[seed] = {"steps": Measure(number, note=note)}
    return table


@pytest.fixture
def board(suite):
    accepted = {
        "gd_lora_omega": (17, 19),
        "tanh_c0.3": (30, 34),
        "tanh_c1": (44, 48),
        "tanh_c10": (20, 20),
        "gd_tanh": (14, 16),
        "ul_tanh_c1": (75, 77),
        "gd_ul_omega": (20, 22),
    }
    audits = [
        relearnt("relearn", {"retrain": (40, 50), "tanh_c1": (8, 10), "gd_lora_omega": (12, 14)},
                 shots=16),
        relearnt("relearn_retain", {"retrain": ("100+", 100), "tanh_c1": (20, "100+")}),
    ]  # fmt: skip
    lines = [width(label, *shares) for label, shares in accepted.items()]
    targets = {seed: {"fa": 0.0, "ra": 100.0, "ta": 98.0} for seed in (21, 22)}
    return Sweep(suite, lines, Ceiling((), (), (), ()), [], [], targets, 0, audits)


def test_rows_that_differ_in_their_bound_alone_are_one_line(suite):
    lines = lines_of(suite)
    assert lines["tanh, ascent"] == [
        (0.1, "tanh_c0.1"),
        (0.3, "tanh_c0.3"),
        (1.0, "tanh_c1"),
        (3.0, "tanh_c3"),
        (10.0, "tanh_c10"),
        (ABSOLUTE, "gd_tanh"),
        (FREE, "gd_lora_omega"),
    ]
    assert lines["sine, ascent"] == [
        (1.0, "sine_c1"),
        (ABSOLUTE, "gd_sine"),
        (FREE, "gd_lora_omega"),
    ]
    assert lines["tanh, saturating loss"][-1] == (FREE, "gd_ul_omega"), "the control has its omega"
    assert lines["ball, saturating loss"] == [
        (0.1, "ball_c0.1"),
        (0.25, "gd_ball"),
        (0.5, "ball_c0.5"),
        (1.0, "ball_c1"),
        (FREE, "gd_ul"),
    ]
    assert lines["ball, ascent"] == [(0.25, "gd_lora_ball"), (FREE, "gd_lora")]
    assert not any("delora" in label for points in lines.values() for _, label in points)


def test_a_row_that_differs_elsewhere_is_on_no_line_of_others():
    """The head is trained, or all layers are adapted: one bounded row each, and its own control."""
    assert lines_of(load_suite("digits-class-blowup")) == {}, "c is 1 in every row"
    assert lines_of(load_suite("digits-class-sweep")) == {}
    over = ["methods.deep={method: gd_tanh, params: {adapter: {bound: relative, c: 1, "
            "placement: all}}}"]  # fmt: skip
    lines = lines_of(load_suite("digits-class-bound-sizes", over))
    assert not any("deep" in label for points in lines.values() for _, label in points)


def test_the_numbers_behind_the_figure(board):
    shown = panels(board)
    assert [panel.retrain for panel in shown] == [None, 45.0, 100.0]
    assert [panel.title.partition(": ")[2] for panel in shown[1:]] == [
        "16 forget samples",
        "all retain samples",
    ]
    rows = {(row[0], row[1]): list(row[2:]) for row in depth_table(board).rows}
    assert rows["tanh, ascent", "1"] == ["tanh_c1", "46.0", "9.0", "≥ 60.0"]
    assert rows["tanh, ascent", "0.3"] == ["tanh_c0.3", "32.0", "–", "–"]
    assert rows["tanh, ascent", "none"] == ["gd_lora_omega", "18.0", "13.0", "–"]
    text = markdown.write(sections(board))
    assert "## Accepted settings and steps to relearn" in text and "](depth.svg)" in text


def test_a_mark_is_a_row_that_has_both(board):
    root = ET.fromstring(depth_picture(board).svg)
    assert float(root.get("width")) <= NARROW
    texts = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    tips = [node.text for node in root.iter("{http://www.w3.org/2000/svg}title")]
    assert tips == [
        "gd_lora_omega: 18.0 % accepted, relearned in 13 steps",
        "tanh_c1: 46.0 % accepted, relearned in 9 steps",
    ]
    assert "Retrain 45" in texts
    assert "Left out: 5 of 7 rows, of which no accepted cell was attacked." in texts
    marks = list(root.iter("{http://www.w3.org/2000/svg}circle"))
    (ox, oy), (cx, cy) = [(float(mark.get("cx")), float(mark.get("cy"))) for mark in marks]
    assert ox < cx and oy < cy, "more to the right is accepted more, higher is relearned later"
    assert [mark.get("stroke") for mark in marks] == ["#c0392b", "#1f4e9c"], "control, bound"


def test_a_training_that_was_cut_off_is_hollow(board):
    few = {"retrain": (90, 90), "tanh_c1": ("100+", 100), "gd_tanh": (0, 0)}
    cut = replace(board, audits=[relearnt("relearn", few)])
    root = ET.fromstring(depth_picture(cut).svg)
    marks = {mark.get("fill") for mark in root.iter("{http://www.w3.org/2000/svg}circle")}
    assert marks == {"none", "#1f4e9c"}
    tips = [node.text for node in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "tanh_c1: 46.0 % accepted, relearned in ≥ 100 steps" in tips
    assert "gd_tanh: 15.0 % accepted, relearned in 0 steps" in tips, "0 has a place on the axis"


def test_rows_that_take_no_step_to_relearn_have_a_place(board):
    none = {"retrain": (0, 0), "tanh_c1": (0, 0), "gd_tanh": (0, 0)}
    shown = depth_picture(replace(board, audits=[relearnt("relearn", none)]))
    assert "tanh_c1: 46.0 % accepted, relearned in 0 steps" in shown.svg


def test_a_sweep_without_an_attack_on_two_rows_has_no_such_picture(board):
    for audits in (
        [],
        board.audits[1:],
        [relearnt("relearn", {"retrain": (40,), "tanh_c1": (8,)})],
    ):
        own = replace(board, audits=audits)
        assert depth_picture(own) is None and "depth.svg" not in markdown.write(sections(own))
    assert depth_picture(replace(board, lines=[])) is None


@pytest.mark.parametrize(
    "file", sorted(RESULTS.glob("maps/*/depth.svg")), ids=lambda f: f.parent.name
)
def test_a_shipped_picture_shows_what_its_table_says(file):
    """Every row with an accepted share and steps of the first attack is a mark, and no other is."""
    text = (file.parent / "MAP.md").read_text("utf-8")
    first, attack = text.partition("### relearn:")[::2]
    shares = dict(
        re.findall(
            r"^\| (\w[\w.]*) \| ([\d.]+)(?:±[\d.]+)? \|", first.partition("lower edge")[0], re.M
        )
    )
    steps = dict(re.findall(r"^\| (\w[\w.]*) \| ([\d.]+)", attack.partition("### ")[0], re.M))
    root = ET.parse(file).getroot()
    tips = [node.text for node in root.iter("{http://www.w3.org/2000/svg}title")]
    assert tips == [
        f"{row}: {shares[row]} % accepted, relearned in {steps[row]} steps"
        for row in shares
        if row in steps
    ]
    assert len(tips) >= 2 and f"Retrain {steps['retrain']}" in ET.tostring(root, "unicode").replace(
        "≥ ", ""
    )
