"""A reader who has run nothing sees the reports that come with the project, and is told so."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from stable_forgetting.benchmarks.cli import report
from stable_forgetting.benchmarks.leaderboard.paper_table import main_table
from stable_forgetting.benchmarks.report import markdown
from stable_forgetting.benchmarks.report.section import Section, Table, table
from stable_forgetting.benchmarks.report.shipped import RESULTS, read_report
from stable_forgetting.benchmarks.report.terminal import fitting, rich_table, show

NAMES = sorted(path.parent.name for path in RESULTS.glob("*/LEADERBOARD.md"))


@pytest.mark.parametrize("name", NAMES)
def test_a_report_is_read_as_it_was_written(name):
    text = (RESULTS / name / "LEADERBOARD.md").read_text(encoding="utf-8")
    without_pictures = re.sub(r"^!\[.*\n\n", "", text, flags=re.M)
    assert markdown.write(read_report(text)) == without_pictures


def test_reports_are_shown_where_the_store_is_empty(tmp_path, cli, one_line_error, monkeypatch):
    store = ["--store", tmp_path / "none"]
    shown = cli("report", "digits-class", *store)
    assert shown.code == 0 and "gd_lora_omega" in shown.out and "AG4" in shown.out
    said = r"no records of digits-class in .*none; .*LEADERBOARD\.md comes with the project; from"
    assert re.fullmatch(said + " it:\n", shown.err)
    shipped = {"md": "LEADERBOARD.md", "json": "leaderboard.json"}
    for form, name in {**shipped, "csv": "runs.csv", "runs": "runs.csv"}.items():
        written = cli("report", "digits-class", *store, "--format", form)
        assert written.out == (RESULTS / "digits-class" / name).read_text(encoding="utf-8")
    drawn = cli("report", "digits-class-attack", *store, "--format", "svg").out
    assert drawn == (RESULTS / "digits-class-attack" / "leaderboard.svg").read_text("utf-8")
    assert "<table>" in cli("report", "digits-class", *store, "--format", "html").out
    with monkeypatch.context() as older:
        older.setattr(report, "read_board", lambda folder: {"version": 0})
        changed = cli("report", "digits-class", *store)
    assert "its suite has changed since" in changed.err
    audits = cli("attack", "cifar10-transfer", *store)
    assert "relearn: steps until" in audits.out and "Tuning" not in audits.out
    picture = cli("report", "digits-class-sweep", *store, "--format", "svg").out
    assert picture == (RESULTS / "maps" / "digits-class-sweep" / "map.svg").read_text("utf-8")
    swept = cli("report", "digits-class-sweep", *store)
    assert swept.code == 0 and "accepted %" in swept.out and "MAP.md comes" in swept.err
    for command in ("report digits-class --seeds 7 --only gd", "attack authors"):
        asked = command.split()
        line = one_line_error(cli(*asked, *store))
        assert "no records of " in line and f"run: unlearn run {' '.join(asked[1:])} --st" in line
    assert not (tmp_path / "none").exists()
    changed = tmp_path / "none/suites/authors+1a2b3c/records.jsonl"
    changed.parent.mkdir(parents=True)
    changed.touch()
    assert "(but of authors+1a2b3c); run" in one_line_error(cli("attack", "authors", *store))


@pytest.mark.parametrize(
    "width", [80, 146, *(pytest.param(n, marks=pytest.mark.slow) for n in (60, 100, 160, 200))]
)
def test_no_table_is_cut_at_any_width(width):
    """Every shipped main table keeps its method, its ranking column and every digit."""
    for name in NAMES:
        text = (RESULTS / name / "LEADERBOARD.md").read_text(encoding="utf-8")
        sections = read_report(text)
        wide = next(s.content for s in sections if isinstance(s.content, Table))
        console = Console(width=width, file=io.StringIO())
        show(console, sections[:6])
        printed = console.file.getvalue()
        assert "…" not in printed
        heads = {head for piece, _ in fitting(wide, console) for head in piece.heads}
        assert heads == {*wide.heads}
        for piece, tight in fitting(wide, console):
            assert piece.heads[0] == wide.heads[0]
            own = Console(width=width, file=io.StringIO())
            own.print(rich_table(piece, tight=tight))
            lines = iter(own.file.getvalue().splitlines())
            for row in piece.rows:
                cells = [cell for cell in row if cell]
                assert shown_by(lines, cells), (name, row)


def shown_by(lines, cells):
    """Whether the next lines that begin like a row show its cells: each word once, none cut."""
    words = " ".join(cells).split()
    for line in lines:
        if line.split()[:1] != words[:1]:
            continue
        if line.split() == words:
            return True
        found = line.split()
        while len(found) < len(words):  # a cell with words takes two lines
            found += next(lines).split()
        return sorted(found) == sorted(words)
    return False


def test_a_reference_of_any_name_is_never_the_best_row():
    shown = table(["method", "AG4 ↓"], [["gold", "0.0"], ["gd", "1.0"]], marks={"gold": "goal"})
    (made,) = main_table([Section(content=shown)], (), {}, bold=True)
    assert [row[1] for row in made.content.rows] == ["0.0", "**1.0**"]


def test_a_papers_table_has_chosen_columns_names_and_the_best_bold(cli, tmp_path):
    asked = ("report", "digits-class", "--store", tmp_path, "--format")
    chosen = ("--main", "--columns", "TA,ag4 ↓", "--names", "gd=GD,gd_sine=Sine", "--bold")
    done = cli(*asked, "tex", *chosen)
    assert done.code == 0 and done.out.count("\\begin{table*}") == 1
    assert "\\caption{digits-class. scikit-learn digits" in done.out
    lines = [line for line in cli(*asked, "md", *chosen).out.splitlines() if line.startswith("| ")]
    rows = {cells[0]: cells[1:] for cells in (line.strip("| ").split(" | ") for line in lines)}
    assert rows["method"] == ["TA →", "AG4 ↓"] and {"GD", "Sine"} < rows.keys()
    assert "gd_sine" not in rows and "gd_tanh" in rows

    def number(row):
        return float(rows[row][1].strip("*").split("±")[0])

    ranked = [row for row in rows if row not in ("method", "original") and "retrain" not in row]
    best = {row for row in ranked if number(row) == min(map(number, ranked))}
    assert best == {row for row in rows if rows[row][1].startswith("**")}
    for wrong, words in [
        (("tex", "--main", "--columns", "AG5"), "no column 'ag5'; did you mean 'ag4'?"),
        (("tex", "--main", "--names", "gd_sin=x"), "no row 'gd_sin'; did you mean"),
        (("tex", "--main", "--names", "gd"), "write LABEL=NAME"),
        (("tex", "--main", "--names", "gd=A,gd=B"), "each label once"),
        (("table", "--main"), "--format tex or md"),
        (("tex", "--bold"), "--main and its options"),
    ]:
        refused = cli(*asked, *wrong)
        assert refused.code == 2 and words in refused.err and not refused.out
