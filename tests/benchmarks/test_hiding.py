"""Who forgets and who hides, over tables: what is counted, ordered, drawn, and left out."""

from __future__ import annotations

import csv
import io
import json

import pytest

from stable_forgetting.benchmarks.report import markdown
from stable_forgetting.benchmarks.report.shipped import RESULTS
from stable_forgetting.benchmarks.sharing.hiding import (
    attacked,
    correlation,
    picture,
    sections,
    tally,
    to_csv,
)
from stable_forgetting.benchmarks.sharing.versus import read_boards
from stable_forgetting.benchmarks.suite.suite import FLOOR
from tests.suites import table_row


def line(label, after, *, low=None, before=0.0, equal=True, reference=False):
    return {
        "label": label,
        "before": before,
        "attack": "relearn",
        "after": {"mean": after, "low": low, "high": None, "std": None, "n": 3},
        "utility": 0.0 if equal else -9.0,
        "equal_utility": equal,
        "reference": reference,
    }


def board(*lines, distances=None):
    rows = [table_row(label, [value, value]) for label, value in (distances or {}).items()]
    return {"after_attack": list(lines), "rows": rows}


FLOOR_LINE = line(FLOOR, 5.0, reference=True)
BOARDS = {
    "one": board(
        FLOOR_LINE,
        line("original", 100.0, reference=True),
        line("deep", 4.0, low=1.0),
        line("shallow", 60.0, low=40.0, before=1.0),
        line("broken", 30.0, low=20.0, equal=False),
        line("unsure", 9.0, low=2.0, before=8.0),
        distances={"deep": 3.0, "unsure": 2.0, "shallow": 1.0, "broken": 0.1},
    ),
    "two": board(FLOOR_LINE, line("shallow", 15.0, low=12.0), line("deep", 5.0, low=4.0)),
    "three": board(FLOOR_LINE, line("shallow", 25.0, low=6.0)),
    "without a second Retrain": board(line("deep", 1.0)),
    "not attacked": {"rows": []},
    "one attack": board({**FLOOR_LINE, "attacks": 1}, {**line("deep", 1.0), "attacks": 1}),
}


@pytest.fixture
def found():
    return attacked(BOARDS)


def test_a_row_stands_beside_the_second_retrain_of_its_table(found):
    assert {own.suite for own in found} == {"one", "two", "three"}
    several = board({**FLOOR_LINE, "attacks": 2}, {**line("deep", 1.0), "attacks": 2})
    assert [own.suite for own in attacked({"several": several})] == ["several"]
    assert {own.row for own in found} == {"deep", "shallow", "broken", "unsure"}
    beyond = {(own.suite, own.row): own.beyond for own in found}
    assert beyond["one", "deep"] == -1.0 and beyond["two", "shallow"] == 10.0
    assert beyond["one", "broken"] == 25.0


def test_only_intervals_above_the_floor_are_said_to_hide(found):
    """One interval of equal utility reaches below the floor, one row has less utility."""
    said = tally(found)
    assert said.startswith("6 rows of 3 tables lose at most 2 points")
    assert "of all 6, 3 and 2." in said
    alike = [own for own in found if own.equal and own.before <= 2]
    assert f"{len(alike)} of them look forgotten" in said and 0 < len(alike) < 6


def test_the_correlation_is_of_places_and_leaves_out_what_lost_utility(found):
    own = [each for each in found if each.suite == "one"]
    assert correlation(own) == pytest.approx(-1.0)
    assert correlation([each for each in found if each.suite == "two"]) is None


def test_rows_of_most_tables_come_first_and_lost_utility_is_in_brackets(found):
    page = markdown.write(sections(found))
    rows = [text for text in page.splitlines() if text.startswith("| ")]
    names = [text.split(" | ")[0].strip("| ") for text in rows]
    assert names[:5] == ["method", "shallow", "deep", "unsure", "broken"]
    assert "| (25) relearn |" in page and "| one | 4 | 5.0 | 1 | deep -1.0 | -1.00 |" in page


def test_the_picture_has_the_rows_of_three_tables_or_more(found):
    drawn = picture(found).svg
    assert ">shallow<" in drawn and ">deep<" not in drawn
    assert "1.0 points above Retrain before, 60.0 after relearn; a second Retrain 5.0" in drawn


def test_the_csv_has_every_row(found):
    lines = [*csv.DictReader(io.StringIO(to_csv(found)))]
    assert len(lines) == len(found)
    assert {(own["row"], own["beyond"]) for own in lines} >= {("unsure", "4.0"), ("deep", "-1.0")}


def test_the_shipped_page_and_picture_are_those_of_the_shipped_tables():
    found = attacked(read_boards([RESULTS])[0])
    assert (RESULTS / "versus/hiding.svg").read_text("utf-8") == picture(found).svg
    assert (RESULTS / "versus/HIDING.md").read_text("utf-8") == markdown.write(sections(found))


def test_the_command_reads_a_store_and_refuses_what_it_does_not_read(cli, tmp_path, one_line_error):
    folder = tmp_path / "suites/one"
    folder.mkdir(parents=True)
    made = {"suite": "one", "version": 1, "floor": None, "distance": {}, "complete": True}
    (folder / "leaderboard.json").write_text(json.dumps({**made, **BOARDS["one"]}))
    done = cli("compare", "--after-attack", "--store", tmp_path, "--filter", "one")
    assert done.code == 0 and "shallow" in done.out
    (folder / "leaderboard.json").write_text(
        json.dumps({**made, **BOARDS["one"]}).replace("low", "lo")
    )
    done = cli("compare", "--after-attack", "--store", tmp_path, "--filter", "one")
    assert "one: leaderboard.json cannot be read ('low')" in one_line_error(done)
    given = cli("compare", "--after-attack", "gd,gd_lora")
    assert "takes no results and no rows" in one_line_error(given)
    none = cli("compare", "--after-attack", "--filter", "no-such-table", "--store", tmp_path)
    assert "run a suite with audits:" in one_line_error(none)
