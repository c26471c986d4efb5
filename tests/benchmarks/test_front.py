"""The site's front page and its pictures, from tables made by hand."""

from __future__ import annotations

import re

import pytest

from stable_forgetting.benchmarks.leaderboard.page import as_page
from stable_forgetting.benchmarks.report import html
from stable_forgetting.benchmarks.report.section import Column, Picture, Section, table
from stable_forgetting.benchmarks.report.shipped import RESULTS, read_report
from stable_forgetting.benchmarks.sharing import front, versus
from stable_forgetting.benchmarks.sharing.pareto import Sides, picture, places
from stable_forgetting.benchmarks.sharing.pareto import front as front_of
from stable_forgetting.benchmarks.suite.suite import FLOOR
from tests.suites import table_row

SIDES = Sides(({"fa": 1.0}, {"ta": 3.0, "wf": 1.0}), ("FA", "TA"), "points")


def page(name, rows, *, kind="Images: classes", date="2026-01-01", size=2e5, origin="shipped"):
    """A table: row -> its distances by seed."""
    shared = {"diverged": {}, "verdict": None, "rank": None, "cost": {"base_parameters": size}}
    made = [
        table_row(
            label,
            values,
            method=label,
            derived={"ag": {"mean": sum(values) / len(values), "low": None, "high": None}},
            **shared,
        )
        for label, values in rows.items()
    ]
    data = {"suite": name, "version": 1, "complete": True, "rows": made, "date": date}
    data |= {"distance": {"title": "AG4", "unit": "points"}, "floor": {"mean": 0.5}}
    return front.Page(f"{name}.html", f"title of {name}", origin, [], data, kind)


def index(*pages):
    boards = {own.file: own.data for own in pages}
    return front.lists(pages, versus.meetings([("gd_sine", "gd_lora_omega")], boards))["index.html"]


NEAR, FAR = [1.0, 1.1, 0.9, 1.05, 1.0], [3.0, 3.2, 3.0, 3.1, 3.2]


def test_the_answer_is_that_of_the_tables_shown():
    clear = page("clear", {"gd_sine": NEAR, "gd_lora_omega": FAR})
    same = page("same", {"gd_sine": FAR, "gd_lora_omega": FAR})
    name = "The paper&#x27;s sine against the same adapter without it: "
    assert f"{name}nearer to the goal in 1 of 1 tables, farther in 0." in index(clear)
    both = f"{name}nearer to the goal in 1 of 2 tables, farther in 0, equal to two decimals in 1."
    assert both in index(clear, same)
    turned = page("turned", {"gd_sine": FAR, "gd_lora_omega": NEAR})
    assert f"{name}nearer to the goal in 0 of 1 tables, farther in 1." in index(turned)
    one = page("one", {"gd_sine": NEAR[:1], "gd_lora_omega": FAR[:1]})
    assert f"{name}nearer to the goal in 0 of 1 tables, farther in 0, one seed" in index(one)


def test_tables_are_chosen_by_what_is_forgotten_and_by_size():
    rows = {"gd_sine": NEAR, "gd_lora_omega": FAR}
    told = index(
        page("big", rows, size=3.4e6),
        page("small", rows),
        page("text", rows, kind="Texts: TOFU", size=64_000, date="2026-02-02"),
    )
    assert '<a href="#images-classes">Images: classes</a> 2 tables, 0.2 M to 3.4 M' in told
    assert '<a href="#texts-tofu">Texts: TOFU</a> 1 table, 64 k parameters' in told
    assert re.findall(r'<h2 id="([^"]+)"', told)[2:] == ["images-classes", "texts-tofu"]
    newest = re.findall(r'<li><a href="(\w+).html">\w+</a> (2\S+):', told)
    assert newest[0] == ("text", "2026-02-02") and {name for name, _ in newest[1:]} == {
        "big",
        "small",
    }
    assert told.index('href="small.html"', told.index('id="images')) < told.index(
        'href="big.html"', told.index('id="images')
    )


def test_a_row_that_diverged_is_not_the_nearest_and_counts_the_seeds_that_are_left():
    own = page("one", {"gd_sine": NEAR, "gd_lora_omega": FAR})
    own.data["rows"][0] |= {"diverged": {"9": "step 3"}, "seeds": [0, 1, 2, 3, 4, 9]}
    files = front.lists([own], [])
    assert '<td class="left">gd_lora_omega</td><td>3.10</td>' in files["index.html"]
    lines = [line.split(",") for line in files["rows.csv"].splitlines()]
    assert [(line[1], line[-1]) for line in lines] == [
        ("row", "n"),
        ("gd_sine", "5"),
        ("gd_lora_omega", "5"),
    ]


def run(row, forget, keep, *, replicate=0, status="ok", method="gd"):
    values = {"fa": forget, "ta": keep, "wf": 0, "seed": 1}
    return {"row": row, "method": method, "replicate": replicate, "status": status, **values}


def test_the_sides_are_mean_absolute_gaps():
    runs = [
        run("gd", 12.0, 84.0),
        run("gd", "6.0", "80"),
        run("bad", "", 81.0),
        run("bad", 11.0, 81.0, status="diverged"),
        run("retrain", 10, 80, method="retrain"),
        run("retrain", 10.5, 78.0, method="retrain", replicate=1),
        run("original", 90, 0, method="original"),
    ]
    assert places(runs, SIDES) == {"gd": (3.0, 1.5), FLOOR: (0.5, 1.5)}, "signs do not cancel"


def test_the_front_has_the_rows_that_no_other_beats():
    found = {
        "a": (0.0, 5.0),
        "b": (1.0, 2.0),
        "twin": (1.0, 2.0),
        "beaten": (2.0, 2.0),
        "c": (9.0, 0.0),
        FLOOR: (0.0, 0.0),
    }
    assert front_of(found) == ["a", "b", "twin", "c"]
    drawn = picture("suite", found, SIDES, "suite.html").svg
    assert drawn.count('href="suite.html#row-') == 5 and "3  twin" in drawn
    assert "a second Retrain: 0.00 and 0.00 points" in drawn and "beaten" not in re.findall(
        r"\d  (\w+)<", drawn
    )


def test_a_page_begins_with_the_ranking():
    ranking = table(["method", "n", "FA →", "AG4 ↓", Column("", "mark"), "rank", "ToW ↑"],
                    [["gd", "5", "1", "0.2", "?", "1 [1, 2]", "0.9"]])  # fmt: skip
    report = [
        Section("suite", ("title",), depth=1),
        Section(text=("Data: digits, torch 2",)),
        Section(content=Picture("<svg/>", "first")),
        Section(text=("Seeds 1.",), content=ranking),
        Section("Verdicts", ("said",)),
    ]
    shown = as_page(report, "AG4")
    assert [type(own.content).__name__ for own in shown] == [
        "NoneType", "NoneType", "Table", "Picture", "NoneType", "NoneType"
    ]  # fmt: skip
    assert shown[-1] == Section("Data and versions", ("Data: digits, torch 2",))
    assert shown[2].content.heads == ["method", "AG4 ↓", "", "rank", "n", "FA →", "ToW ↑"]
    assert shown[2].content.rows == (("gd", "0.2", "?", "1 [1, 2]", "5", "1", "0.9"),)
    assert as_page(report, "other")[2].content == ranking


def test_parts_are_folded_and_all_is_there():
    parts = [
        Section("head", ("first",), depth=1),
        Section(content=table(["row", "x"], [["a", "1"]])),
        Section("Costs, all", ("second",)),
        Section("deeper", ("third",), depth=3),
        Section("Settings", ("fourth",)),
    ]
    folded, flat = html.write(parts, folded=True), html.write(parts)
    words = re.compile(r">([^<>]+)<")
    assert words.findall(folded.partition("<body>")[2]) == words.findall(
        flat.partition("<body>")[2]
    )
    before, costs, settings = folded.split('<details class="part"')
    assert "first" in before and "<table" in before and "second" not in before
    assert costs.startswith(' id="costs"') and "third" in costs and "fourth" in settings
    assert "<details class=" not in flat


@pytest.mark.parametrize("name", ["digits-class", "tofu-small", "digits-class-attack"])
def test_heads_of_a_shipped_table_say_what_they_are(name):
    text = (RESULTS / name / "LEADERBOARD.md").read_text("utf-8")
    tables = [section.content for section in read_report(text) if section.content]
    assert {column.head for column in tables[0].columns if column.doc} >= {"n", "rank"}
    told = [own.explanation for own in tables if own.explanation]
    assert len(told) > 3 and all(f"\n\n{one}\n" in text.replace("\\|", "|") for one in told)
