"""What is kept of a report that comes with the project, for a table and for a sweep."""

from __future__ import annotations

import json

import pytest

from tools import ship


@pytest.fixture
def results(tmp_path, monkeypatch):
    """An empty folder of results, in the place of the project's."""
    folder = tmp_path / "results"
    (folder / "maps").mkdir(parents=True)
    monkeypatch.setattr(ship, "RESULTS", folder)
    return folder


@pytest.fixture
def source(tmp_path):
    """The report of a suite ``s`` in a store, as far as both kinds have the same files."""
    folder = tmp_path / "store" / "suites" / "s"
    folder.mkdir(parents=True)
    (folder / "leaderboard.svg").write_text("<svg/>")
    return folder


def test_a_table_keeps_what_the_site_and_compare_read(results, source):
    (source / "LEADERBOARD.md").write_text("# s\n")
    runs = f"row,ua,fa,gap.fa,js_forget,digest\ngd,0.0,99.123456,1.0,0.123456,{'ab' * 32}\n"
    (source / "runs.csv").write_text(runs)
    row = {"row": "gd", "ag_per_seed": {"1": 0.12345678901}, "derived": {}, "cost": None, "gaps": 1}
    board = {"rows": [row], "settings": {"gd": {"lr": 0.12345678, "eps": None}}, "audits": []}
    (source / "leaderboard.json").write_text(json.dumps(board))
    assert ship.ship(source.parents[1], "s") == results / "s"
    assert (results / "s/runs.csv").read_text() == (
        "row,fa,js_forget,digest\ngd,99.123,0.1235,abababababab\n"
    )
    kept = json.loads((results / "s/leaderboard.json").read_text())
    assert kept["settings"] == {"gd": {"lr": 0.123457}} and "audits" not in kept
    assert kept["rows"][0] == {
        "row": "gd", "ag_per_seed": {"1": 0.123456789}, "derived": {}, "cost": {},
    }  # fmt: skip
    assert {path.name for path in (results / "s").iterdir()} == {
        "LEADERBOARD.md", "leaderboard.json", "leaderboard.svg", "runs.csv",
    }  # fmt: skip


def test_a_sweep_keeps_its_report_and_pictures_among_the_maps(results, source):
    (source / "cells.jsonl").write_text("")
    report = "# s (v1, 0a, measured)\n\nTitle\n\n![sweep](leaderboard.svg)\n"
    (source / "LEADERBOARD.md").write_text(report)
    assert ship.ship(source.parents[1], "s") == results / "maps/s"
    written = (results / "maps/s/MAP.md").read_text()
    assert written == "# s: stability map (measured)\n\nTitle\n\n![sweep](map.svg)\n"
    assert {path.name for path in (results / "maps/s").iterdir()} == {"MAP.md", "map.svg"}
    (source / "depth.svg").write_text("<svg/>")
    ship.ship(source.parents[1], "s")
    assert (results / "maps/s/depth.svg").exists() and not (results / "s").exists()
