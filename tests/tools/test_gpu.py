"""Every question to a GPU, asked of the CPU at tiny size; no number of it means anything."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tools.gpu.__main__ import failed, listing, main
from tools.gpu.items import ITEMS, LIMIT

PLAN = Path(__file__).resolve().parents[2] / "docs" / "scale.md"


def ask(out: Path, *args: object) -> int:
    return main([*map(str, args), "--out", str(out), "--tiny", "--device", "cpu"])


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=() if each == "kernels" else pytest.mark.slow) for each in ITEMS],
)
def test_every_item_answers_on_a_cpu(name, tmp_path):
    assert ask(tmp_path, name) == 0
    record = json.loads((tmp_path / f"{name}.json").read_text())
    assert record["complete"] and record["rows"] and record["tiny"]
    assert record["card"] and record["environment"]["packages"]["torch"]
    text = (tmp_path / f"{name}.md").read_text()
    assert ITEMS[name].shows in text and "TINY" in text
    assert all(str(head) in text for row in record["rows"] for head in row)
    CHECKS.get(name, lambda rows: None)(record["rows"])


def _steps(rows):
    ways = {"ours, sine ms", "PEFT LoRA ms", "eager path ms", "three products ms", "frozen ms"}
    assert all(ways <= row.keys() for row in rows)
    assert all(("met" in row) == (row["type"] == "bfloat16") for row in rows)


def _compiled(rows):
    assert all("merged, compiled ms" in row and "met" not in row for row in rows)


def _kernels(rows):
    assert {row["type"] for row in rows} == {"float32", "bfloat16", "float16"}
    assert {row["rank"] for row in rows} == {4, 8, 16, 32}


def _llama(rows):
    kinds = [row["kind"] for row in rows]
    assert {"original", "unlearn", "score", "measure"} <= set(kinds)
    assert all(row["steps"] == 2 for row in rows if row["kind"] == "unlearn")


def _bits(rows):
    again = {row["what"]: row for row in rows if "files" in row}
    assert len(again) == 6 and all(row["other bits"] == 0 for row in again.values())


def _kills(rows):
    assert all(row["same bits"] == row["kills"] for row in rows)


CHECKS = {"steps": _steps, "compiled": _compiled, "kernels": _kernels, "llama": _llama}
CHECKS |= {"bits": _bits, "kills": _kills}


def test_no_item_is_longer_than_its_limit():
    assert all(0 < item.minutes * 60 <= LIMIT for item in ITEMS.values())


def test_the_plan_names_every_item_and_its_minutes_fit():
    """The commands of each sitting fit into its minutes, by the items' own estimates."""
    text, listed = PLAN.read_text(), listing()
    assert all(f"`{name}`" in text and f"`{name}`" in listed for name in ITEMS)
    sittings = re.findall(r"python -m tools\.gpu ([a-z ]+) --minutes (\d+)", text)
    assert [int(minutes) for _, minutes in sittings] == [10, 30, 45]
    for names, minutes in sittings:
        assert sum(ITEMS[name].minutes for name in names.split()) <= int(minutes)


def test_an_item_that_fails_leaves_its_rows_and_says_so(tmp_path, monkeypatch):
    def rows(self, job):
        yield {"what": "first", "ok": True}
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr("tools.gpu.items.Item.rows", rows)
    assert ask(tmp_path, "kernels") == 1
    record = json.loads((tmp_path / "kernels.json").read_text())
    assert not record["complete"] and [row["ok"] for row in record["rows"]] == [True, False]
    assert "illegal memory access" in (tmp_path / "kernels.md").read_text()


def test_rows_are_on_the_disk_before_the_next_one_is_made(tmp_path, monkeypatch):
    def rows(self, job):
        yield {"what": "first"}
        text = (tmp_path / "kernels.md").read_text()
        assert "first" in text and "cut off" in text
        yield {"what": "second", "ok": False}

    monkeypatch.setattr("tools.gpu.items.Item.rows", rows)
    assert ask(tmp_path, "kernels") == 1
    assert "cut off" not in (tmp_path / "kernels.md").read_text()


def test_items_in_turn_end_with_the_minutes(tmp_path):
    assert ask(tmp_path, "kernels", "layers", "--minutes", 0) == 1
    assert (tmp_path / "SUMMARY.md").read_text().count("no time left") == 2


@pytest.mark.parametrize(
    ("args", "words"),
    [(["kernel"], "did you mean 'kernels'"), (["kernels", "--device", "nowhere"], "--device")],
)
def test_what_is_not_there_is_one_line(args, words, capsys):
    assert main(args) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and words in lines[0]


def test_what_failed_is_what_says_so():
    rows = [{"a": 1.0}, {"a": 2.0, "ok": True}, {"a": 3.0, "ok": False}]
    assert failed(rows) == rows[2:]
