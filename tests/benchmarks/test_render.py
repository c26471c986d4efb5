from __future__ import annotations

import csv
import dataclasses
import html.parser
import io
import itertools
import json
import math
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree

import pytest
from rich.console import Console

from stable_forgetting.benchmarks.leaderboard.board import BoardRow
from stable_forgetting.benchmarks.leaderboard.data import row_lines, run_lines, to_json
from stable_forgetting.benchmarks.leaderboard.derive import make_leaderboard
from stable_forgetting.benchmarks.leaderboard.paper_table import main_table as paper_table
from stable_forgetting.benchmarks.leaderboard.picture import draw, picture, ticks_to
from stable_forgetting.benchmarks.leaderboard.report import divergence_lines, sections
from stable_forgetting.benchmarks.leaderboard.settings import row_detail, settings_sections
from stable_forgetting.benchmarks.leaderboard.tables import gap_table, main_table
from stable_forgetting.benchmarks.leaderboard.write import write_report
from stable_forgetting.benchmarks.report import html as page
from stable_forgetting.benchmarks.report import markdown, tex
from stable_forgetting.benchmarks.report.files import csv_text
from stable_forgetting.benchmarks.report.section import Section, table
from stable_forgetting.benchmarks.report.terminal import fitting, rich_table, show
from stable_forgetting.benchmarks.suite.reading import read_suite
from stable_forgetting.benchmarks.suite.remembered import suite_digest
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.benchmarks.suite.suite import FLOOR, suite_names
from stable_forgetting.common.store.records import RunRecord, processor
from stable_forgetting.common.store.stages import StageStore

TABLE = {
    "original": {1: (100, 100, 90, 10), 2: (100, 100, 92, 12)},
    "retrain": {1: (80, 99, 88, 30), 2: (82, 98, 90, 28)},
    "retrain*": {1: (81, 99, 88, 31), 2: (82, 99, 89, 28)},
    "gd": {1: (82, 97, 89, 27), 2: (80, 98, 90, 32)},
    "gd_sine": {1: None, 2: (82, 98.4, 90, 28)},
    "gd_ball": {1: None, 2: None},
}
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Tags(html.parser.HTMLParser):
    """Checks that every tag is closed in order; collects the text and the rows of tables."""

    def __init__(self):
        super().__init__()
        self.open, self.tables, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag in VOID or tag == "!doctype":
            return
        self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append(0)
        if tag in ("td", "th"):
            self.tables[-1][-1] += 1

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def strict(text):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def board(hand_made, tmp_path):
    suite, store = hand_made(
        tmp_path,
        TABLE,
        title="a | title with <b> & [/red] ‖",
        compare=[["gd", "gd_sine"]],
    )
    return make_leaderboard(suite, store)


def markdown_tables(text):
    """Cells of every table, by lines."""
    tables, last = [], False
    for line in text.splitlines():
        if line.startswith("|"):
            if not last:
                tables.append([])
            tables[-1].append(re.split(r"(?<!\\)\|", line)[1:-1])
        last = line.startswith("|")
    return tables


def test_markdown_tables_are_rectangular(board):
    text = markdown.write(sections(board))
    main, verdicts, gaps, bound, attacks, settings = markdown_tables(text)
    for lines in (main, verdicts, gaps, bound, attacks, settings):
        assert len({len(cells) for cells in lines}) == 1
        assert set(re.sub(r"[:-]", "", "".join(lines[1]))) == set()
    assert [cells[0].strip() for cells in verdicts[2:]] == ["gd", "original"]
    assert [cells[0].strip() for cells in settings[2:]] == ["gd", "gd_sine", "gd_ball"]
    for lines in (main, gaps, bound, attacks):
        assert [cells[0].strip() for cells in lines[2:]] == [row.label for row in board.rows]
    assert "measured" in text.splitlines()[0] and text.endswith("\n")
    assert "Noise floor (AG4 of a second Retrain" in text
    assert "- AG4 of gd − gd_sine:" in text


def test_gaps_carry_their_intervals(board):
    gaps = gap_table(board)
    cells = {row[0]: dict(zip(gaps.heads, row, strict=True)) for row in gaps.rows}
    assert cells["gd"]["RA gap"].startswith("-1.0 [") and cells["gd"]["RA gap"].endswith("]")
    assert cells["gd"]["AG4"].startswith("1.75 [-1.43, 4.93")  # 1.75 -+ 12.71 * .3536 / sqrt(2)


def test_diverged_runs_are_named_with_their_step(board):
    lines = divergence_lines(board)
    assert any(line.startswith("gd_sine, seed 1: ") for line in lines), lines
    text, written = markdown.write(sections(board)), html.unescape(page.write(sections(board)))
    assert all(f"- {line}" in text and line in written for line in lines)


def test_main_cells(board):
    heads, cells = main_table(board).heads, {row[0]: row for row in main_table(board).rows}
    place = {head: index for index, head in enumerate(heads)}
    assert cells["gd"][place["FA →"]] == "81.0±1.4 +0.0"
    assert cells["gd"][place["RA →"]] == "97.5±0.7 -1.0"
    assert cells["gd"][place["AG4 ↓"]] == "1.75±0.35"
    assert cells["gd"][place["AG4 ↓"] + 1] == "", "two seeds carry no mark"
    assert cells["retrain"][place["FA →"]] == "81.0±1.4", "no gap to itself"
    assert cells[FLOOR][place["FA →"]].endswith("+0.5")
    assert cells["gd_sine"][place["n"]] == "2 (1 diverged)"
    assert cells["gd_sine"][place["FA →"]] == "82.0 +0.0"
    assert cells["gd_ball"][place["n"]] == "2 (2 diverged)"
    assert cells["gd_ball"][place["AG4 ↓"]] == "–" and cells["gd_ball"][place["FA →"]] == "–"
    assert all(len(row) == len(heads) for row in cells.values())


def test_compact_table_fits_80_columns(board):
    def width(board):
        console = Console(width=200, file=io.StringIO())
        console.print(rich_table(main_table(board).narrow, tight=True))
        return max(len(line.rstrip()) for line in console.file.getvalue().splitlines())

    assert width(board) <= 80
    # the widest cells that can occur under the longest label of the suites that we ship
    labels = {label for name in suite_names() for label in read_suite(name)[1]["methods"]}
    row = next(found for found in board.rows if found.label == "original")
    row.label = max(labels, key=len)
    row.metrics = {**row.metrics, "fa": row.metrics["ra"], "mia": row.metrics["ra"]}
    row.gaps = {name: type(gap)(-100.0, 1.0, 0.0, 0.0, 2) for name, gap in row.gaps.items()}
    assert width(board) <= 80
    row.diverged = {1: "at step 3"}
    assert width(board) <= 80


def test_compact_cells(board):
    cells = {row[0]: row for row in main_table(board).narrow.rows}
    assert cells["gd"][1:] == ("81.0 +0.0", "97.5 -1.0", "89.5 +0.5", "29.5 +0.5", "1.75     ")
    assert cells["original"][1] == "100.0 +19" and cells["original"][-1].split() == ["10.1"]
    assert cells["gd_sine"][-1] == "0.10   ✗1" and cells["gd_ball"][-1] == "–   ✗2"


def test_compact_tables_of_many_columns_keep_those_of_the_average_gap(hand_made, tmp_path):
    columns = ["fa", "ra", "ta", "ta_f", "mia"]
    board = make_leaderboard(*hand_made(tmp_path, TABLE, columns=columns))
    narrow = main_table(board).narrow
    assert narrow.heads == ["method", "FA →", "RA →", "TA →", "MIA →", "AG4 ↓"]
    assert "means alone" in narrow.explanation
    assert all(len(row) == len(narrow.heads) for row in narrow.rows)
    assert "TA_f →" in main_table(board).heads


def test_runs_hold_every_record(board):
    rows = list(csv.DictReader(io.StringIO(csv_text(run_lines(board)))))
    assert len(rows) == len(board.records) == 12
    by_key = {(row["row"], row["seed"], row["replicate"]): row for row in rows}
    gd, second = by_key["gd", "1", "0"], by_key["retrain", "1", "1"]
    assert float(gd["mia"]) == 27.0 and float(gd["gap.mia"]) == -3.0
    assert float(gd["distance"]) == 2.0 and float(gd["config.forget_weight"]) > 0
    assert float(second["fa"]) == 81.0 and float(second["distance"]) == 0.5
    assert by_key["gd_sine", "2", "0"]["config.adapter.phi"] == "sine"
    bad = by_key["gd_ball", "2", "0"]
    assert bad["status"] == "diverged" and bad["fa"] == bad["mia"] == bad["gap.fa"] == ""
    assert set(board.specs) <= set(rows[0])


def test_the_csv_is_the_leaderboard(board):
    rows = {row["row"]: row for row in csv.DictReader(io.StringIO(csv_text(row_lines(board))))}
    assert list(rows) == [row.label for row in board.rows]
    gd = rows["gd"]
    assert float(gd["distance"]) == 1.75 and gd["seeds"] == "2" and gd["verdict"] == "untested"
    assert float(gd["distance_low"]) < 1.75 < float(gd["distance_high"])
    assert float(gd["ra"]) == 97.5 and float(gd["gap.ra"]) == -1.0 and float(gd["ra_std"]) > 0
    assert rows["gd_ball"]["diverged"] == "2" and rows["gd_ball"]["distance"] == ""


def test_a_rows_command_can_be_typed_whatever_the_suites_name():
    lines = row_detail("digits (mine)", "gd 2", "gd", None, (1, 2)).text.splitlines()
    assert lines[0] == "unlearn run 'digits (mine)' --only 'gd 2' --seeds 1,2"


def test_settings_say_what_rows_ran_with(board):
    (section, same) = settings_sections(board)
    lines = {row[0]: dict(zip(section.content.heads, row, strict=True))
             for row in section.content.rows}  # fmt: skip
    config = {row.label: row.config for row in board.suite.rows}
    assert (
        lines["gd"]["forget_weight"] == f"{config['gd'].forget_weight:g}"
        and lines["gd"]["adapter.rank"] == "–"
    )
    assert lines["gd_sine"]["adapter.omega"] == "100"
    assert "adapter.phi=sine" in lines["gd_sine"]["further settings"]
    assert f"optimizer={config['gd'].optimizer}" in same.text[0]
    assert to_json(board)["settings"]["gd_sine"]["adapter"]["omega"] == 100
    console = Console(width=160, file=io.StringIO())
    show(console, [section, same])
    assert "further settings" not in console.file.getvalue()


def test_tex_is_escaped_and_its_marks_are_notes(board, hand_made, tmp_path):
    assert tex.escaped("a_b & 50 % `x` -1 ±") == (
        r"a\_b \& 50 \% \texttt{x} \ensuremath{-}1 \ensuremath{\pm}"
    )
    text = tex.write(sections(board))
    floats = re.findall(r"\\begin\{table\*\}.*?\\end\{table\*\}", text, re.S)
    assert len(floats) == 6 and all(one.count("\\midrule") == 1 for one in floats)
    main = floats[0]
    assert "gd\\_sine" in main and "gd_sine" not in main
    assert r"1.75\ensuremath{\pm}0.35 &" in main and r"\tnote" not in main
    five = {row: {s: of[1 + s % 2] for s in range(1, 6)} for row, of in TABLE.items()}
    (tmp_path / "five").mkdir()
    marked = tex.write(sections(make_leaderboard(*hand_made(tmp_path / "five", five))))
    assert r"\tnote{\ensuremath{\neq}}" in marked and r"different from a retrained model" in marked
    assert r"\ensuremath{-}1.0" in main and "-1.0" not in main
    assert len(set(re.findall(r"\\label\{(.*?)\}", text))) == len(floats)
    for one in floats:
        body = re.search(r"\\toprule\n(.*)\\bottomrule", one, re.S)[1].splitlines()
        assert len({line.count(" & ") for line in body if line.endswith(r"\\")}) == 1
    outside = re.sub(r"\\begin\{table\*\}.*?\\end\{table\*\}", "", text, flags=re.S)
    assert all(line.startswith("%") for line in outside.splitlines() if line)
    long = tex.write([Section("t", content=table(["a", "b"], [["r", "1"]] * 100))])
    assert long.count("\\toprule") == 3 and long.count("r & 1") == 100


def test_no_two_tables_of_a_tex_file_have_one_label():
    short, long = (table(["a", "b"], [["r", "1"]] * count) for count in (1, 50))
    text = tex.write([Section("t"), *(Section(content=one) for one in (short, long, short))])
    labels = re.findall(r"\\label\{(.*?)\}", text)
    assert labels == ["tab:t", "tab:t-2", "tab:t-3", "tab:t-4"]


def test_a_line_below_a_tex_table_is_a_comment_to_its_end():
    text = tex.write([Section("t", content=table(["a", "b"], [["r", "1"]]), lines=("x\ny & z",))])
    assert text.endswith("% x\n% y & z\n")


def test_a_row_that_diverged_is_not_the_best_of_a_paper(board):
    (made,) = paper_table(sections(board), (), {}, bold=True)
    bold = {row[0] for row in made.content.rows if any("**" in cell for cell in row)}
    assert bold == {"gd"}, "gd_sine is nearer on the one seed that is left"
    seeds = made.content.heads.index("n")
    assert {row[0]: row[seeds] for row in made.content.rows}["gd_sine"] == "2 (1 diverged)"
    (made,) = paper_table(sections(board), ("AG4",), {"gd_sine": "Sine"}, bold=True)
    names = [row[0] for row in made.content.rows]
    assert {"gd", "Sine (1 diverged)", "gd_ball (2 diverged)"} < {*names}, "without n too"


def test_seeds_that_diverged_are_not_said_to_be_in_the_means(board, hand_made, tmp_path):
    docs = [column.doc for column in main_table(board).columns if column.head == "n"]
    assert docs == ["counts the seeds; those that diverged are in no mean"]
    whole = {label: of for label, of in TABLE.items() if label not in ("gd_sine", "gd_ball")}
    (tmp_path / "whole").mkdir()
    plain = main_table(make_leaderboard(*hand_made(tmp_path / "whole", whole)))
    docs = [column.doc for column in plain.columns if column.head == "n"]
    assert docs == ["counts the seeds in the means"]


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="no LaTeX")
def test_latex_reads_it(board, tmp_path):
    (tmp_path / "board.tex").write_text(tex.write(sections(board)), encoding="utf-8")
    packages = "booktabs,threeparttable,adjustbox,amsmath,amssymb"
    document = (
        f"\\documentclass{{article}}\\usepackage{{{packages}}}\n"
        "\\begin{document}\\input{board}\\end{document}"
    )
    (tmp_path / "document.tex").write_text(document)
    command = ["pdflatex", "-draftmode", "-halt-on-error", "-interaction=nonstopmode", "document"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    if "not found" in done.stdout:
        pytest.skip("packages of LaTeX are missing")
    assert done.returncode == 0, done.stdout[-2000:]


def test_json_is_strict_and_complete(board):
    data = strict(json.dumps(to_json(board), allow_nan=False))
    rows = {row["row"] if "row" in row else row["label"]: row for row in data["rows"]}
    assert list(rows) == [row.label for row in board.rows]
    assert rows["gd"]["derived"]["ag"]["mean"] == 1.75
    assert rows["gd"]["gaps"]["ra"]["mean"] == -1.0
    assert rows["gd"]["ag_per_seed"] == {"1": 2.0, "2": 1.5}
    assert list(rows["gd_sine"]["diverged"]) == ["1"]
    assert rows["gd_ball"]["derived"] == {}
    assert data["floor"]["per_seed"] == [0.5, 0.5] and data["complete"] is True


def test_svg_is_xml_and_inside_its_frame(board):
    root = ElementTree.fromstring(picture(board).svg)
    width, height = float(root.get("width")), float(root.get("height"))
    dots = [e for e in root.iter() if e.tag.endswith("circle")]
    assert len(dots) == 2 + 2 + 1, "floor, gd and gd_sine, one dot per seed"
    arrows = [e.text for e in root.iter() if (e.text or "").endswith("\N{RIGHTWARDS ARROW}")]
    assert len(arrows) == 1, "original is more than twice as far as the worst method"
    for dot in dots:
        assert 0 <= float(dot.get("cx")) <= width and 0 <= float(dot.get("cy")) <= height
    texts = [e.text for e in root.iter() if e.tag.endswith("text")]
    assert {"gd", "gd_sine", "original", FLOOR} <= set(texts) and "gd_ball" not in texts


def test_svg_survives_partly_undefined_rows(hand_made, tmp_path):
    table = {
        **{k: v for k, v in TABLE.items() if k in ("retrain", "retrain*")},
        "gd": {1: (82, 97, 89, None), 2: (80, 98, 90, 32)},
    }
    board = make_leaderboard(*hand_made(tmp_path, table))
    drawn = ElementTree.fromstring(picture(board).svg)
    assert "gd" in [e.text for e in drawn.iter() if e.tag.endswith("text")]
    assert [e for e in drawn.iter() if e.tag.endswith("circle")]
    (tmp_path / "b").mkdir()
    nothing = make_leaderboard(*hand_made(tmp_path / "b", {"retrain": {1: (1, 1, 1, 1)}}))
    empty = ElementTree.fromstring(picture(nothing).svg)
    assert not [e for e in empty.iter() if e.tag.endswith("circle")]


def test_html_is_balanced_and_escaped(board):
    written = page.write(sections(board))
    tags = Tags()
    tags.feed(written)
    tags.close()
    assert tags.open == []
    assert len(tags.tables) == 6 and all(len(set(table)) == 1 for table in tags.tables)
    assert "<b>" not in written and "with <b> &" in "".join(tags.text)
    named = re.findall(r"<(\w+)[^>]*(?:src|href)=.(?!#|data:)", written)
    assert {*named} == {"a"} and "@import" not in written and "url(" not in written, (
        "it loads nothing"
    )


def test_the_page_says_all_that_the_markdown_says(hand_made, tmp_path, section_pages):
    """What is missing, what does not apply, the notes and the provenance stand in both."""
    random = {"protocol": {"scenario": {"kind": "random", "fraction": 0.1}}}
    table = {**TABLE, "gd": {2: (80, 98, 90, 32)}}
    rows = {label: None for label in table if label != "retrain*"}
    made = hand_made(
        tmp_path, table, methods={**rows, "novo": None}, seeds=[1, 2], notes="mind the gap",
        title="a title", compare=[["gd", "gd_sine"]], **random,
    )  # fmt: skip
    board = make_leaderboard(*made)
    text, written = section_pages(sections(board))
    assert to_json(board)["complete"] is False and "**Incomplete: 1 records" in text
    for line in (
        "Incomplete: 1 records are missing.",
        "novo: not applicable (for class forgetting only)",
        "Notes: mind the gap",
        "Data: by hand, digest dddddddddddd.",
        "gd_ball, seed 2: diverged at step 3: loss not finite",
        "Paired comparisons (p corrected for them, Holm):",
    ):
        assert line in text and line in html.unescape(written)
    assert "<svg " in written and "<svg " not in text


def test_committed_reports_are_rendered_as_they_stand(filled):
    """Of a filled store: headings and tables in the order that committed reports have."""
    board = make_leaderboard(load_suite(str(filled.paths["class"])), StageStore(filled.store))
    text = markdown.write(sections(board))
    kinds = f"1 x 1 on cpu. Processor: {processor()}."
    assert f"Processes x threads on device: {kinds}" in text
    assert re.findall(r"^#+ .*", text, re.M) == [
        f"# tiny-class (v1, {suite_digest(board.suite)}, measured)",
        "## Verdicts",
        "## Signed gaps to Retrain, with 95 % CIs (t)",
        "## Did the bound act?",
        "## What did it cost?",
        "## Further measurements",
        "## Settings",
    ]
    main, _, _, bound, cost, _, _ = markdown_tables(text)
    assert [cell.strip() for cell in bound[0]] == [
        "method", "‖dW‖/‖W0‖", r"max \|arg\|", "bound active", "logit spread",
    ]  # fmt: skip
    assert [cells[0] for cells in main] == [cells[0] for cells in cost]
    assert "`max |arg|` is the largest |omega A B^T| (the argument of phi) at the end of" in text
    assert "Balanced accuracy of the MIA's SVC on Retrain's own data: " in text


def test_a_terminal_gets_the_widest_table_that_fits():
    wide = table(["a" * 9, "b" * 9, "c" * 9], [["1", "2", "3"]])
    narrow = table(["a", "b"], [["1", "2"]])
    both = dataclasses.replace(wide, narrow=narrow)

    def shown(table, width):
        return [piece.heads for piece, _ in fitting(table, Console(width=width))]

    assert shown(both, 80) == [wide.heads] and shown(both, 20) == [narrow.heads]
    assert shown(wide, 25) == [wide.heads[:2], [wide.heads[0], wide.heads[2]]]
    words = table(["a", "b"], [["1", "long " * 40]], words=True)
    assert shown(words, 20) == [words.heads], "words wrap"


def test_terminal_tables_print_any_text(board):
    console = Console(width=200, file=io.StringIO())
    odd = table(["a", "[b]"], [["[/x]", "[bold]y"]])
    show(console, [Section("title [/red]", content=odd)])
    assert "[/x]" in console.file.getvalue() and "[bold]y" in console.file.getvalue()
    assert "[b]" in console.file.getvalue() and "title [/red]" in console.file.getvalue()


def test_report_prints_every_format(board, tmp_path, cli):
    readers = {
        "md": lambda text: markdown_tables(text)[0],
        "csv": lambda text: list(csv.reader(io.StringIO(text))),
        "runs": lambda text: list(csv.reader(io.StringIO(text))),
        "tex": lambda text: re.search(r"\\toprule", text)[0],
        "json": strict,
        "html": lambda text: Tags().feed(text),
        "svg": ElementTree.fromstring,
    }
    for name, read in readers.items():
        shown = cli(
            "report", tmp_path / "tiny.yaml", "--store", tmp_path / "store", "--format", name
        )
        assert shown.code == 0 and shown.err == "" and shown.out
        read(shown.out)
    shown = cli("report", tmp_path / "tiny.yaml", "--store", tmp_path / "store")
    assert shown.code == 0 and "gd_sine" in shown.out and "Noise floor" in shown.out


def test_report_files_are_complete_and_whole(board, tmp_path):
    root = tmp_path / "out"
    write_report(board, root, events=False)
    write_report(board, root, events=False)
    folder = root / "suites" / "tiny"
    assert sorted(path.name for path in folder.iterdir()) == [
        "LEADERBOARD.md",
        "leaderboard.csv",
        "leaderboard.html",
        "leaderboard.json",
        "leaderboard.svg",
        "leaderboard.tex",
        "records.jsonl",
        "runs.csv",
        "target.svg",
    ]
    strict((folder / "leaderboard.json").read_text())
    lines = [strict(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    assert len(lines) == 12
    for line in lines:
        assert line.pop("suite") == "tiny" and line.pop("row") in TABLE
        assert line.pop("forget") == 50
        RunRecord.model_validate(line)


def dots(label, method, *values):
    return BoardRow(label, method, ag_per_seed=dict(enumerate(values)))


def test_a_reference_far_beyond_the_methods_is_an_arrow_with_its_number():
    rows = [dots("original", "original", 4224, 4200), dots("a", "gd", 1, 40), dots("b", "gd", 3)]
    drawn = draw("tdec", "to threshold", "points", rows, []).svg
    texts = [e.text for e in ElementTree.fromstring(drawn).iter() if e.tag.endswith("text")]
    assert "4212 \N{RIGHTWARDS ARROW}" in texts and "Retrain" not in drawn
    assert "green" not in drawn and "tdec: to threshold" in texts
    assert {"0", "1", "2", "5", "10", "20"} <= {*texts}
    near = draw("tdec", "AG", "points", [dots("original", "original", 50), *rows[1:]], [0.5]).svg
    assert "\N{RIGHTWARDS ARROW}" not in near and "green: a second Retrain" in near
    own = draw("digits", "AG4", "points", [dots("gold", "retrain", 0), *rows], []).svg
    assert "to Retrain" in own and "gold" not in own, "the goal is no row, whatever it is called"


@pytest.mark.parametrize("top", [0.003, 0.7, 1, 9.8, 50, 100, 4224])
def test_ticks_never_overprint_each_other(top):
    ticks = ticks_to(top)
    places = [520 * math.sqrt(tick / top) for tick in ticks]
    assert ticks[0] == 0 and len(ticks) >= 3 and ticks[-1] <= top
    assert all(b - a >= 30 for a, b in itertools.pairwise(places))
