"""The figure of width against depth, on cells and audits made by hand."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from stable_forgetting.benchmarks.audits.derive import AuditTable
from stable_forgetting.benchmarks.pipeline.cells import Edge
from stable_forgetting.benchmarks.report import markdown
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
    assert "## Width against depth" in text and "![width against depth along c](depth.svg)" in text


def test_the_picture_is_read_at_a_readmes_width(board):
    root = ET.fromstring(depth_picture(board).svg)
    assert float(root.get("width")) <= NARROW
    for node in root.iter("{http://www.w3.org/2000/svg}text"):
        assert 0 <= float(node.get("x")) <= float(root.get("width"))
    tips = [node.text for node in root.iter("{http://www.w3.org/2000/svg}title")]
    of_c1 = [tip for tip in tips if tip.startswith("tanh, ascent at 4:")]
    assert of_c1 == [f"tanh, ascent at 4: {value}" for value in (46, 9, 60)]
    below = [tip for tip in tips if tip.startswith("tanh, ascent at 2:")]
    assert below == ["tanh, ascent at 2: 32"], "no accepted cell was audited: no depth"
    assert "c: 0.1, 0.25, 0.3, 0.5, 1, 3, 10, absolute, none" in depth_picture(board).svg
    names = re.findall(r">((?:tanh|sine|ball), [^<:]+)<", depth_picture(board).svg)
    assert set(names) == set(lines_of(board.suite))


def test_a_sweep_of_one_size_has_no_such_figure(board):
    single = replace(board, suite=load_suite("digits-class-sweep"))
    assert depth_picture(single) is None and "depth.svg" not in markdown.write(sections(single))
    assert depth_picture(replace(board, lines=[])) is None
