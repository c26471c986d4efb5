"""One row against another over tables: readings, correction, pictures, faults."""

from __future__ import annotations

import csv
import io
import json

import pytest

from stable_forgetting.benchmarks.report import markdown
from stable_forgetting.benchmarks.report.shipped import RESULTS
from stable_forgetting.benchmarks.sharing.versus import (
    CLAIMS,
    meetings,
    read_boards,
    sections,
    to_csv,
)
from stable_forgetting.benchmarks.sharing.versus_picture import picture
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.measure.gaps import paired_difference
from stable_forgetting.common.measure.verdict import holm
from tests.suites import table_row

PAIR = ("ours", "theirs")


@pytest.fixture
def put(tmp_path):
    """Writes a table: rows as distances by seed."""

    def write(name: str, rows: dict[str, list[float]], *, diverged: tuple[str, ...] = ()):
        folder = tmp_path / "suites" / name
        folder.mkdir(parents=True)
        made = [
            table_row(label, values, diverged=[0] if label in diverged else [])
            for label, values in rows.items()
        ]
        board = {"suite": name, "version": 1, "complete": True, "rows": made}
        board |= {"distance": {"title": "AG", "unit": "points"}, "floor": {"mean": 0.5}}
        (folder / "leaderboard.json").write_text(json.dumps(board))
        return tmp_path / "suites"

    return write


def encounters(pairs, stores, words=""):
    boards, withdrawn = read_boards(stores, words)
    return meetings(pairs, boards), withdrawn


def readings(store, pair=PAIR, words=""):
    met, _ = encounters([pair], [store], words)
    return {own.suite: own.reading for own in met}


def test_each_reading(put):
    put("near", {"ours": [1.0, 1.1, 0.9, 1.05], "theirs": [3.0, 3.2, 3.0, 3.1]})
    put("far", {"ours": [9.0, 9.1, 9.3, 9.2], "theirs": [3.0, 3.2, 3.1, 3.4]})
    put("noisy", {"ours": [1.0, 9.0, 2.0, 7.0], "theirs": [5.0, 3.0, 6.0, 4.0]})
    put("equal", {"ours": [1.0, 2.0], "theirs": [1.001, 2.001]})
    put("mean-alone", {"ours": [1.0, 2.0, 3.0], "theirs": [1.4, 1.6, 3.0]})
    put("lonely", {"ours": [1.0], "theirs": [2.0]})
    put("only-ours", {"ours": [1.0]})
    store = put("gone", {"ours": [1.0, 1.0], "theirs": [2.0, 2.5]}, diverged=("theirs",))
    assert readings(store) == {
        "equal": "same",
        "far": "farther",
        "gone": "diverged",
        "lonely": "one seed",
        "mean-alone": "not apart",
        "near": "nearer",
        "noisy": "not apart",
    }
    assert readings(store, PAIR[::-1])["near"] == "farther"
    assert set(readings(store, words="n r")) == {"near"}


def test_the_correction_counts_the_tables(put):
    """A difference that holds alone need not hold beside nineteen others."""
    clear = {"ours": [1.0, 1.2, 1.1], "theirs": [2.0, 2.5, 2.1]}
    store = put("a-clear", clear)
    (alone,) = encounters([PAIR], [store])[0]
    assert alone.reading == "nearer" and alone.q == alone.difference.p_value
    for number in range(19):
        values = [float(number), number + 1.0, number + 2.0]
        put(f"b-{number}", {"ours": values, "theirs": [values[1], values[0], values[2] + 0.5]})
    met, _ = encounters([PAIR], [store])
    p = [paired_difference(*_distances(store, own.suite)).p_value for own in met]
    assert [own.q for own in met] == pytest.approx(list(holm(p)))
    assert met[0].suite == "a-clear" and met[0].reading == "not apart"


def _distances(store, suite):
    rows = json.loads((store / suite / "leaderboard.json").read_text())["rows"]
    return [list(row["ag_per_seed"].values()) for row in rows]


def test_tables_with_the_same_runs_count_once(put):
    rows = {"ours": [1.0, 1.2], "theirs": [2.0, 2.5]}
    put("digits-all", {label: [x * (1 + 1e-8) for x in own] for label, own in rows.items()})
    put("di", {label: values[:1] for label, values in rows.items()})
    store = put("digits", rows)
    (own,) = encounters([PAIR], [store])[0]
    assert own.suite == "digits" and own.also == ("digits-all", "di")
    said = sections([own], [])[-1].lines
    assert "digits-all, di: the same runs as digits, or some of them" in said


def test_a_later_folder_replaces_an_earlier_one(put, tmp_path):
    first = put("t", {"ours": [1.0, 1.2], "theirs": [2.0, 2.5]})
    first.rename(tmp_path / "shipped")
    second = put("t", {"ours": [5.0, 5.2], "theirs": [2.0, 2.5]})
    (own,) = encounters([PAIR], [tmp_path / "shipped", second])[0]
    assert own.means == pytest.approx((5.1, 2.25))


def test_every_format_says_the_same(put, cli, section_pages, tmp_path):
    put("near", {"ours": [1.0, 1.1, 0.9, 1.05], "theirs": [3.0, 3.2, 3.0, 3.1]})
    store = put("far", {"ours": [4.0, 4.5], "theirs": [0.0, 0.0]})
    met, withdrawn = encounters([PAIR], [store])
    section_pages(sections(met, withdrawn))
    lines = list(csv.DictReader(io.StringIO(to_csv(met))))
    assert [line["suite"] for line in lines] == ["far", "near"]
    assert float(lines[1]["mean"]) == pytest.approx(-2.0625)
    assert float(lines[1]["percent"]) == pytest.approx(-100 * 2.0625 / (1.0125 + 3.075))
    assert float(lines[0]["percent"]) == pytest.approx(100)
    args = ("compare", "ours,theirs", "--store", tmp_path)
    said = cli(*args).out
    assert "2 tables: ours is nearer in 1, theirs in 1." in said
    drawn = cli(*args, "--format", "svg").out
    assert drawn.count("<circle") == 2 and drawn == picture(met).svg
    assert "<svg" in cli(*args, "--format", "html").out


def test_shipped_tables_meet_and_withdrawn_ones_are_left_out(cli, tmp_path):
    said = cli("compare", "gd_sine,gd_lora_omega", "--store", tmp_path, "--filter", "small").out
    assert "cifar10-small-all" in said and "tofu-small" in said
    met, withdrawn = encounters([("gd_sine", "gd_lora_omega")], [RESULTS])
    assert not {own.suite for own in met} & set(withdrawn)


def test_what_is_shipped_is_of_the_shipped_tables():
    """To mend: unlearn compare --format svg|md > benchmarks/results/versus/..., and the README."""
    met, withdrawn = encounters(CLAIMS, [RESULTS])
    assert (RESULTS / "versus/bound.svg").read_text("utf-8") == picture(met).svg
    report = markdown.write(sections(met, withdrawn))
    assert (RESULTS / "versus/VERSUS.md").read_text("utf-8") == report


def test_a_damaged_table_is_one_line(put, cli, one_line_error, tmp_path):
    store = put("odd", {"ours": [1.0], "theirs": [2.0]})
    board = json.loads((store / "odd" / "leaderboard.json").read_text())
    del board["rows"][0]["seeds"]
    (store / "odd" / "leaderboard.json").write_text(json.dumps(board))
    assert "odd" in one_line_error(cli("compare", "ours,theirs", "--store", tmp_path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"floor": {"mean": "0.5"}}, "floor.mean: write a number (got '0.5')"),
        ({"distance": {"title": "AG", "unit": 3}}, "distance.unit: write text (got 3)"),
        ({"rows": {}}, "rows: write a list"),
        (
            {"after_attack": [{"label": "a", "before": "1", "attack": "x", "after": {"mean": 1}}]},
            "after_attack.0.before: write a number (got '1')",
        ),
    ],
)
def test_a_table_of_other_types_is_one_line(put, cli, one_line_error, tmp_path, change, words):
    file = put("odd", {"ours": [1.0], "theirs": [2.0]}) / "odd" / "leaderboard.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    for which in ("ours,theirs", "--after-attack"):
        said = one_line_error(cli("compare", which, "--store", tmp_path))
        assert f"{file}: no leaderboard that can be read" in said and words in said


def test_no_table_at_all_is_told():
    with pytest.raises(ConfigError, match="none of 0 tables"):
        encounters([PAIR], [])
