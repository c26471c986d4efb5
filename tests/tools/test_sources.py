"""Suites against the settings of their sources."""

from __future__ import annotations

import csv

import pytest

from tools.sources import lookup, report


def table(path, *, value="5", reason=""):
    """A table with one line: the epochs of a row."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["suites", "rows", "key", "value", "source", "reason"])
        writer.writerow(["tofu-phi-1.5-forget10", "gd", "epochs", value, "a file:1", reason])
    return path


def test_every_difference_from_the_sources_has_a_reason():
    printed, wrong = report()
    assert not wrong, "\n".join(line for line in printed if line.startswith("error"))
    assert any("gradient_checkpointing" in line for line in printed)


@pytest.mark.parametrize(
    ("value", "reason", "wrong"),
    [("5", "", 0), ("6", "", 1), ("6", "told", 0), ("5", "needless", 1)],
)
def test_a_difference_without_a_reason_is_found(tmp_path, value, reason, wrong):
    printed, found = report(table(tmp_path / "own.csv", value=value, reason=reason))
    assert found == wrong
    assert ("ours 5" in printed[0]) is (value == "6")


def test_a_line_of_no_row_is_an_error(tmp_path):
    path = table(tmp_path / "own.csv")
    path.write_text(path.read_text().replace(",gd,", ",nobody,"))
    with pytest.raises(ValueError, match="nobody"):
        report(path)


def test_a_missing_part_of_a_path_is_none():
    assert lookup({"adapter": None}, "adapter.rank") is None
