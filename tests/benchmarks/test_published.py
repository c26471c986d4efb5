from __future__ import annotations

import pytest

from stable_forgetting.benchmarks.leaderboard.data import to_json
from stable_forgetting.benchmarks.leaderboard.derive import make_leaderboard
from stable_forgetting.benchmarks.leaderboard.write import FORMATS
from stable_forgetting.benchmarks.paper.report import published_sections
from stable_forgetting.benchmarks.suite.goals import read_tables, recomputed_gap
from stable_forgetting.common.base.errors import ConfigError

# mean of the four absolute gaps to the table's own Retrain, worked out by hand from the columns
RECOMPUTED = {
    "tab:vit_cifar100/left": {
        "FT": 0.79,
        "GA": 3.01,
        "SalUn": 0.50,
        "NOVO": 0.51,
        "LetheViT": 0.30,
        "Fast-NTK": 1.30,
        "GD+LoRA": 1.47,
        "GD+Tanh": 0.34,
        "GD+Sine": 0.21,
    },
    "tab:vit_cifar100/right": {
        "FT": 3.96,
        "GA": 9.94,
        "SalUn": 1.81,
        "CoUn": 0.50,
        "GD+LoRA": 10.89,
        "GD+Tanh": 0.59,
        "GD+Sine": 0.46,
    },
}


@pytest.mark.parametrize("label", RECOMPUTED)
def test_recomputed_average_gaps(label):
    rows = {row.method: row for row in read_tables()[label]}
    reference = rows.pop("Retrain")
    assert rows.keys() == RECOMPUTED[label].keys()
    for method, wanted in RECOMPUTED[label].items():
        found = recomputed_gap(rows[method], reference)
        assert found == pytest.approx(wanted, abs=0.005 + 1e-9), method
        assert abs(found - rows[method].values["AG"][0]) > 0.03, "none is as it is printed"
    assert recomputed_gap(reference, reference) == 0


def test_tables_flag_what_does_not_follow_from_themselves():
    section, findings = published_sections(["tab:vit_cifar100/left"])
    assert "9 published numbers do not follow" in findings.title
    assert len(findings.content.rows) == 9
    title, heads, rows = section.title, section.content.heads, section.content.rows
    assert "not comparable" in title
    assert heads[0] == "published" and heads[-2:] == ["AG recomputed", ""]
    assert all(len(row) == len(heads) for row in rows)
    flags = {row[0]: (row[-2], row[-1]) for row in rows}
    assert flags["Retrain"] == ("0.00", "")
    assert flags["GD+Sine"] == ("0.21", "differs from print")
    assert flags["GD+Tanh"][1] == "differs from print"


def test_no_gap_without_a_retrain():
    (section,) = published_sections(["tab:vit_cifar100_stability"])
    heads, rows = section.content.heads, section.content.rows
    assert "AG recomputed" not in heads and "status" not in heads
    cells = {row[0]: row[1:] for row in rows}
    assert cells["Original Model"] == ("89.2", "88.4")
    assert cells["GD+Sine"] == ("87.8±0.3", "2.1±0.2")


def test_forget_quality_says_what_it_was_compared_with():
    section, *_ = published_sections(["tab:tofu_phi_rank4/forget01"])
    assert "fq_reference: loku" in section.text[0]
    assert not published_sections(["tab:vit_cifar100_stability"])[0].text


def test_unknown_table_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'tab:vit_cifar100/left'"):
        published_sections(["tab:vit_cifar100/lft"])


def test_published_numbers_stand_beside_measured_ones(hand_made, tmp_path, cli):
    table = {
        "original": {1: (100, 100, 90, 10)},
        "retrain": {1: (80, 99, 88, 30)},
        "gd": {1: (82, 97, 89, 27)},
    }
    label = "tab:vit_cifar100/right"
    suite, store = hand_made(tmp_path, table, published=[label])
    board = make_leaderboard(suite, store)
    foreign = {row.method for row in read_tables()[label]} - {"Retrain"}
    beside = f"{label} (published; not comparable"

    def is_measured_alone(text: str) -> bool:
        return "37.48" not in text and not [
            name for name in foreign if f"{name} " in text or f">{name}<" in text
        ]

    for form in ("csv", "svg"):
        assert is_measured_alone(FORMATS[form][1](board)), form
    for form in ("md", "html"):
        measured, _, published = FORMATS[form][1](board).partition(beside)
        assert is_measured_alone(measured) and "37.48" in published, form
        assert "do not follow" in published and "AG is the mean absolute gap" in published
    data = to_json(board)
    (published,) = data.pop("published")
    assert data["kind"] == "measured" and is_measured_alone(str(data))
    assert (published["table"], published["kind"]) == (label, "published")
    assert {row["row"] for row in published["rows"]} > foreign
    assert {finding["table"] for finding in published["findings"]} == {label}
    shown = cli.ok("report", tmp_path / "tiny.yaml", "--store", tmp_path / "store")
    measured, _, published = shown.out.partition(beside)
    assert "GD+Sine" in published and "GD+Sine" not in measured


def test_published_tables_need_no_run(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = cli("show", "lethevit-cifar10", "--published").out
    assert "98.71" in shown and "9 published numbers do not follow" in shown
