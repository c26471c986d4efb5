from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from stable_forgetting.benchmarks.leaderboard.data import row_lines, to_json
from stable_forgetting.benchmarks.leaderboard.derive import make_leaderboard
from stable_forgetting.benchmarks.leaderboard.report import floor_line, inapplicable_lines, sections
from stable_forgetting.benchmarks.leaderboard.tables import main_table
from stable_forgetting.benchmarks.leaderboard.verdicts import _reach, order_lines
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.report import markdown
from stable_forgetting.benchmarks.report.cells import spread
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.benchmarks.suite.suite import FLOOR
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.measure.rules import Axis
from stable_forgetting.common.measure.scores import COLUMNS, Scores, save_scores
from stable_forgetting.common.store.stages import StageStore
from stable_forgetting.vision.benchmark import VisionBenchmark

SCORES = "scores.safetensors"

# label -> seed -> (FA, RA, TA, MIA); "retrain*" is the second Retrain
TABLE = {
    "original": {1: (100, 100, 90, 10), 2: (100, 100, 92, 12)},
    "retrain": {1: (80, 99, 88, 30), 2: (82, 98, 90, 28)},
    "retrain*": {1: (81, 99, 88, 31), 2: (82, 99, 89, 28)},
    "gd": {1: (82, 97, 89, 27), 2: (80, 98, 90, 32)},
    "gd_sine": {1: (80, 99, 88, 30.4), 2: (82, 98.4, 90, 28)},
}


@pytest.fixture
def board_of(hand_made, tmp_path):
    def build(table, **over):
        suite, store = hand_made(tmp_path, table, **over)
        return make_leaderboard(suite, store)

    return build


def one_score(value):
    columns = {name: np.array([value], dtype=np.float32) for name in COLUMNS}
    return Scores(indices=np.array([0]), **columns)


def row(board, label):
    return next(row for row in board.rows if row.label == label)


def test_signed_gaps_and_ag_per_seed_then_mean(board_of):
    board = board_of(TABLE)
    gd = row(board, "gd")
    assert gd.gaps["fa"].mean == pytest.approx((2 - 2) / 2)
    assert gd.gaps["ua"].mean == pytest.approx(0)
    assert gd.gaps["ra"].mean == pytest.approx((-2 + 0) / 2)
    assert gd.gaps["mia"].mean == pytest.approx((-3 + 4) / 2)
    # seed 1: (2 + 2 + 1 + 3) / 4, seed 2: (2 + 0 + 0 + 4) / 4; the AG of the mean would be less
    assert gd.ag_per_seed == {1: pytest.approx(2.0), 2: pytest.approx(1.5)}
    assert gd.derived["ag"].mean == pytest.approx(1.75)
    assert gd.derived["ag"].std == pytest.approx(0.5 / 2**0.5)
    assert gd.derived["ag2"].mean == pytest.approx(((1 + 3) / 2 + (0 + 4) / 2) / 2)
    assert gd.derived["max_gap"].mean == pytest.approx((3 + 4) / 2)
    tow = (0.98 * 0.98 * 0.99 + 0.98) / 2
    assert gd.derived["tow"].mean == pytest.approx(tow)
    tow_mia = (0.97 * 0.98 * 0.99 + 0.96) / 2
    assert gd.derived["tow_mia"].mean == pytest.approx(tow_mia)
    assert gd.metrics["ta"].mean == pytest.approx(89.5)
    assert row(board, "retrain").derived["ag"].mean == 0


def five(table):
    """Five seeds: the second of the two thrice, the first twice."""
    return {label: {s: of[1 + s % 2] for s in range(1, 6)} for label, of in table.items()}


def test_floor_row_and_verdicts(board_of):
    board = board_of(five(TABLE))
    assert board.floor.per_seed == pytest.approx([0.5] * 5)
    floor = row(board, FLOOR)
    assert floor.method == "retrain" and floor.verdict is None
    assert list(floor.ag_per_seed.values()) == pytest.approx([0.5] * 5)
    sine = row(board, "gd_sine").verdict
    assert sine.word == "undecided" and sine.p_equivalent is None, "no answers were stored"
    original = row(board, "original").verdict
    assert (original.word, original.odd, original.n) == ("different", 5, 5)
    assert original.q == original.p == pytest.approx(3**-5), "no guess among the methods"
    gd = row(board, "gd").verdict
    assert (
        gd.word == "different" and gd.p == pytest.approx(3**-5) and gd.q == pytest.approx(2 * gd.p)
    )
    assert row(board, "retrain").verdict is None
    # AG to the Retrains: 2 and 2 on the first seed, 1.5 and 2 on the second, 0.5 between them; the
    # smallest step of the table is 0.1
    first, second = np.log(2.1 / 0.6), (np.log(1.6 / 0.6) + np.log(2.1 / 0.6)) / 2
    assert (gd.ratio.value, gd.ratio.low, gd.ratio.high) == pytest.approx((second, second, first))


def test_the_floor_is_pooled_over_every_run_of_the_protocol(hand_made, tmp_path):
    third = {**TABLE, "retrain": {**TABLE["retrain"], 3: (80, 99, 88, 30)}}
    third["retrain*"] = {**TABLE["retrain*"], 3: (80, 99, 88, 34)}
    suite, store = hand_made(tmp_path, third)
    for seed in (1, 2, 3):
        with store.writing("retrain", f"{seed}" * 64, {"seed": seed}):
            pass
    of_two = replace(suite, spec=suite.spec.model_copy(update={"seeds": (1, 2)}))
    board = make_leaderboard(of_two, store)
    assert board.floor.per_seed == pytest.approx([0.5, 0.5])
    assert board.pooled.per_seed == pytest.approx([0.5, 0.5, 1.0])
    assert "Over all 3 pairs of this protocol in the store: 0.67±0.29." in floor_line(board)
    assert to_json(board)["pooled_floor"]["n"] == 3
    assert "Over all" not in floor_line(make_leaderboard(suite, store))


def test_two_seeds_tell_nothing_of_methods(board_of):
    board = board_of(TABLE)
    assert {row(board, label).verdict.word for label in ("gd", "gd_sine", "original")} == {
        "untested"
    }
    assert row(board, "gd").verdict.p == pytest.approx(1 / 9)


def test_a_diverged_seed_leaves_no_verdict_and_no_rank(board_of):
    table = five(TABLE)
    table["gd"][1] = None
    board = board_of(table)
    assert row(board, "gd").verdict is None and row(board, "gd").rank is None
    assert row(board, "gd_sine").verdict.q == row(board, "gd_sine").verdict.p, "the only method"


def test_ranks_share_ties_and_leave_references_out(board_of):
    table = five(TABLE)
    board = board_of({**table, "gd_ball": table["gd"]})
    assert row(board, "gd_sine").rank == (1, 1, 1)
    assert row(board, "gd").rank == row(board, "gd_ball").rank == (2, 2, 2)
    assert row(board, "original").rank is None and row(board, "retrain").rank is None


def test_the_worst_column_is_in_units_of_the_floor(board_of):
    board = board_of(TABLE)
    # MIA: 3 and 4 from Retrain, the second Retrain 1 and 0; the smallest step there is 0.4
    assert row(board, "gd").worst == (pytest.approx((3.5 + 0.4) / (0.5 + 0.4)), "mia")
    assert row(board, "gd_sine").worst.ratio == pytest.approx(2 / 3)
    assert "every row has a place that AG4 and its seeds allow" in order_lines(board)[0]
    assert row(board, "retrain").worst is row(board, FLOOR).worst is None
    assert to_json(board)["rows"][2]["worst"]["ratio"] == pytest.approx(2 / 3)
    assert "| 4.33 MIA |" in markdown.write(sections(board))


def test_rows_that_the_two_orders_place_differently_are_named(board_of):
    table = five(TABLE) | {"gd": {}, "gd_ball": {}}
    for seed, (fa, ra, ta, mia) in table["retrain"].items():
        table["gd"][seed] = (fa, ra - 3.4, ta, mia + 3.6)  # AG 1.75, at most 5.0 floors
        table["gd_ball"][seed] = (fa + 6.4, ra, ta, mia)  # AG 1.60, at most 5.3 floors
    line, without = order_lines(board_of(table))
    assert "gd_ball (2 by AG4, 3 by the worst column), gd (3 by AG4, 2 by" in line
    assert without.startswith("Order without MIA, which may not rank by the metric cards: another")
    assert "gd_ball (2 by AG4, 3 without), gd (3 by AG4, 2 without)" in without
    random = {"protocol": {"scenario": {"kind": "random", "fraction": 0.1}}}
    assert order_lines(board_of(table, **random)) == [line], "there its card allows it"


def test_verdicts_are_in_every_format(board_of):
    board = board_of({**five(TABLE), "gd_ball": {s: None for s in range(1, 6)}})
    text = markdown.write(sections(board))
    assert "## Verdicts" in text and "| gd | ≠ different | 5/5 | 0.00412 | 0.00823 |" in text
    data = {entry["row"]: entry for entry in to_json(board)["rows"]}
    assert data["gd"]["verdict"]["word"] == "different" and data["gd"]["verdict"]["n"] == 5
    assert data["gd"]["rank"] == {"rank": 2, "low": 2, "high": 2}
    assert data["gd_ball"]["verdict"] is None and data["gd_ball"]["rank"] is None
    assert "Carries nothing" not in text


def test_a_report_says_what_its_seeds_cannot_tell(board_of):
    few = markdown.write(sections(board_of(TABLE)))
    assert "2 seeds are too few for verdicts, which take 5: there are no marks." in few
    many = markdown.write(sections(board_of(five(TABLE))))
    assert "With 5 seeds no row of 2 can be shown to be indistinguishable." in many
    crowd = [row for row in board_of(five(TABLE)).rows if row.label == "gd"] * 14
    assert "at least 2 of the 14 rows are called different, or none is." in _reach(crowd, 3)


def test_where_no_method_is_judged_nothing_is_said_of_their_seeds(board_of):
    gone = {label: {1: None} for label in ("gd", "gd_sine")}
    table = {label: of | gone.get(label, {}) for label, of in five(TABLE).items()}
    text = markdown.write(sections(board_of(table)))
    assert "| original | ≠ different | 5/5 |" in text and "seeds are too few" not in text


def test_a_saturated_metric_is_named(board_of):
    dead = {
        label: {
            seed: (*values[:2], values[2] * (label == "original"), values[3])
            for seed, values in of.items()
        }
        for label, of in TABLE.items()
    }
    written = markdown.write(sections(board_of(dead)))
    assert "Carries nothing, being the same for Retrain and every row: TA (0)." in written


def test_axes_are_columns_and_their_shares_are_told(board_of):
    axes = (Axis("harm", "harm", {"ra": 1.0, "ta": 1.0}), Axis("trace", "trace", {"fa": 1.0}))
    rule = replace(VisionBenchmark.gap, metrics=("ra", "ta", "fa"), axes=axes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VisionBenchmark, "gap", rule)
        board = board_of(TABLE)
    gd, other = row(board, "gd"), row(board, FLOOR)
    # gaps of seed 1: RA 2, TA 1, FA 2; of seed 2: 0, 0, 2
    assert gd.derived["harm"].mean == pytest.approx((1.5 + 0) / 2)
    assert gd.derived["trace"].mean == pytest.approx(2)
    both = (gd.derived["harm"].mean + gd.derived["trace"].mean) / 2
    assert gd.derived["ag"].mean == pytest.approx(both)
    assert sum(gd.parts.values()) == pytest.approx(both)
    assert board.floor.summary.mean == pytest.approx(other.derived["ag"].mean)
    written = markdown.write(sections(board))
    assert "| harm ↓ | trace ↓ | AG4 ↓ |" in written
    assert f"; harm {spread(other.derived['harm'])}, trace" in written
    line = next(text for text in written.splitlines() if text.startswith("Shares of AG4"))
    told = [int(word) for word in re.findall(r"(\d+) %", line)]
    assert len(told) == 5 and told[0] + told[3] == pytest.approx(100, abs=1)
    assert told[1] + told[2] == pytest.approx(told[0], abs=1) and told[3] == told[4]


def board_by(board_of, table, **rule):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VisionBenchmark, "gap", replace(VisionBenchmark.gap, **rule))
        return board_of(table)


def test_more_of_what_is_kept_costs_nothing_in_any_column(board_of):
    table = five(TABLE)
    for seed, (fa, ra, ta, mia) in table["retrain"].items():
        table["gd"][seed] = (fa, ra, ta + 30, mia)  # keeps more than Retrain, else its equal
        table["gd_sine"][seed] = (fa, ra, ta - 30, mia)  # and this one less
    board = board_by(board_of, table, kept=("ta",))
    more, less = row(board, "gd"), row(board, "gd_sine")
    assert more.derived["ag"].mean == more.derived["max_gap"].mean == more.parts["ta"] == 0
    assert more.gaps["ta"].mean == 30, "printed as it is"
    assert more.rank.rank == 1 and more.verdict.word != "different"
    assert more.worst.metric != "ta"
    assert less.derived["ag"].mean == pytest.approx(7.5) and less.derived["max_gap"].mean == 30
    assert less.rank.rank == 2 and less.worst.metric == "ta" and less.verdict.word == "different"
    assert to_json(board)["distance"]["weights"] == dict.fromkeys(board.rule.metrics, 0.25)
    assert "Shares of AG4 over all methods: UA 0 %, RA 0 %, TA 100 %, MIA 0 %." in markdown.write(
        sections(board)
    )
    assert row(board_of(table), "gd").derived["ag"].mean == pytest.approx(7.5), "else charged"


def noisy(table, metric):
    """The table with 4, 0 and -4 points between both Retrains in one column, in turn."""
    column = ("fa", "ra", "ta", "mia").index(metric)
    other = {
        seed: tuple(v + (4 - 4 * (seed % 3)) * (i == column) for i, v in enumerate(values))
        for seed, values in table["retrain"].items()
    }
    return {**table, "retrain*": other}


def test_a_column_in_which_retrains_are_farther_apart_than_methods_weighs_nothing(board_of):
    table = noisy(five(TABLE), "mia")
    board, plain = board_by(board_of, table, drops_noise=True), board_of(table)
    # MIA: 0, -4, 4, 0, -4 between the Retrains; the methods' mean gaps are 1.2 and 0.16
    assert board.noisy == {
        "mia": (
            pytest.approx(math.sqrt(48 / 5)),
            pytest.approx(math.hypot(1.2, 0.16) / math.sqrt(2)),
        )
    }
    assert plain.noisy == {} and "mia" in row(plain, "gd").parts
    weights = {"mia": 0.0, **dict.fromkeys(("ua", "ra", "ta"), pytest.approx(1 / 3))}
    assert to_json(board)["distance"]["weights"] == weights
    gd = row(board, "gd")
    expected = [np.mean([abs(gd_ - re) for gd_, re in zip(table["gd"][s][:3],
                table["retrain"][s][:3], strict=True)]) for s in range(1, 6)]  # fmt: skip
    assert list(gd.ag_per_seed.values()) == pytest.approx(expected)
    assert gd.derived["max_gap"].mean == pytest.approx(2) and gd.worst.metric != "mia"
    assert board.floor.per_seed == (0, 0, 0, 0, 0)
    assert gd.metrics["mia"] == row(plain, "gd").metrics["mia"], "printed all the same"
    written = markdown.write(sections(board))
    assert (
        "Weighs nothing in AG4, max gap and worst, as two Retrains lie farther apart than the "
        "methods from Retrain: MIA (3.1 against 0.9)" in written
    )
    assert "MIA 0 %" not in written and "Weighs nothing" not in markdown.write(sections(plain))


def test_a_column_that_no_method_reaches_weighs(board_of):
    table = noisy(five(TABLE), "mia")
    for label in ("gd", "gd_sine"):
        table[label] = {seed: (*values[:3], 100) for seed, values in table[label].items()}
    assert board_by(board_of, table, drops_noise=True).noisy == {}, "alike, and far from Retrain"


def test_where_every_column_is_noise_all_of_them_weigh(board_of):
    table = five(TABLE)
    table["retrain*"] = {
        seed: tuple(value + 9 for value in values) for seed, values in table["retrain"].items()
    }
    board = board_by(board_of, table, drops_noise=True)
    assert set(board.noisy) == set(board.rule.metrics) == {"ua", "ra", "ta", "mia"}
    assert "All columns weigh, although in each of them two Retrains" in markdown.write(
        sections(board)
    )
    assert row(board, "gd").derived["ag"].mean == row(board_of(table), "gd").derived["ag"].mean


@pytest.mark.parametrize("lacking", ["retrain*", "gd"])
def test_one_method_or_one_retrain_alone_leaves_all_columns(board_of, lacking):
    table = noisy(five(TABLE), "mia")
    left = {label: values for label, values in table.items() if label != lacking}
    assert board_by(board_of, left, drops_noise=True).noisy == {}
    assert board_by(board_of, table, drops_noise=True).noisy


def test_rank_is_retrain_floor_then_average_gap(board_of):
    board = board_of({**TABLE, "gd_ball": {1: None, 2: None}})
    labels = [found.label for found in board.rows]
    assert labels == ["retrain", FLOOR, "gd_sine", "gd", "original", "gd_ball"]


def test_without_a_second_retrain_nothing_is_marked(board_of):
    table = {label: values for label, values in TABLE.items() if label != "retrain*"}
    board = board_of(table)
    assert board.floor.summary is None and board.floor.per_seed == (None, None)
    assert FLOOR not in [found.label for found in board.rows]
    assert {found.verdict for found in board.rows} == {None}
    assert board.missing == 2


def test_diverged_seeds_are_shown_and_left_out(board_of):
    board = board_of({**TABLE, "gd": {1: None, 2: (80, 98, 90, 32)}})
    gd = row(board, "gd")
    assert gd.seeds == [1, 2] and list(gd.diverged) == [1]
    assert "step 3" in gd.diverged[1]
    assert gd.ag_per_seed == {2: pytest.approx(1.5)}
    assert gd.metrics["fa"].n == 1 and gd.metrics["fa"].mean == 80
    assert board.complete, "a diverged run is a result, not a missing one"


def test_all_seeds_diverged_leave_no_number(board_of):
    board = board_of({**TABLE, "gd": {1: None, 2: None}})
    gd = row(board, "gd")
    assert (gd.metrics, gd.gaps, gd.derived, gd.ag_per_seed) == ({}, {}, {}, {})
    assert sorted(gd.diverged) == [1, 2]
    assert row(board, "gd_sine").derived["ag"].n == 2, "other rows are not touched"


def test_a_diverged_retrain_drops_its_seed_for_all(board_of):
    board = board_of({**TABLE, "retrain": {1: None, 2: (82, 98, 90, 28)}})
    gd = row(board, "gd")
    assert gd.ag_per_seed == {2: pytest.approx(1.5)}
    assert gd.derived["ag"].mean == pytest.approx(1.5) and gd.gaps["mia"].mean == 4
    assert board.floor.per_seed == (None, pytest.approx(0.5))


def test_an_undefined_metric_gives_no_summary(board_of):
    board = board_of({**TABLE, "gd": {1: (82, 97, 89, None), 2: (80, 98, 90, 32)}})
    gd = row(board, "gd")
    assert "mia" not in gd.metrics and "ag" not in gd.derived
    assert gd.metrics["fa"].n == 2 and gd.derived["tow"].n == 2
    assert gd.ag_per_seed == {2: pytest.approx(1.5)}


def test_missing_records_are_counted(board_of):
    board = board_of({**TABLE, "gd": {2: (80, 98, 90, 32)}}, seeds=[1, 2])
    assert board.missing == 1 and not board.complete
    assert row(board, "gd").seeds == [2]


def test_nothing_there_is_all_missing(tiny_suite, tmp_path):
    suite = load_suite(str(tiny_suite(tmp_path, seeds=[1, 2], retrains=2)))
    board = make_leaderboard(suite, StageStore(tmp_path / "nowhere"))
    assert board.missing == 6 and board.rows == [] and board.records == []
    assert not (tmp_path / "nowhere").exists(), "reading writes nothing"


def test_comparisons_are_paired(board_of):
    board = board_of(TABLE, compare=[["gd", "gd_sine"], ["gd_sine", "original"]])
    first, second = board.comparisons
    assert (first.first, first.second) == ("gd", "gd_sine")
    assert first.difference.summary.mean == pytest.approx(((2 - 0.1) + (1.5 - 0.1)) / 2)
    assert second.difference.summary.mean < 0


def test_comparisons_use_common_seeds_only(board_of):
    board = board_of({**TABLE, "gd": {1: None, 2: (80, 98, 90, 32)}}, compare=[["gd", "gd_sine"]])
    (only,) = board.comparisons
    assert only.difference.summary.n == 1
    assert only.difference.summary.mean == pytest.approx(1.4)
    assert only.difference.p_value is None


def test_a_row_that_diverged_is_closer_than_none(board_of):
    """The seeds that are left may be those on which it did well."""
    table = five(TABLE)
    table["gd_sine"] = {**table["gd_sine"], 1: None}
    pairs = [["gd", "original"], ["gd_sine", "original"]]
    text = markdown.write(sections(board_of(table, compare=pairs)))
    assert "n 5: gd is closer to Retrain." in text
    assert "n 4: no reading, as gd_sine diverged on a seed." in text


def test_records_of_two_data_sets_are_refused(hand_made, put_record, tmp_path):
    partial = {**TABLE, "gd": {1: (82, 97, 89, 27)}}
    suite, store = hand_made(tmp_path, partial, seeds=[1, 2])
    stage = next(r.stage for r in make_plan(suite, store).results if (r.label, r.seed) == ("gd", 2))
    other = {"digest": "e" * 64, "provenance": "elsewhere"}
    put_record(store, stage, {"fa": 1.0}, data=other)
    with pytest.raises(DataError, match="the data changed between runs"):
        make_leaderboard(suite, store)


def test_tuning_is_shown(tiny_suite, put_record, tmp_path):
    rows = {"original": None, "retrain": None, "gd": None, "gd_lora": None}
    grids = {
        "gd": {"lr": [0.001, 0.002]},
        "gd_lora": {"adapter.rank": [2, 4]},
    }
    path = tiny_suite(tmp_path, methods=rows, tune={"seeds": [0], "trials": 2, "grids": grids})
    suite, store = load_suite(str(path)), StageStore(tmp_path / "store")
    board = make_leaderboard(suite, store)
    # 5 of tuning, original and retrain, and one run of each row that is not planned yet
    assert board.missing == 5 + 2 + 2
    gaps = {("retrain", -1): 0.0, ("gd", 0): 4.0, ("gd", 1): 2.0, ("gd_lora", 1): 8.0}
    for result in make_plan(suite, store).results:
        if result.trial is not None:
            fa = gaps.get((result.label, result.trial))
            metrics = (
                {"fa": fa, "ua": 100 - fa, "ra": 9, "va": 9, "mia_validation": 9}
                if (fa is not None)
                else None
            )
            put_record(store, result.stage, metrics)
    board = make_leaderboard(suite, store)
    shown = [(t.label, dict(t.params), t.gap, t.chosen) for t in board.trials]
    assert shown == [
        ("gd", {"lr": 0.001}, 1.0, False),
        ("gd", {"lr": 0.002}, 0.5, True),
        ("gd_lora", {"adapter.rank": 2}, float("inf"), False),
        ("gd_lora", {"adapter.rank": 4}, 2.0, True),
    ]
    assert board.missing == 4 and board.records == [], "trials are not results"
    for result in make_plan(suite, store).results:
        if result.trial is None:
            put_record(store, result.stage, {"fa": 1.0})
    board = make_leaderboard(suite, store)
    assert board.missing == 1, "all but the split, without which there are no verdicts"
    assert (row(board, "gd").trials, row(board, "gd").chosen) == (2, {"lr": 0.002})
    assert row(board, "gd_lora").chosen == {"adapter.rank": 4}
    assert (row(board, "retrain").chosen, row(board, "original").trials) == ({}, 0)


def test_metrics_against_retrain_are_derived_from_both_models_scores(hand_made, tmp_path):
    """A benchmark's ``compare`` reads stored scores when the table is made; nothing is written."""
    suite, store = hand_made(tmp_path, TABLE)
    for number, result in enumerate(make_plan(suite, store).results):
        scores = one_score(float(number))
        with store.writing("score", result.stage.parents["scores"].key, {}) as folder:
            save_scores({"forget": scores}, folder / SCORES)
    before = {path: path.read_bytes() for path in store.root.rglob("record.json")}
    plain = make_leaderboard(suite, store)

    def compare(cls, config, scores, reference):
        assert config.data.name == "digits"
        return {"mia_auc": float(scores["forget"].loss[0] - reference["forget"].loss[0])}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VisionBenchmark, "compare", classmethod(compare))
        board = make_leaderboard(suite, store)
    assert "mia_auc" not in row(plain, "gd").metrics
    assert row(board, "retrain").metrics["mia_auc"].mean == 0
    assert row(board, FLOOR).metrics["mia_auc"].mean != 0
    assert {path: path.read_bytes() for path in before} == before
    assert all("mia_auc" in record.metrics for _, record in board.records)


def test_a_method_for_another_scenario_is_not_applicable_and_is_not_run(board_of):
    """NOVO forgets classes: for random forgetting there is no number, and nothing fails."""
    random = {"protocol": {"scenario": {"kind": "random", "fraction": 0.1}}}
    methods = {"original": None, "retrain": None, "novo": None}
    table = {label: TABLE[label] for label in ("original", "retrain", "retrain*")}
    board = board_of(table, methods=methods, **random)
    novo = row(board, "novo")
    assert novo.inapplicable == "for class forgetting only" and not novo.seeds
    assert board.complete and board.rows[-1] is novo
    assert main_table(board).rows[-1][:3] == ("novo (our reading)", "n/a", "–")
    told = "novo: not applicable (for class forgetting only)"
    assert inapplicable_lines(board) == [told] and told in markdown.write(sections(board))
    assert to_json(board)["rows"][-1]["inapplicable"] == "for class forgetting only"
    assert "novo" not in {line["row"] for line in row_lines(board)}
    class_board = board_of(table, methods=methods)
    assert class_board.missing == 2 and all(not r.inapplicable for r in class_board.rows)
