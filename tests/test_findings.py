"""Numbers in the prose: each is computed again from the committed reports.

A claim is a sentence with holes, and what belongs into them.  The sentence as filled must stand in
the document, so that neither can change without the other.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from statistics import stdev

import numpy as np
import pytest
from scipy.stats import spearmanr

from stable_forgetting.benchmarks.report.section import Table
from stable_forgetting.benchmarks.report.shipped import RESULTS, read_board, read_report
from stable_forgetting.benchmarks.sharing import hiding, versus
from stable_forgetting.benchmarks.suite.suite import REFERENCES
from stable_forgetting.common.measure.gaps import paired_difference
from stable_forgetting.common.measure.ranking import rank_intervals
from stable_forgetting.common.measure.verdict import LEVEL, benjamini_hochberg

ROOT = Path(__file__).resolve().parents[1]
README, FINDINGS = "README.md", "docs/findings.md"
SINE, LORA, TIGHT, TIGHT_UL, SATURATING = versus.CLAIMS


@cache
def prose(document: str) -> str:
    """A document on one line, without marks of emphasis and the targets of links."""
    text = (ROOT / document).read_text(encoding="utf-8").replace("*", "")
    return re.sub(r"\s+", " ", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text))


@cache
def board(suite: str) -> dict[str, dict]:
    """Row -> what the committed table says of it."""
    return {row["row"]: row for row in read_board(RESULTS / suite)["rows"]}


def report(suite: str) -> str:
    return (RESULTS / suite / "LEADERBOARD.md").read_text(encoding="utf-8")


@cache
def tables(path: str) -> list[tuple[str, Table]]:
    """(title of the section, table) of a committed report."""
    found, title = [], ""
    for section in read_report((RESULTS / path).read_text(encoding="utf-8")):
        title = section.title or title
        if isinstance(section.content, Table):
            found.append((title, section.content))
    return found


def cell(path: str, title: str, row: str, head: str) -> float:
    """The number of one cell, without its spread."""
    for found, table in tables(path):
        if title in found and head in table.heads:
            for cells in table.rows:
                if cells[0].removesuffix(" (our reading)") == row:
                    return float(re.match(r"[<≥ ]*(-?[\d.]+)", cells[table.heads.index(head)])[1])
    raise LookupError(f"{path}: no {row} x {head} below {title}")


def distance(suite: str, row: str) -> float:
    return board(suite)[row]["derived"]["ag"]["mean"]


def methods(suite: str) -> list[dict]:
    """Rows of a table but for the references."""
    return [
        row for row in board(suite).values() if row["method"] not in REFERENCES and row["seeds"]
    ]


def words(suite: str) -> list[str]:
    return [row["verdict"]["word"] for row in methods(suite)]


def meetings(pair: tuple[str, str]) -> list[versus.Encounter]:
    return versus.meetings([pair], versus.read_boards([RESULTS])[0])


@cache
def readings(pair: tuple[str, str]) -> list[str]:
    return [met.reading for met in meetings(pair)]


def rank(suite: str, row: str) -> int:
    """Place by distance among the methods."""
    ordered = sorted(methods(suite), key=lambda each: each["derived"]["ag"]["mean"])
    return [each["row"] for each in ordered].index(row) + 1


def by_seed(suite: str, first: str, second: str) -> list[float]:
    """Differences of two rows by seed."""
    one, other = (board(suite)[row]["ag_per_seed"] for row in (first, second))
    return [one[seed] - other[seed] for seed in sorted(one, key=int)]


def interval(suite: str, first: str, second: str, digits: int = 1) -> str:
    """Mean difference of two rows and its 95 % CI, as the prose has it."""
    one, other = (board(suite)[row]["ag_per_seed"] for row in (first, second))
    seeds = sorted(one)
    own = paired_difference([one[s] for s in seeds], [other[s] for s in seeds]).summary
    return f"{own.mean:.{digits}f} [{own.low:.{digits}f}, {own.high:.{digits}f}]"


BOUND = "maps/digits-class-bound/MAP.md"
HEAD = "maps/digits-class-head/MAP.md"
SIZES, CLIPPED = (f"maps/digits-class-bound-{name}/MAP.md" for name in ("sizes", "clip"))
CLASSES = "maps/cifar100-class10-bound/MAP.md"
ELSEWHERE = ("cifar100-class10-bound", "cifar10-random-bound", "tofu-small-bound")
FORGOTTEN = ("RA where forgotten", "retain P where forgotten")
BALL = ("gd_ball", "gd_ul")
IN_TURN = "tofu-small-seq-3/LEADERBOARD.md"
ALL = "digits-all-class/LEADERBOARD.md"
TDEC, PILE = "tdec-small/LEADERBOARD.md", "pile PPL (first 20 rows) ↓"
DEEP = "tdec-90m/LEADERBOARD.md"
TRANSFER = "cifar10-transfer/LEADERBOARD.md"
ATTACKED = "digits-class-attack/LEADERBOARD.md"
RECITED = "tdec-small-attack/LEADERBOARD.md"
HUNDRED = "cifar100-class10-small-attack/LEADERBOARD.md"


CONTROLLED = tuple(met.suite for met in meetings(TIGHT_UL))
RELEARNT = ("digits-all-class", "cifar10-transfer-class", "cifar100-class10-small-attack",
            "cifar100-transfer-class10", "tofu-small-attack", "tdec-small-attack",
            "muse-news-small-attack")  # fmt: skip


def table_row(path: str, columns: int) -> list[str]:
    """The cells after the name, of the row of findings that names a report."""
    line = re.compile(rf"^\| \[[^]]+\]\(../benchmarks/results/{path}\) \| (.*) \|$", re.M)
    found = [text.split(" | ") for text in line.findall((ROOT / FINDINGS).read_text("utf-8"))]
    (own,) = (cells for cells in found if len(cells) == columns)
    return own


def shown(suite: str, *, reference: bool = False) -> list[dict]:
    """What rows show after the worst attack; of references, the second Retrain first."""
    rows = read_board(RESULTS / suite)["after_attack"]
    return [row for row in rows if row["reference"] == reference]


def forgetting(row: str, sweep: str) -> tuple[int, int]:
    """Runs of a sweep that forget at rate 1, and all of that rate."""
    (table,) = (found for title, found in tables(f"maps/{sweep}/MAP.md") if title in FORGOTTEN)
    (text,) = (cells[table.heads.index("1")] for cells in table.rows if cells[0] == row)
    found = re.search(r"\((\d+) of (\d+)\)", text)
    return (int(found[1]), int(found[2])) if found else (0, 6)


def spread(values: Iterable[float]) -> tuple[float, float]:
    """Least and largest."""
    own = sorted(values)
    return own[0], own[-1]


def tally() -> tuple[str, int, int, int, int, int, int]:
    """Tables, rows of equal utility; of these that look forgotten: all, hiding, all, below, rest.

    The rest lie above the second Retrain's mean, and their intervals hold it.
    """
    found = hiding.attacked(versus.read_boards([RESULTS])[0])
    equal = [own for own in found if own.equal]
    alike = [own for own in equal if own.before <= 2]
    hide = [own for own in alike if own.low is not None and own.low > own.floor]
    below = [own for own in alike if own.beyond <= 0]
    words = {8: "eight", 9: "nine", 10: "ten"}
    tables = words[len({own.suite for own in found})]
    rest = len(alike) - len(hide) - len(below)
    return tables, len(equal), len(alike), len(hide), len(alike), len(below), rest


def hiding_on_a_digit() -> tuple:
    """Rows of the table of one digit that look forgotten and hide, and such rows of all tables."""
    found = hiding.attacked(versus.read_boards([RESULTS])[0])
    alike = [own for own in found if own.equal and own.before <= 2]
    hide = [own.suite for own in alike if own.low is not None and own.low > own.floor]
    return {13: "Thirteen"}[hide.count("digits-class-attack")], len(hide)


def alike_and_hiding() -> tuple:
    """CIFAR-100: rows that no test tells from Retrain, their AG4, and steps until relearnt."""
    suite = board("cifar100-class10-small-attack")
    near = [row for row in methods("cifar100-class10-small-attack")
            if row["verdict"]["word"] == "undecided"]  # fmt: skip
    means = sorted(row["derived"]["ag"]["mean"] for row in near)
    steps = sorted(cell(HUNDRED, "relearn:", row["row"], "steps") for row in near)
    whole = cell(HUNDRED, "relearn:", "retrain", "steps")
    assert len(near) == 5 and steps[-1] == whole == cell(HUNDRED, "relearn:", "gd", "steps")
    floor = suite["retrain (second)"]["derived"]["ag"]["mean"]
    shown = (f"{value:.2f}" for value in (means[0], means[-1], floor))
    return *shown, steps[0], steps[-2], whole


NEAR_ON_A_CLASS = ("gd_ball", "gd_ul", "gd_ul_tanh_tight", "gd_ul_omega")


def named_between(row: str) -> tuple[str, str]:
    """The ends of what block 2 names of the forgotten class after a pretraining."""
    path, head = "cifar10-transfer-class/LEADERBOARD.md", "block 2 forget"
    (table,) = (found for title, found in tables(path) if title.startswith("logit_lens"))
    (text,) = (cells[table.heads.index(head)] for cells in table.rows if cells[0] == row)
    low, high = re.search(r"\[([\d.]+), ([\d.]+)\]", text).groups()
    return low, high


def a_class() -> tuple:
    """After a pretraining: rows not shown to differ, all rows; relearning; the ball's block 2."""
    suite = "cifar10-transfer-class"
    path, rows = f"{suite}/LEADERBOARD.md", methods(suite)
    undecided = {row["row"] for row in rows if row["verdict"]["word"] == "undecided"}
    assert undecided == set(NEAR_ON_A_CLASS)

    def steps(row: str) -> float:
        return cell(path, "relearn:", row, "steps")

    def named(row: str) -> float:
        return cell(path, "logit_lens", row, "block 2 forget")

    sooner = sorted(row for row in NEAR_ON_A_CLASS if steps(row) < steps("retrain"))
    assert sooner == ["gd_ul", "gd_ul_omega", "gd_ul_tanh_tight"]
    count = {4: "four"}[len(undecided)]
    return (
        *(count, len(rows)),
        *(*spread(map(steps, sooner)), steps("retrain"), steps("gd_ball")),
        *(named("gd_ball"), *named_between("gd_ball"), named("retrain")),
    )


def a_random_tenth() -> tuple:
    """CIFAR-10 after a pretraining, under attack."""
    rows = {row["label"]: row for row in shown("cifar10-transfer")}
    kept = [name for name, row in rows.items() if row["equal_utility"]]
    known = {name: cell(TRANSFER, "", name, "FA →") for name in (*rows, "retrain")}
    assert len(rows) == 15
    return {6: "six"}[len(kept)], *spread(known[name] for name in kept), known["retrain"]


def brackets() -> tuple[float, int, float]:
    """Places that ranks span after a pretraining: as shown, of how many, and from seeds alone."""
    rows = methods("cifar10-transfer")
    table = next(own for _, own in tables(TRANSFER) if "rank" in own.heads)
    found = {cells[0]: cells[table.heads.index("rank")].partition("[")[2] for cells in table.rows}
    ends = [tuple(map(int, re.findall(r"\d+", found[row["row"]]))) for row in rows]
    values = np.array([[*row["ag_per_seed"].values()] for row in rows])
    low, high = rank_intervals(values)
    both = [sum(top - first + 1 for first, top in ends) / len(rows), (high - low + 1).mean()]
    return both[0], len(rows), both[1]


def one_digit() -> tuple:
    """Steps that the nearest row and Retrain take."""
    assert rank("digits-all-class", "fast_ntk") == 1 and rank("digits-all-class", "gd_lora") <= 10
    return tuple(cell(ALL, "relearn", row, "steps") for row in ("fast_ntk", "retrain"))


def a_tenth_of_digits() -> tuple[str, str]:
    """Rows of equal utility at or below the second Retrain under attack, and all of them."""
    found = hiding.attacked(versus.read_boards([RESULTS])[0])
    equal = [own for own in found if own.suite == "digits-random-attack" and own.equal]
    words = {8: "eight", 12: "twelve"}
    return words[sum(own.beyond <= 0 for own in equal)], words[len(equal)]


TWINS = "twins/digits-class.md"


def failed_retrains() -> tuple[int, int]:
    """TDEC: Retrains that fail our rule of over-forgetting, and seeds."""
    with (RESULTS / "tdec-small-attack" / "runs.csv").open(encoding="utf-8") as lines:
        runs = [run for run in csv.DictReader(lines) if run["replicate"] == "0"]
    unseen = {r["seed"]: float(r["unseen_ma"]) for r in runs if r["row"] == "original"}
    own = {r["seed"]: float(r["forget_ma"]) for r in runs if r["row"] == "retrain"}
    return sum(own[seed] <= 0.75 * unseen[seed] for seed in own), len(own)


def twin(audit: str, row: str, head: str) -> str:
    """One cell of the tables of twins, as printed."""
    (table,) = (table for title, table in tables(TWINS) if title.startswith(audit))
    return next(cells[table.heads.index(head)] for cells in table.rows if cells[0] == row)


def test_rounding_moves_one_row_alone():
    (table,) = (table for title, table in tables(TWINS) if title.startswith("rounding"))
    moved = {row[0] for row in table.rows if any(cell != "0 [0, 0]" for cell in row[1:])}
    assert moved == {"finetune"} and f"In {len(table.rows) - 1} other rows" in prose(FINDINGS)
    text = (RESULTS / TWINS).read_text(encoding="utf-8")
    assert "rounding moves it more" not in text, "no row is marked"


def acting() -> tuple:
    """Where sine's bound acts at rate 1 with a frozen head, and what the worst setting keeps."""
    shares = []
    for path in RESULTS.glob("maps/*/MAP.md"):
        sweep = str(path.relative_to(RESULTS))
        for title, table in tables(sweep) if sweep != HEAD else ():
            if title == "Where the bound acts" and "1" in table.heads:
                found = (row[table.heads.index("1")] for row in table.rows if row[0] == "gd_sine")
                shares += [int(text.split()[0]) for text in found if text]
    assert len(shares) >= 8
    kept = (cell(CLASSES, "", row, "worst RA") for row in ("gd_sine", "gd_lora_omega"))
    return *spread(shares), *kept


def of_that_size() -> tuple:
    """One digit, one seed: the share that other bounds accept, and what clipped factors keep."""
    rows = ("delora", "tanh_absolute_0.02", "tanh_c1", "sine_c1")
    delora, paper, ours, sine = (cell(SIZES, "", row, "accepted %") for row in rows)
    clipped = ("gd_weight_clip", "weight_clip_0.5", "weight_clip_0.1")
    shares, kept = (
        (
            *spread(cell(CLIPPED, "", row, head) for row in clipped),
            cell(CLIPPED, "", "gd_lora", head),
        )
        for head in ("accepted %", "median RA")
    )
    found = (delora, paper, ours, cell(CLIPPED, "", "clip_tight", "accepted %"), sine)
    return tuple(f"{value:.0f}" for value in (*found, *shares, *kept))


def ceilings() -> tuple:
    """Original's ceiling in nats: on digits, its ends on CIFAR and TOFU, and Gemma's."""
    found: dict[str, list[float]] = {"digits": [], "gemma": [], "cifar": [], "tofu": []}
    for path in RESULTS.glob("*/LEADERBOARD.md"):
        kind = next((name for name in found if name in path.parent.name), None)
        if kind and "CE ceiling" in path.read_text(encoding="utf-8"):
            own = str(path.relative_to(RESULTS))
            found[kind].append(cell(own, "", "original", "CE ceiling →"))
    digits = cell("digits-class/LEADERBOARD.md", "", "original", "CE ceiling →")
    ends = (f"{end:.0f}" for kind in ("cifar", "tofu") for end in spread(found[kind]))
    return f"{digits:.1f}", *ends, f"{found['gemma'][0]:,.0f}"


def on_published_text() -> tuple:
    """Gemma at the paper's rate: the forget loss of sine and its control, and what held it."""
    path, rows = "tofu-gemma/LEADERBOARD.md", ("gd_sine_literal", "gd_lora_omega_literal")
    losses = (f"{cell(path, 'Further', row, 'forget loss →'):,.0f}" for row in rows)
    shares = (f"{cell(path, '', row, 'of ceiling →'):.0f}" for row in rows)
    arguments = (cell(path, "bound act", row, "max |arg|") for row in rows)
    active = cell(path, "bound act", rows[0], "bound active")
    text = (RESULTS / "tofu-gemma/runs.csv").read_text(encoding="utf-8")
    runs = list(csv.DictReader(text.splitlines()))
    kept = (f"{float(r['retain_prob']):.0f}" for row in rows for r in runs if r["row"] == row)
    shown = (f"{value:.2f}".removeprefix("0") for value in arguments)
    return *losses, *shares, *shown, f"{active:.1f}", *kept


def accepted(row: str) -> str:
    return f"{cell(BOUND, '', row, 'accepted %'):.0f}"


def js(path: str, row: str) -> str:
    """Mean JS divergence on forget; a table of an older form has it among the attacks."""
    try:
        value = cell(path, "", row, "JS_f ↓")
    except LookupError:
        value = cell(path, "js:", row, "forget")
    return f"{value:.3f}".lstrip("0")


def per_image_from_scratch() -> tuple:
    """Mean JS divergence to Retrain of five rows: two below the floor, the floor, two above it."""
    near, far = ("random_label", "finetune"), ("gd_ul_tanh_tight", "gd_ul")  # the two nearest
    path = "cifar10-small-all/LEADERBOARD.md"
    found = [cell(path, "", row, "JS_f ↓") for row in (*near, "retrain (second)", *far)]
    assert max(found[:2]) < found[2] < min(found[3:])
    rows = sorted(methods("cifar10-small-all"), key=lambda row: row["derived"]["ag"]["mean"])
    assert [row["row"] for row in rows[:2]] == [*reversed(far)]
    return tuple(f"{value:.3f}".lstrip("0") for value in found)


def reordered_news() -> tuple:
    """MUSE: places of LoRA and sine by its own columns and by those that may rank."""
    suite = "muse-news-small"
    own = {row["row"]: row["derived"]["ag4"]["mean"] for row in methods(suite)}
    before = {row: 1 + sum(other < value - 1e-6 for other in own.values())
              for row, value in own.items()}  # fmt: skip
    now = {row: cell(f"{suite}/LEADERBOARD.md", "", row, "rank") for row in own}
    assert before["gd_sine"] == before["gd_lora_omega"] and now["gd_sine"] == now["gd_lora_omega"]
    places = (before["gd_lora"], len(own), now["gd_lora"], before["gd_sine"], now["gd_sine"])
    return tuple(int(place) for place in places)


def known_news() -> tuple:
    """MUSE: what sine and Retrain recite and know, and the places of what hardly forgets."""
    suite = "muse-news-small"
    said = [
        f"{cell(f'{suite}/LEADERBOARD.md', '', row, head):.0f}"
        for head in ("VerbMem →", "forget acc →")
        for row in ("gd_sine", "retrain")
    ]
    return (*said, rank(suite, "flat"), rank(suite, "task_vector"))


def test_the_nearest_rows_of_random_tenths_are_per_image_as_said():
    larger, smaller = [], []
    for suite in ("cifar10-transfer", "cifar10-transfer-ten", "cifar10-transfer-vit-s",
                  "cifar10-imagenet"):  # fmt: skip
        nearest = min(methods(suite), key=lambda row: row["derived"]["ag"]["mean"])["row"]
        js, changed = (
            [cell(f"{suite}/LEADERBOARD.md", "", row, head) for row in (nearest, "original")]
            for head in ("JS_f ↓", "changed_f ↓")
        )
        assert changed[0] > changed[1]
        (larger if js[0] > js[1] else smaller).append(js)
    (pair,) = smaller
    told = f"{({3: 'three'})[len(larger)]} of the four tables and smaller on the fourth"
    assert f"larger on {told} ({pair[0]:.3f} and {pair[1]:.3f})".replace("0.", ".") in prose(
        FINDINGS
    )


def test_without_mia_the_order_of_classes_stays():
    of_classes = [
        path.parent.name
        for path in RESULTS.glob("*/LEADERBOARD.md")
        if "Order without MIA" in path.read_text(encoding="utf-8")
    ]
    for suite in of_classes:
        assert re.search(r"^Order without MIA[^:]*: every row has a place", report(suite), re.M)
    others = {9: "nine", 10: "ten"}[len(of_classes) - 1]
    assert f"every row of this table and of {others} others on classes has a place" in prose(
        FINDINGS
    )


def scrubbed() -> tuple:
    """Where SCRUB's bound acts, over how many seeds, and what its rates cost of RA."""
    suites = ("cifar10-small-all", "cifar100-class10-small-all")
    assert "no difference shown" in next(
        line
        for line in (RESULTS / suites[0] / "LEADERBOARD.md").read_text("utf-8").splitlines()
        if line.startswith("- AG4 of scrub_sine")
    )
    paths = [f"{suite}/LEADERBOARD.md" for suite in suites]
    active = [cell(path, "bound act", "scrub_sine", "bound active") for path in paths]
    seeds = [len(board(suite)["scrub_sine"]["seeds"]) for suite in suites]
    costs = [-cell(path, "Signed gaps", "scrub_sine", "RA gap") for path in paths]
    return active[0], seeds[0], active[1], seeds[1], *costs


def on_authors() -> tuple:
    """GS-LoRA's place, and the distances of the first row and of a second Retrain."""
    own = board("authors-new")
    assert rank("authors-new", "latent_adversarial") == rank("digits-new-class", "gs_lora") == 1
    marks = {*words("authors-new"), *words("digits-new-class")}
    assert marks == {"different", "undecided"}, "no row is indistinguishable"
    place = {37: "thirty-seventh"}[own["gs_lora"]["rank"]["rank"]]
    near = ("latent_adversarial", "retrain (second)")
    return place, *(f"{distance('authors-new', row):.2f}" for row in near)


def changed(path: str, row: str) -> str:
    """Percent of the forgotten images; a table of an older form has it below."""
    try:
        return f"{cell(path, '', row, 'changed_f ↓'):.0f}"
    except LookupError:
        return f"{cell(path, 'disagreement', row, 'forget'):.0f}"


def steps(row: str) -> str:
    """Steps until the forgotten is known again, with their interval."""
    (table,) = (table for title, table in tables(ATTACKED) if title.startswith("relearn:"))
    return next(cells[1] for cells in table.rows if cells[0] == row)


def diverged(*rows: str) -> int:
    """Cells of the sweep with one head rate that passed the limit: of these rows, or of all."""
    table = next(table for title, table in tables(HEAD) if "Diverged" in title)
    cells = [text for row in table.rows for text in row[1:] if row[0] in (rows or {row[0]})]
    return sum(int(text.split(" of ")[0]) for text in cells if " of " in text)


def from_scratch_on_classes() -> tuple:
    """The undecided rows, distances of some, and how soon each is relearnt."""
    suite = "cifar100-class10-small-all"
    near = [row["row"] for row in methods(suite) if row["verdict"]["word"] == "undecided"]
    saturating = ("gd_ul", "gd_ul_omega", "gd_ul_tanh_tight", "gd_ball")
    four = [distance(suite, row) for row in saturating]
    (both,) = {round(distance(suite, row), 2) for row in ("cf_k", "fisher")}
    taken = {row: cell(f"{suite}/LEADERBOARD.md", "relearn:", row, "steps") for row in near}
    never = {taken.pop(row) for row in ("cf_k", "eu_k", "gd", "neg_grad_plus")}
    assert never == {cell(f"{suite}/LEADERBOARD.md", "relearn:", "retrain", "steps")}
    fisher = taken.pop("fisher")
    assert len(taken) == 7 and set(saturating) <= set(near)
    floor = distance(suite, "retrain (second)")
    count = {12: "twelve"}[len(near)]
    ends = min(taken.values()), max(taken.values())
    return (count, len(methods(suite)), min(four), max(four), both, floor, fisher, *ends)


def trials_on_one_seed() -> tuple[int, int]:
    """Tables whose rows had four or eight trials on one tuning seed, and all tuned tables."""
    boards = [json.loads(path.read_text("utf-8")) for path in RESULTS.glob("*/leaderboard.json")]
    tuned = [own["tuning"] for own in boards if own.get("tuning")]
    one = [own for own in tuned if len(own["seeds"]) == 1]
    assert {own["trials_per_row"] for own in one} == {4, 8}
    return len(one), len(tuned)


def close_choices() -> tuple[int, int, int]:
    """Tuned tables, their close choices, and all: an attack repeats the choices of its table."""
    counted = []
    for file in RESULTS.glob("*/leaderboard.json"):
        trials = (read_board(file.parent).get("tuning") or {}).get("sweep") or []
        if file.parent.name.endswith("-attack") or not trials:
            continue
        gaps = {trial["row"]: [] for trial in trials}
        for trial in trials:
            gaps[trial["row"]].append(math.inf if trial["gap"] is None else trial["gap"])
        rows = board(file.parent.name)
        for row, (best, second, *_) in ((row, sorted(own)) for row, own in gaps.items()):
            over_seeds = list(rows[row]["ag_per_seed"].values())
            close = len(over_seeds) > 1 and second - best < stdev(over_seeds)
            counted.append((file, close))
    return len({file for file, _ in counted}), sum(close for _, close in counted), len(counted)


CLAIMS: list[tuple[str, str, Callable[[], tuple]]] = [
    (FINDINGS, "it is above 10,000 nats in {} of 100 cells, bounded or not (sweep, n = 5). "
               "The other {} are sine at the highest rate",
     lambda: (diverged(), {4: "four"}[10 - diverged("gd_sine")])),
    (FINDINGS, "the median retain accuracy is {} % at rate .01 and {} % at rate 1 with the tight "
               "tanh, {} % and {} % with sine, {} % and {} % with its control, {} % and {} % with "
               "LoRA.",
     lambda: tuple(f"{cell(HEAD, 'RA where forgotten', row, rate):.1f}"
                   for row in ("gd_tanh_tight", "gd_sine", "gd_lora_omega", "gd_lora")
                   for rate in ("0.01", "1"))),
    (FINDINGS, "By ascent alone it is {:.0f} to {:.0f} % in every row, which is chance.",
     lambda: spread(cell(HEAD, "RA where forgotten", f"ascent_{name}", rate)
                    for name in ("lora", "lora_omega", "sine", "tanh", "tanh_tight")
                    for rate in ("0.01", "1"))),
    (FINDINGS, "In {} of {} tables the two are equal to two decimals.",
     lambda: (readings(SINE).count("same"), len(readings(SINE)))),
    (FINDINGS, "In the other {} no difference is shown",
     lambda: (readings(SINE).count("not apart"),)),
    (FINDINGS, "the widest interval is [{}, {}])",
     lambda: tuple(f"{end:.2f}" for end in max(
         ((met.difference.summary.low, met.difference.summary.high)
          for met in meetings(SINE)),
         key=lambda ends: ends[1] - ends[0]))),
    (FINDINGS, "Sine is nearer to Retrain than LoRA in {} of the {} tables. LoRA is nearer in {}",
     lambda: (readings(LORA).count("nearer"), len(readings(LORA)),
              readings(LORA).count("farther"))),
    (FINDINGS, "its AG4 less its control's is {}, {}, {}, {} and {} by seed",
     lambda: tuple(f"{d:.1f}" for d in
                   by_seed("digits-class", "gd_lora_literal", "gd_lora_omega_literal"))),
    (FINDINGS, "accepts {} % of the settings, its control {} %",
     lambda: (accepted("tanh_c1"), accepted("gd_lora_omega"))),
    (FINDINGS, "At a tuned rate there is no general gain. By ascent no difference is shown in {} "
               "of {} tables with Holm. In the fifteenth, MUSE, the tight tanh is farther than its "
               "control (+{}).",
     lambda: ({14: "fourteen"}[sum(map(readings(TIGHT).count, ("same", "not apart")))],
              {15: "fifteen"}[len(readings(TIGHT))], interval("muse-news-small", *TIGHT, 2))),
    (FINDINGS, "With the saturating loss {} tables have the control with the same omega, "
               "`gd_ul_omega` (n = {} or {}). No difference is shown (Holm).",
     lambda: ({10: "ten"}[readings(TIGHT_UL).count("not apart")],
              *sorted({len(board(suite)["gd_ul_omega"]["ag_per_seed"])
                       for suite in CONTROLLED}))),
    (FINDINGS, "The tight tanh is nearer in {} of {} and farther in {}.",
     lambda: ({3: "three"}[readings(SATURATING).count("nearer")],
              {19: "nineteen"}[len(readings(SATURATING))],
              {3: "three"}[readings(SATURATING).count("farther")])),
    (FINDINGS, "LoRA is nearer with four trials on one tuning seed (by {}, n = 5). With twelve "
               "trials on each of three sine is nearer (by {}, n = 10), and so is its control",
     lambda: (interval("cifar10-transfer", *LORA, 2),
              interval("cifar10-transfer-ten", *reversed(LORA), 2))),
    (FINDINGS, "the tight tanh is farther than LoRA (+{}, n = 10).",
     lambda: (interval("cifar10-transfer-ten", *SATURATING, 2),)),
    (FINDINGS, "In the smaller one the control is nearer than LoRA too ({:.1f}; {}), so",
     lambda: (distance("cifar10-transfer", "gd_ul_omega"),
              interval("cifar10-transfer", "gd_ul_omega", "gd_ul"))),
    (FINDINGS, "the mean bracket spans {:.1f} of {} places, and {:.1f} from seeds alone.",
     brackets),
    (FINDINGS, "In {} tables {} of {} choices were close:", close_choices),
    (FINDINGS, "{} of {} tuned tables have four or eight trials on one seed", trials_on_one_seed),
    (FINDINGS, "at rate 1, sine acts in {} to {} % of the entries. On CIFAR-100 the worst setting "
               "then keeps {} % of retain accuracy with sine and {} % with its control.", acting),
    (README, "(in two SCRUB rows in {:.0f} %)", lambda: scrubbed()[:1]),
    (FINDINGS, "DeLoRA, which was published before, accepts {} % of this grid, the paper's tanh "
               "with a smaller alpha {} %, our tanh {} %, a clamp {} %. Sine with our constant "
               "gains least ({} %), because it turns back. Clipping A and B, as the paper does, "
               "accepts {} to {} % (LoRA {} %), and the median setting keeps {} to {} % of retain "
               "accuracy (LoRA {} %).", of_that_size),
    (FINDINGS, "({} nats on digits, {} to {} on CIFAR, {} to {} on TOFU's text, where the head is "
               "tied; {} with Gemma's published weights)", ceilings),
    (FINDINGS, "take the forget loss to {} nats with sine and {} with its control, {} and {} % of "
               "that ceiling (table, n = 3). The largest argument is {} and {}, and the bound is "
               "active in {} % of the entries. No difference in distance is shown (p .20). "
               "Retained answers keep a probability of {}, {} and {} % by seed with sine, of {}, "
               "{} and {} % with its control.", on_published_text),
    (README, "On Gemma 3 (n = 3) 500 steps at the paper's TOFU rate bring {} nats of forget loss "
             "with sine, {} without.", lambda: on_published_text()[:2]),
    (FINDINGS, "but the ball with this loss is at {:.1f}.",
     lambda: (distance("cifar10-small-all", "gd_ball"),)),
    (FINDINGS, "the tight tanh is relearnt in {} steps {}, its control in {} {}, LoRA in {} {} and "
               "Retrain in {} {}.",
     lambda: tuple(part for row in ("gd_tanh_tight", "gd_lora_omega", "gd_lora", "retrain")
                   for part in steps(row).split(" ", 1))),
    (FINDINGS, "sine says {} % of the forgotten tokens after the first of two blocks, its control "
               "{} %, Retrain {} %; at the end of the model both say {:.1f} %.",
     lambda: (*(cell(RECITED, "logit_lens", row, "block 1 forget")
                for row in ("gd_sine", "gd_lora_omega", "retrain")),
              *{cell(RECITED, "", row, "MA ↓") for row in ("gd_sine", "gd_lora_omega")})),
    (FINDINGS, "change its forget accuracy by {} points {} and {} % of its answers on forget.",
     lambda: (*twin("rounding", "finetune", "FA").split(" ", 1),
              twin("rounding", "finetune", "answers").split()[0])),
    (FINDINGS, "{} of fifteen rows keep as much as Retrain, but answer {:.1f} to {:.1f} % of the "
               "forgotten images, Retrain {:.1f} %.", a_random_tenth),
    (FINDINGS, "(AG4 {} and {}; Original {})",
     lambda: (f"{distance('digits-random', 'gd_ul'):.0f}",
              f"{distance('digits-random', 'gd_ball'):.0f}",
              f"{distance('digits-random', 'original'):.1f}")),
    (FINDINGS, "the saturating loss comes nearest, with the tight tanh and through LoRA (AG4 {} "
               "and {}, a second Retrain {})",
     lambda: tuple(f"{distance('cifar10-small-all', row):.1f}"
                   for row in ("gd_ul_tanh_tight", "gd_ul", "retrain (second)"))),
    (FINDINGS, "Per image the means of random labels (JS divergence {}) and fine-tuning ({}) are "
               "below a second Retrain's ({}), those of these two above it ({} and {}).",
     per_image_from_scratch),
    (FINDINGS, "Every row differs from Retrain on a random tenth after a pretraining "
               "({} rows, n = 5), on TOFU ({} rows",
     lambda: (words("cifar10-transfer").count("different"),
              words("tofu-small").count("different"))),
    (FINDINGS, "and on MUSE ({} rows)", lambda: (words("muse-news-small").count("different"),)),
    (FINDINGS, "{} of {} rows are not shown to differ from Retrain, nor to equal it. Four of them "
               "have this loss ({:.2f} to {:.2f}; CF-k and Fisher {:.2f}, a second Retrain "
               "{:.2f}). Relearning tells them apart: CF-k, EU-k, `gd` and NegGrad+ are not "
               "relearnt in 60 steps, as Retrain, Fisher is in {}, and the other seven in {} "
               "to {}.",
     from_scratch_on_classes),
    (FINDINGS, "sine is nearer on all linear layers than on the MLP ({}, p .004 after Holm), and "
               "so is its control. LoRA is not (+{}).",
     lambda: (interval("tofu-small-placement", "sine all", "sine mlp", 2),
              interval("tofu-small-placement", "lora all", "lora mlp", 2))),
    (FINDINGS, "Sine keeps {:.1f} % of the retained probability, Retrain {:.1f} %.",
     lambda: tuple(cell(IN_TURN, "", row, "retain P →") for row in ("gd_sine", "retrain"))),
    (FINDINGS, "The saturating loss is at {}, a second Retrain at {}, Original at {}; the means",
     lambda: tuple(f"{distance('tofu-small-seq-3', row):.2f}"
                   for row in ("gd_ul", "retrain (second)", "original"))),
    (FINDINGS, "meets both thresholds and keeps {} % of the retained training texts",
     lambda: (cell(TDEC, "tdec-small", "ihl_lora", "retain acc ↑"),)),
    (FINDINGS, "Pile rises from {} to {} with it",
     lambda: (f"{cell(TDEC, 'tdec-small', 'original', PILE):,.0f}",
              f"{cell(TDEC, 'tdec-small', 'ihl_lora', PILE) // 1000 * 1000:,.0f}")),
    (FINDINGS, "sine and its control are not apart either ({}; the largest argument is {}). "
               "They reach both thresholds on {:.0f} and {:.0f} seeds of 3. Plain gradient "
               "difference does on {:.0f}, and keeps {} % of the retained texts.",
     lambda: (interval("tdec-90m", "gd_sine", "gd_lora_omega"),
              f"{cell(DEEP, 'bound act', 'gd_sine', 'max |arg|'):.3f}".removeprefix("0"),
              *(cell(DEEP, "tdec-90m", row, "reached")
                for row in ("gd_sine", "gd_lora_omega", "gd")),
              cell(DEEP, "tdec-90m", "gd", "retain acc ↑"))),
    (FINDINGS, "a second Retrain shows {:.1f} points. TDEC's rule of over-forgetting fails a "
               "Retrain on {} of {} seeds",
     lambda: (shown("muse-news-small-attack", reference=True)[0]["after"]["mean"],
              *failed_retrains())),
    (FINDINGS, "{} of {} rows show no more than a second Retrain under attack", a_tenth_of_digits),
    (FINDINGS, "{} of {} rows are not shown to differ from Retrain by AG4",
     lambda: (words("digits-all-class").count("undecided"), len(methods("digits-all-class")))),
    (FINDINGS, "answers otherwise than Retrain on {} % of the forgotten images, "
               "a second Retrain on {} %",
     lambda: (changed(ALL, "gd_lora"), changed(ALL, "retrain (second)"))),
    (FINDINGS, "The best (Fast-NTK, {}) relearns the digit in {} steps, Retrain in {}.",
     lambda: (f"{distance('digits-all-class', 'fast_ntk'):.2f}", *one_digit())),
    (FINDINGS, "By distance GS-LoRA is the nearest on the digit and {} on the authors, where "
               "latent adversarial training is the nearest ({}, a second Retrain {}).", on_authors),
    (FINDINGS, "SCRUB through sine acts in {:.0f} % of the entries on CIFAR-10 (n = {}) and in "
               "{:.0f} % on CIFAR-100 (n = {}). Its rates cost {:.0f} and {:.0f} % of the retained "
               "images.",
     scrubbed),
    (README, "In {} attacked tables {} rows keep as much as Retrain. {} of them look forgotten "
             "(within 2 points). Under the worst attack {} of these {} show more than a "
             "second Retrain (95 % CI above its mean), {} no more, {} are open.",
     lambda: tally()),
    (FINDINGS, "In none of {} tables a difference between sine and its control",
     lambda: (len(readings(SINE)) if not {"nearer", "farther"} & set(readings(SINE)) else 0,)),
    (FINDINGS, "Often not: {} of the {} rows that look forgotten show more than a second Retrain "
               "under attack", lambda: (tally()[3], tally()[2])),
    (FINDINGS, "In {} attacked tables {} of the {} rows that look forgotten and keep as much as "
               "Retrain show more than a second Retrain under attack (95 % CI above its mean, "
               "taken as exact), {} show no more, and {} are open.",
     lambda: (tally()[0], tally()[3], tally()[2], *tally()[5:])),
    (README, "Four of them are relearnt in {} to {} steps, Retrain not in {:.0f}.",
     lambda: alike_and_hiding()[3:]),
    (FINDINGS, "five rows are not shown to differ by AG4 ({} to {}, a second Retrain {}). Four of "
               "them are relearnt in {} to {} steps, Retrain not in {:.0f}.", alike_and_hiding),
    (FINDINGS, "{} of {} rows, all with the saturating loss, are not shown to differ from Retrain. "
               "Three of them are relearnt in {} to {} steps, Retrain in {}. The ball takes {}, "
               "but after the second of four blocks it still names {:.1f} % of the forgotten "
               "images [{}, {}], Retrain {:.1f} %.", a_class),
    (FINDINGS, "{} of the {} are rows of one table, of one digit.", hiding_on_a_digit),
    (FINDINGS, "LoRA moved from place {} of {} to {}, sine and its control from {} to {}.",
     reordered_news),
    (FINDINGS, "By VerbMem these two look nearly forgotten ({} %, Retrain {} %), but they know {} "
               "% of the forgotten tokens (Retrain {} %). FLAT and the task vector, "
               "which hardly forget, are {} and {}",
     known_news),
    (README, "`gd_lora` answers otherwise than Retrain on {} % of the forgotten images, a second "
             "Retrain on {} %.",
     lambda: tuple(cell("digits-class/LEADERBOARD.md", "", row, "changed_f ↓")
                   for row in ("gd_lora", "retrain (second)"))),
    (README, "On one digit {} of {} methods are not shown to differ",
     lambda: (words("digits-all-class").count("undecided"), len(methods("digits-all-class")))),
    (README, "{} tables, from about seventeen settings, hold sine and its unbounded control. The "
             "two are equal to two decimals in {} tables and different in {}.",
     lambda: (len(readings(SINE)), readings(SINE).count("same"),
              "none" if not {"nearer", "farther"} & set(readings(SINE)) else "some")),
    (README, "a loss that saturates, the worst setting keeps {} % of retain accuracy, without the "
             "bound {} %",
     lambda: (cell(CLASSES, "", "ul_tanh_c1", "worst RA"),
              cell(CLASSES, "", "gd_ul_omega", "worst RA"))),
    (README, "At that rate {} of {} bounded runs forget (FA <= 5), without a bound {}.",
     lambda: (*forgetting("ul_tanh_c1", "cifar100-class10-bound"),
              forgetting("gd_ul_omega", "cifar100-class10-bound")[0])),
    (FINDINGS, "the bounded row forgets in {} of {} runs on any of the three; without the bound "
               "{}, {} and {} forget.",
     lambda: ({0: "none"}[max(forgetting("ul_tanh_c1", sweep)[0] for sweep in ELSEWHERE)], 6,
              *(forgetting("gd_ul_omega", sweep)[0] for sweep in ELSEWHERE))),
    (FINDINGS, "With the same loss (`gd_ul`) the ball is nearer in {} of {} tables and farther in "
               "{} (Holm).",
     lambda: (readings(BALL).count("nearer"), len(readings(BALL)),
              readings(BALL).count("farther"))),
    (README, "The nearest one relearns the digit in {} steps, Retrain in {}.",
     one_digit),
]  # fmt: skip


@pytest.mark.parametrize(
    ("document", "sentence", "values"), CLAIMS, ids=[claim[1][:60] for claim in CLAIMS]
)
def test_a_number_in_the_prose_is_that_of_the_reports(document, sentence, values):
    filled = sentence.format(*values())
    assert filled in prose(document), f"{document} should say: {filled}"


HEADLINES = ("cifar10-transfer", "cifar10-transfer-class", "cifar10-transfer-vit-s",
             "cifar100-transfer-class10", "cifar10-imagenet", "cifar10-imagenet-class",
             "tofu-transfer", "tofu-gemma")  # fmt: skip


@pytest.mark.parametrize("suite", HEADLINES)
def test_the_table_of_larger_models_is_that_of_the_reports(suite):
    path = f"{suite}/LEADERBOARD.md"
    rows = sorted(methods(suite), key=lambda row: row["derived"]["ag"]["mean"])
    head = next(head for head in tables(path)[0][1].heads if str(head).startswith("AG"))
    others = ("gd_lora", "original", "retrain (second)", rows[0]["row"])
    values = [f"{cell(path, '', row, head):.2f}" for row in ("gd_sine", "gd_lora_omega", *others)]
    values.insert(2, f"{cell(path, 'bound act', 'gd_sine', 'max |arg|'):.3f}".removeprefix("0"))
    seeds = len(rows[0]["ag_per_seed"])
    values[-1] = f"`{rows[0]['row']}` {values[-1]}"
    assert table_row(path, 8) == [str(seeds), *values]
    met = meetings(SINE)
    assert next(own.reading for own in met if own.suite == suite) in ("same", "not apart")


@pytest.mark.parametrize("suite", CONTROLLED)
def test_the_tight_bound_beside_its_control_is_as_in_the_reports(suite):
    mean, *_ = (between := interval(suite, *TIGHT_UL, 2)).split()
    signed = between if mean.startswith("-") else f"+{between}"
    means = [f"{distance(suite, row):.2f}" for row in TIGHT_UL]
    assert table_row(f"{suite}/LEADERBOARD.md", 3) == [*means, signed]


@pytest.mark.parametrize("suite", RELEARNT)
def test_the_steps_of_relearning_are_those_of_the_reports(suite):
    path = f"{suite}/LEADERBOARD.md"
    said = table_row(path, 6)
    rows = ["gd_lora", "gd_sine", "gd_ul", "gd_ul_tanh_tight", "gd_ball", "retrain"]
    if said[4] == "–":
        assert "gd_ball" not in board(suite)
        del said[4], rows[4]
    told = [float(cells.split()[0]) for cells in said]
    assert told == [cell(path, "relearn:", row, "steps") for row in rows]
    assert cell(path, "relearn:", "gd_lora_omega", "steps") == told[1]
    assert {len(board(suite)[row]["ag_per_seed"]) for row in rows[:-1]} == {5}


def test_the_ranks_on_another_architecture_are_as_said():
    both = [
        {row["row"]: round(distance(suite, row["row"]), 2) for row in methods(suite)}
        for suite in ("tofu-small", "tofu-small-llama")
    ]
    rows = [row for row in both[1] if row in both[0]]

    def correlation(rows: list[str]) -> str:
        found = spearmanr(*([own[row] for row in rows] for own in both)).statistic
        return f"{found:.2f}".removeprefix("0")

    rest = [row for row in rows if row != "gd_lora"]
    place = [1 + sum(own[row] < own["gd_lora"] for row in rows) for own in both]
    said = (
        f"is {correlation(rows)} over {({12: 'twelve'})[len(rows)]} rows, {correlation(rest)} "
        f"without LoRA, which falls from the {({3: 'third'})[place[0]]} of their places to the "
        f"{({11: 'eleventh'})[place[1]]}."
    )
    assert said in prose(FINDINGS)


def test_corrections_by_benjamini_hochberg_are_as_said():
    q, farther = {}, {}
    for pair in (LORA, TIGHT):
        met = meetings(pair)
        q[pair] = benjamini_hochberg([own.difference.p_value for own in met])
        farther[pair] = [own.difference.summary.mean > 0 for own in met]
    apart = [far for value, far in zip(q[LORA], farther[LORA], strict=True) if value <= LEVEL]
    said = (
        f"With Benjamini-Hochberg LoRA is nearer in {sum(apart)} and sine in {apart.count(False)}."
    )
    assert said in prose(FINDINGS)
    assert f"LoRA's mean is the smaller one in {sum(farther[LORA])}." in prose(FINDINGS)
    met = meetings(TIGHT)
    most = max(value for value in q[TIGHT] if value <= LEVEL)
    moved = {
        own.suite: f"{own.difference.summary.mean:.2f}"
        for own, value in zip(met, q[TIGHT], strict=True)
        if value <= LEVEL
    }
    nats = moved.pop("tofu-small")
    one, two, three, four = sorted(moved.values())
    assert f"five differences are shown (q {most:.3f} or less)".replace("0.", ".") in prose(
        FINDINGS
    )
    assert (
        "in all five the tight tanh is farther than its control "
        f"(by {one}, {two}, {three} and {four} points, and {nats} nats)."
    ) in prose(FINDINGS)


def test_the_papers_bound_is_active_in_no_table():
    found = {}
    for path in RESULTS.glob("*/LEADERBOARD.md"):
        for title, table in tables(str(path.relative_to(RESULTS))):
            if "bound act" in title and "bound active" in table.heads:
                place = table.heads.index("bound active")
                for row in table.rows:
                    if re.search("sine|tanh", row[0]) and not re.search("tight|relative", row[0]):
                        found[path.parent.name, row[0]] = row[place]
    suites = {own.suite for own in meetings(SINE)}
    assert suites <= {suite for suite, _ in found} and len(found) > 100
    acts = {key: text for key, text in found.items() if text != "0.0 %"}
    assert {row for _, row in acts} == {"scrub_sine"} and len(acts) == 2
    (_, table), *_ = tables("theory/width.md")
    place, width = table.heads.index("past 0.5"), table.heads.index("width")
    found = {row[width]: [] for row in table.rows}
    for row in table.rows:
        found[row[width]].append(float(row[place].removesuffix(" %")))
    most, wide = max(max(values) for values in found.values()), max(found["768"])
    assert most == max(found["64"])
    said = f"it acts in at most {most} % at width 64, in {wide:.2f} % at width 768 (one seed)"
    assert said in prose(README)


def test_requests_in_turn_are_as_said():
    found = {row["row"]: row["ag_per_seed"] for row in methods("tofu-small-seq-3")}
    assert words("tofu-small-seq-3") == ["different"] * len(found)
    ascent = [row for row in found if row.startswith("gd") and row != "gd_ul"]
    assert len(ascent) == 5
    assert all(distance("tofu-small-seq-3", row) > 3.67 for row in ascent)


def width_rows():
    (_, table), *_ = tables("theory/width.md")
    return [dict(zip(table.heads, row, strict=True)) for row in table.rows]


def test_the_largest_argument_by_width_is_as_said():
    falls = []
    for model, family in (("ViT", "vit"), ("GPT-Neo", "gpt_neo")):
        for blocks, depth in (("two", "2"), ("twelve", "12")):
            found = {
                (row["trained for"], int(row["width"])): row["largest"]
                for row in width_rows()
                if (row["model"], row["depth"], row["seed"]) == (family, depth, "1")
                and (row["optimizer"], row["adapter"]) == ("adamw", "sine")
            }
            values = [found[steps, width] for steps in ("500", "5000") for width in WIDTHS]
            line = f"| {model}, {blocks} blocks | {' | '.join(values)} |"
            assert line in prose(FINDINGS)
            falls.append(found["500", 768] < found["500", 64])
            falls.append(found["5000", 768] < found["5000", 64])
    assert falls == [True] * 8
    assert "smaller at width 768 than at 64 in all eight settings" in prose(FINDINGS)


WIDTHS = (64, 192, 384, 768)


def test_shares_by_number_of_steps_are_as_said():
    first = [row for row in width_rows() if row["seed"] == "1"]
    short = [row for row in first if row["trained for"] == "500"]
    long = [row for row in first if row["trained for"] == "5000"]
    assert len(short) + len(long) == len(first)

    def most(rows, column="past 0.5"):
        return max(float(row[column].split()[0]) for row in rows)

    said = prose(FINDINGS)
    assert f"In the {len(short)} runs of 500 steps" in said
    assert f"at most {most(short)} % of the entries pass 0.5" in said
    wide = [row for row in long if row["width"] in ("384", "768")]
    sgd = {(row["width"], row["depth"]) for row in wide if row["optimizer"] == "sgd"}
    assert len(wide) == 18 and sgd == {("384", "2"), ("768", "2")}
    deep = {row["width"] for row in long if (row["optimizer"], row["depth"]) == ("sgd", "12")}
    assert deep == {"64", "192"} and "(with SGD and twelve blocks up to width 192)" in said
    widest = [row for row in wide if row["optimizer"] == "sgd" and row["width"] == "768"]
    assert {(row["model"], row["adapter"]) for row in widest} == {
        ("vit", "sine"),
        ("gpt_neo", "sine"),
    }
    notes = prose("benchmarks/results/theory/NOTES.md")
    for model in ("vit", "gpt_neo"):
        line = {
            int(row["width"]): float(row["largest"])
            for row in long
            if (row["model"], row["optimizer"], row["adapter"], row["depth"])
            == (model, "sgd", "sine", "2")
        }
        falling = [line[width] for width in (64, 192, 384, 768)]
        assert falling == sorted(falling, reverse=True)
        *first, last = (f"{value:.2f}".removeprefix("0") for value in falling)
        assert f"{', '.join(first)} and {last} (" in notes
    top = max(long, key=lambda row: most([row]))
    assert (top["model"], top["width"], top["optimizer"]) == ("gpt_neo", "64", "sgd")
    assert top["adapter"] == "tanh"
    middle = most([row for row in long if row["width"] == "192"])
    sine = most([row for row in long if row["adapter"] == "sine"])
    ends = f"{most(long)} % at width 64 (GPT-Neo, SGD, tanh; sine {sine} %), {middle} % at 192"
    ends += f" and {most(wide):.2f} % at"
    assert f"In the {len(long)} runs of 5,000 steps it is at most {ends}" in said
    adam = [row for row in width_rows() if row["seed"] != "1"]
    where = ("width", "depth", "optimizer", "trained for")
    assert {tuple(row[name] for name in where) for row in adam} == {("64", "2", "adamw", "5000")}
    assert f"Two further seeds at width 64 (Adam, two blocks) reach {most(adam)} %." in said
    assert most(width_rows()) < 1 and "nearly a line in more than 99 % of the entries" in said
    turned = [row for row in width_rows() if float(row["largest"]) >= math.pi / 2]
    assert [row["adapter"] for row in turned] == ["control"]
    assert f"of the control one does ({float(turned[0]['largest']):.2f}, GPT-Neo, SGD)" in said
    for column in ("depth", "optimizer", "adapter"):
        assert {row[column] for row in short} == {
            "depth": {"2", "12"},
            "optimizer": {"adamw", "sgd"},
            "adapter": {"sine", "tanh", "control"},
        }[column]


def test_the_control_is_held_back_no_less_than_sine():
    rows = width_rows()
    cell = ("model", "width", "depth", "optimizer", "trained for", "seed", "device")
    largest = {
        (*(row[name] for name in cell), row["adapter"]): float(row["largest"]) for row in rows
    }
    ratios = [
        value / largest[(*where, "sine")]
        for (*where, adapter), value in largest.items()
        if adapter == "control" and (*where, "sine") in largest
    ]
    assert len(ratios) == 52
    ends = (f"{min(ratios):.1f}".lstrip("0"), f"{max(ratios):.1f}")
    assert "control is {} to {} times that of sine in the same cell on the same device".format(
        *ends
    ) in prose(FINDINGS)


def test_the_rank_correlation_of_ag4_and_js_is_as_said():
    for suite, path, said in (
        ("digits-all-class", ALL, "-.11"),
        ("cifar10-transfer", TRANSFER, ".51"),
    ):
        rows = [row["row"] for row in methods(suite)]
        mean = [float(js(path, row)) for row in rows]
        found = spearmanr([distance(suite, row) for row in rows], mean).statistic
        assert f"{found:.2f}".replace("0.", ".") == said and said in prose(FINDINGS)


def test_the_largest_arguments_in_the_notes_are_those_of_the_tables():
    checked = []
    for path in RESULTS.glob("*/NOTES.md"):
        said = re.search(r"largest argument(?: is)? (\.\d+)", path.read_text(encoding="utf-8"))
        if said and "gd_sine" in board(path.parent.name):
            own = cell(f"{path.parent.name}/LEADERBOARD.md", "bound act", "gd_sine", "max |arg|")
            shown = f"{own:.{len(said[1]) - 1}f}".removeprefix("0")
            assert said[1] == shown, f"{path.parent.name} should say {shown}"
            checked.append(path.parent.name)
    assert len(checked) >= 12


def test_the_near_methods_of_the_guide_are_those_of_the_tables():
    text = (ROOT / "docs/use.md").read_text(encoding="utf-8")
    lines = re.findall(
        r"^\| [^|]+ \| (`.+) \| \[([\w-]+)\]\(../benchmarks/results/\2/LEADERBOARD.md\) \|$",
        text,
        re.M,
    )
    assert len(lines) == 10
    for said, suite in lines:
        rows = re.findall(r"`(\w+)` ([\d.]+)", said)
        assert len(rows) >= 3
        assert [value for _, value in rows] == [f"{distance(suite, row):.2f}" for row, _ in rows]
        places = [rank(suite, row) for row, _ in rows]
        assert places == sorted(places)
        assert rows[0][1] == f"{min(distance(suite, own['row']) for own in methods(suite)):.2f}"
        floor = re.search(r"\[([\d.]+)\]", said)
        assert (suite == "tdec-small") == (floor is None)
        assert floor is None or floor[1] == f"{distance(suite, 'retrain (second)'):.2f}"
