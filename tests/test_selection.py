"""How tables change where no Retrain helps to choose: docs/findings.md and the tables beside the
numbers (``benchmarks/results/selection``), each computed again from ``choices.csv``.

To mend: ``python -m tests.test_selection STORE...`` reads the reports of the suites in stores, with
``tune.select`` as it is by default and as ``without_retrain``, and writes the folder's files.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from functools import cache
from pathlib import Path

import pytest
from scipy.stats import rankdata, spearmanr

from stable_forgetting.benchmarks.report.shipped import RESULTS, read_board
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.measure.gaps import paired_difference, summarise
from tests.test_findings import FINDINGS, prose

FOLDER = RESULTS / "selection"
CHOICES, TABLES = FOLDER / "choices.csv", FOLDER / "SELECTION.md"
SUITES = ("muse-news-small", "digits-random-tuned")
RULES = ("retrain", "without_retrain")
SENTENCES = {
    "muse-news-small": "{moved} of {rows} rows changes its choice. In {same_order} rows all four "
    "trials have the same order by both rules.",
    "digits-random-tuned": "{moved} of {rows} rows change their choice, and the rank correlation "
    "of the two tables is {rho}. Without a Retrain {worse} of them are farther and {better} "
    "nearer. Over all {rows} rows the mean difference is {farther}",
}
"""What the findings say of a suite."""
HEADS = ("suite", "row", "select", "trial", "setting", "tuning_gaps", "seeds", "distances", "floor")


@cache
def choices(suite: str) -> dict[str, dict[str, dict[str, str]]]:
    """Row -> rule of the choice -> its line."""
    rows: dict[str, dict[str, dict[str, str]]] = {}
    for line in csv.DictReader(CHOICES.read_text().splitlines()):
        if line["suite"] == suite:
            rows.setdefault(line["row"], {})[line["select"]] = line
    return rows


def distances(line: dict[str, str]) -> list[float]:
    return [float(value) for value in line["distances"].split()]


def means(suite: str, rule: str) -> list[float]:
    """Mean distance over seeds of every row, as shown."""
    own = [distances(of[rule]) for of in choices(suite).values()]
    return [round(math.fsum(each) / len(each), 2) for each in own]


def ranks(suite: str, rule: str) -> list[int]:
    """Ties share the best."""
    return [int(rank) for rank in rankdata(means(suite, rule), method="min")]


def changed(suite: str) -> list[str]:
    """Rows for which the rules choose different trials."""
    rows = choices(suite).items()
    return [row for row, of in rows if of[RULES[0]]["trial"] != of[RULES[1]]["trial"]]


def correlation(suite: str) -> str:
    """Spearman's of the two orders of the rows."""
    return f"{spearmanr(*(means(suite, rule) for rule in RULES)).statistic:.2f}".lstrip("0")


def farther(suite: str) -> str:
    """Mean over rows of how much farther a row is, paired by row, and its 95 % CI."""
    pairs = [[distances(of[rule]) for rule in RULES] for of in choices(suite).values()]
    own = summarise([math.fsum(b) / len(b) - math.fsum(a) / len(a) for a, b in pairs])
    return f"{own.mean:.2f} [{own.low:.2f}, {own.high:.2f}] points"


def sides(suite: str) -> tuple[int, int]:
    """Of the rows that change, how many are farther and how many nearer without a Retrain."""
    labels = list(choices(suite))
    pairs = zip(labels, *(means(suite, rule) for rule in RULES), strict=True)
    moved = [other - usual for label, usual, other in pairs if label in changed(suite)]
    return sum(each > 0 for each in moved), sum(each < 0 for each in moved)


def same_order(suite: str) -> int:
    """Rows whose trials both rules order alike."""
    orders = [
        [
            rankdata([float(gap) for gap in of[rule]["tuning_gaps"].split()]).tolist()
            for rule in RULES
        ]
        for of in choices(suite).values()
    ]
    return sum(first == second for first, second in orders)


ABOUT = """# Settings chosen with and without a Retrain

Each suite was run as it is and with `--set tune.select=without_retrain`, in one store:
muse-news-small, and digits-random-tuned, whose file stands here. `python -m tests.test_selection
STORE...` made `choices.csv` and this page. Ranks are by the mean over seeds, ties share the best.
"""


def nearer_than(suite: str, points: float) -> int:
    """Rows within so many points of Retrain, chosen with it."""
    return sum(value < points for value in means(suite, RULES[0]))


def moved(suite: str, row: str) -> str:
    """How much farther a row is without a Retrain, as shown."""
    place = list(choices(suite)).index(row)
    return f"{means(suite, RULES[1])[place] - means(suite, RULES[0])[place]:.2f}"


def table(suite: str) -> str:
    """Markdown: each row's setting, rank and distance by both rules."""
    places = [dict(zip(choices(suite), ranks(suite, rule), strict=True)) for rule in RULES]
    values = [dict(zip(choices(suite), means(suite, rule), strict=True)) for rule in RULES]
    lines = ["| row | with Retrain | without | rank | rank without | AG | AG without |"]
    lines.append("|---|---|---|---:|---:|---:|---:|")
    for row in choices(suite):
        settings = [choices(suite)[row][rule]["setting"] for rule in RULES]
        if settings[0] == settings[1]:
            settings[1] = "the same"
        numbers = [f"{of[row]}" for of in places] + [f"{of[row]:.2f}" for of in values]
        lines.append(f"| `{row}` | " + " | ".join([*settings, *numbers]) + " |")
    return "\n".join(lines) + "\n"


def text() -> str:
    """SELECTION.md."""
    parts = [ABOUT]
    for suite in SUITES:
        seeds = next(iter(choices(suite).values()))["retrain"]["seeds"]
        parts.append(f"## {suite}\n\nSeeds {seeds}; tuning seed 0.\n\n{table(suite)}")
    return "\n".join(parts)


NUMBERS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def test_the_tables_are_those_of_the_choices():
    assert TABLES.read_text() == text()
    suites = {line["suite"] for line in csv.DictReader(CHOICES.read_text().splitlines())}
    assert suites == {*SUITES}
    for suite in SUITES:
        seeds = {of[rule]["seeds"] for of in choices(suite).values() for rule in RULES}
        assert len(seeds) == 1


def test_the_choice_of_every_line_has_the_smallest_tuning_gap():
    for suite in SUITES:
        for of in choices(suite).values():
            for line in of.values():
                gaps = [float(gap) for gap in line["tuning_gaps"].split()]
                assert gaps[int(line["trial"])] == min(gaps) < math.inf


def test_the_choices_are_those_of_the_suites():
    muse = {
        row["row"]: row["ag_per_seed"] for row in read_board(RESULTS / "muse-news-small")["rows"]
    }
    for row, of in choices("muse-news-small").items():
        shipped = [muse[row][seed] for seed in of["retrain"]["seeds"].split()]
        assert distances(of["retrain"]) == pytest.approx(shipped, abs=1e-4)
    suite = load_suite(str(FOLDER / "digits-random-tuned.yaml"))
    drawn = {row.label: [draw.values for draw in row.draws] for row in suite.rows if row.search}
    assert drawn.keys() == choices(suite.name).keys()
    for row, of in choices(suite.name).items():
        for line in of.values():
            values = sorted(
                f"{key} {value:g}" for key, value in drawn[row][int(line["trial"])].items()
            )
            assert sorted(line["setting"].split(", ")) == values


def test_equal_choices_have_equal_distances():
    for suite in SUITES:
        for row, of in choices(suite).items():
            same = of[RULES[0]]["setting"] == of[RULES[1]]["setting"]
            assert same == (row not in changed(suite))
            assert not same or distances(of[RULES[0]]) == distances(of[RULES[1]])


def test_the_one_choice_that_changes_on_news_is_as_said():
    suite, row = "muse-news-small", "gd_tanh_tight"
    assert changed(suite) == [row]
    place = list(choices(suite)).index(row)
    usual, other = (means(suite, rule)[place] for rule in RULES)
    control = distances(choices(suite)["gd_lora_omega"][RULES[1]])
    own = paired_difference(distances(choices(suite)[row][RULES[1]]), control).summary
    for sentence in (
        f"its mean distance is {usual:.2f} with a Retrain and {other:.2f} without.",
        f"no difference is shown ({own.mean:.2f} [{own.low:.2f}, {own.high:.2f}])",
    ):
        assert sentence in prose(FINDINGS), f"findings should say: {sentence}"


def test_the_spread_of_the_digits_is_as_said():
    suite, said = "digits-random-tuned", prose(FINDINGS)
    floor = float(next(iter(choices(suite).values()))["retrain"]["floor"])
    for sentence in (
        f"`random_label` alone is {moved(suite, 'random_label')} farther",
        f"On digits {nearer_than(suite, 2)} of {len(choices(suite))} rows are within 2 points of "
        f"Retrain, and a second Retrain is at {floor:.2f}",
    ):
        assert sentence in said, f"findings should say: {sentence}"


def test_the_findings_say_what_the_choices_say():
    said = prose(FINDINGS)
    for suite, sentence in SENTENCES.items():
        worse, better = sides(suite)
        filled = sentence.format(
            rows=len(choices(suite)),
            moved=NUMBERS[len(changed(suite))],
            same_order=same_order(suite),
            rho=correlation(suite),
            farther=farther(suite),
            worse=NUMBERS[worse],
            better=NUMBERS[better],
        )
        assert filled in said, f"findings should say: {filled}"


def lines_of(suite: str, rule: str, report: dict) -> list[dict[str, str]]:
    """What a report says of every tuned row."""
    lines = []
    for row in report["rows"]:
        own = [trial for trial in report["tuning"]["sweep"] if trial["row"] == row["row"]]
        if not own:
            continue
        assert not row["diverged"] and report["complete"], (suite, row["row"])
        chosen = next(index for index, trial in enumerate(own) if trial["chosen"])
        setting = ", ".join(f"{key} {value:g}" for key, value in own[chosen]["params"].items())
        gaps = [math.inf if trial["gap"] is None else trial["gap"] for trial in own]
        seeds = sorted(row["ag_per_seed"], key=int)
        values = {
            "suite": suite, "row": row["row"], "select": rule, "trial": str(chosen),
            "setting": setting,
            "tuning_gaps": " ".join(f"{gap:.4f}" for gap in gaps), "seeds": " ".join(seeds),
            "distances": " ".join(f"{row['ag_per_seed'][seed]:.4f}" for seed in seeds),
            "floor": f"{report['floor']['mean']:.4f}",
        }  # fmt: skip
        lines.append(values)
    return sorted(lines, key=lambda line: line["row"])


def main() -> None:
    """Writes both files from the reports in the stores; keeps the lines of suites in none."""
    found: dict[tuple[str, str], dict] = {}
    for store in sys.argv[1:]:
        for path in sorted(Path(store).glob("suites/*/leaderboard.json")):
            suite = path.parent.name.partition("+")[0]
            if suite in SUITES:
                report = json.loads(path.read_text())
                found[suite, report["tuning"].get("select", "retrain")] = report
    old = {(suite, rule): choices(suite) for suite in SUITES for rule in RULES}
    with CHOICES.open("w", newline="") as file:
        writer = csv.DictWriter(file, HEADS, lineterminator="\n")
        writer.writeheader()
        for suite in SUITES:
            for rule in RULES:
                if (suite, rule) in found:
                    writer.writerows(lines_of(suite, rule, found[suite, rule]))
                else:
                    writer.writerows(of[rule] for of in old[suite, rule].values())
    choices.cache_clear()
    TABLES.write_text(text())


if __name__ == "__main__":
    main()
