"""No table cuts a name or a number, at any width from 60 up, on a terminal or in a pipe."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from stable_forgetting.benchmarks.report import terminal
from stable_forgetting.benchmarks.report.section import Section, Table, table

WIDTHS = (60, 70, 80, 100, 120, 200)
COMMANDS = (
    ("show", "--filter", "a"),
    ("show", "suites", "--paper"),
    ("plan", "digits-class"),
    ("plan", "tofu-phi-1.5-forget10", "--keys"),
    ("show", "digits-class"),
    ("show", "lethevit-cifar10-small", "--resolved"),
    ("show", "image_classification"),
    ("show", "bounded", "--plan", "llama-2-7b"),
    ("report", "digits-random"),
    ("report", "tdec-small"),
    ("attack", "digits-all-class"),
    ("report", "digits-class-sweep"),
)


def printed(sections: list[Section], width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    terminal.show(console, sections)
    return console.file.getvalue().splitlines()


def check(sections: list[Section], width: int) -> None:
    """Every name, number and short word of every table is there whole, and no line is longer."""
    lines = printed(sections, width)
    text = "\n".join(lines)
    assert max(map(len, lines), default=0) <= width
    contents = [s.content for s in sections if isinstance(s.content, Table)]
    if not any("…" in cell for content in contents for row in content.rows for cell in row):
        assert "…" not in text
    for content in contents:
        for each, _ in terminal.fitting(content, Console(file=io.StringIO(), width=width)):
            for place, column in enumerate(each.columns):
                names = place == 0 and max(len(row[0]) for row in each.rows) <= terminal.NAME
                if column.kind != "words" or names:
                    assert all(row[place] in text for row in each.rows), column.head
                words = {word for row in each.rows for word in row[place].split()}
                assert all(w in text for w in words if len(w) <= terminal.WORD), column.head


@pytest.mark.parametrize("args", COMMANDS, ids=" ".join)
def test_commands_print_whole_tables_at_any_width(args, cli, tmp_path, monkeypatch):
    shown: list[Section] = []
    monkeypatch.setattr(terminal, "_show", lambda _, section: shown.append(section))
    stored = args[0] in ("plan", "report", "attack", "show")
    cli.ok(*args, *(["--store", tmp_path] if stored else []))
    monkeypatch.undo()
    assert any(isinstance(section.content, Table) for section in shown)
    for width in WIDTHS:
        check(shown, width)


def test_names_stay_whole_where_words_wrap():
    rows = [["cifar100-class10-small-all", "cifar100", "what " * 30], ["a", "nothing", "it"]]
    content = table(["suite", "needs", "what it measures"], rows, words=True)
    for width in WIDTHS:
        lines = printed([Section(content=content)], width)
        assert sum("cifar100-class10-small-all" in line for line in lines) >= 1


def test_a_cell_that_is_wider_than_the_console_wraps():
    rows = [["gd_sine_weight_decay_literal", "lr=0.001, resolved.lr=0.001, weight_decay=0.0001"]]
    content = table(["method", "chosen by tuning"], rows)
    text = " ".join(printed([Section(content=content)], 60))
    assert "…" not in text and "gd_sine_weight_decay_literal" in text
    assert all(word in text for word in rows[0][1].split())


def test_a_pipe_is_as_wide_as_columns_says():
    code = "from stable_forgetting.benchmarks.cli.options import console; print(console.width)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env={"COLUMNS": "200", "PATH": ""},
    )
    assert int(done.stdout) == 200
