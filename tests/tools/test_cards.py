"""Metric cards: areas, likeness and the rule against cases with known answers, and a tiny suite."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.store.stages import StageStore
from stable_forgetting.common.train.config import FitConfig
from stable_forgetting.language.benchmarks.muse import MuseBenchmark
from stable_forgetting.language.benchmarks.tofu import TofuBenchmark
from stable_forgetting.vision.benchmark import VisionBenchmark
from stable_forgetting.vision.metrics import DOUBTED
from tests.test_findings import FINDINGS, prose
from tools import cards
from tools.cards import Card, Measured, alike, area, area_interval, page, stored_cards


def card(**changes):
    plain = {"suite": "s", "method": "gd", "metric": "m", "seeds": 30, "area": 1.0, "low": 0.95}
    return Card(**{**plain, "high": 1.0, "rounded": 0.9, "relearnt": 0.9, **changes})


def test_the_area_is_that_of_scikit_learn_on_the_side_that_is_larger():
    stream = np.random.default_rng(0)
    known, unknown = stream.normal(1, 1, 30).round(1), stream.normal(0, 1, 20).round(1)
    truth = roc_auc_score([1] * 30 + [0] * 20, [*known, *unknown])
    assert 0.6 < truth < 1 and area(known, unknown) == pytest.approx(truth)
    assert area(-known, -unknown) == pytest.approx(truth)
    assert area(np.ones(3), np.ones(4)) == 0.5


def test_the_interval_holds_the_area_and_ends_at_one_for_pools_apart():
    stream = np.random.default_rng(1)
    known, unknown = stream.normal(0.8, 1, 30), stream.normal(0, 1, 30)
    low, high = area_interval(known, unknown)
    assert 0.5 < low < area(known, unknown) < high < 1
    assert area_interval(-known, -unknown) == pytest.approx((low, high))
    assert area_interval(known + 9, unknown) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [(2.0, 2.0, 1.0), (0.0, 5.0, 0.0), (1.0, 3.0, 0.5), (1.0, -1.0, 0.0), (0.0, 0.0, 1.0)],
)
def test_likeness_is_one_for_equals_and_nothing_for_a_zero_or_another_sign(one, other, found):
    assert alike(one, other) == found


def test_the_rule_takes_all_three():
    assert card().ranks
    assert not card(low=0.89).ranks
    assert not card(rounded=0.4).ranks and not card(relearnt=0.4).ranks
    assert not card(relearnt=None).ranks, "nothing moved, so nothing is known"


def test_a_suite_is_measured_from_its_store(cli, tiny_suite, tmp_path, monkeypatch):
    monkeypatch.setattr(cards, "FOLDER", tmp_path / "cards")
    path = tiny_suite(
        tmp_path,
        suite="tiny",
        methods={"original": None, "retrain": None, "gd": None},
        retrains=2,
        seeds=[1, 2, 3],
        defaults={"steps": 4},
        protocol={"scenario": {"kind": "class", "num_classes": 2}},
    )
    store = tmp_path / "store"
    given = ("--store", store, "--workers", 1, "--seeds", "1,2,3", "--only", "gd")
    assert cli("run", path, *given).code == 0
    cards.main(store, str(path), [1, 2, 3], "gd")
    lines = {line["metric"]: line for line in csv.DictReader((tmp_path / "cards/tiny.csv").open())}
    suite = load_suite(str(path), seeds=[1, 2, 3], only=["gd"])
    models = Measured(suite, StageStore(store))
    known, unknown = (
        np.array([models.stored(label, seed)["fa"] for seed in (1, 2, 3)])
        for label in ("original", "retrain")
    )
    assert not unknown.any(), "Retrain never saw these classes"
    assert float(lines["fa"]["area"]) == pytest.approx(area(known, unknown), abs=1e-6)
    assert {"js_forget", "forget_loss", "mia"} <= {*lines}
    found = {own.metric: own for own in stored_cards()}
    assert found["js_forget"].low <= found["js_forget"].area <= found["js_forget"].high
    assert (tmp_path / "cards/CARDS.md").read_text() == page(stored_cards())
    before, after = models.stored("gd", 1), models.changed("gd", 1, "relearnt")
    assert after["forget_loss"] < before["forget_loss"], "relearning was on the forget set"
    rounded = models.changed("gd", 1, "rounded")
    assert rounded["forget_loss"] != before["forget_loss"]


def test_relearning_has_its_own_steps_and_no_warm_up_of_the_recipe(monkeypatch):
    recipes = []
    monkeypatch.setattr(cards, "fit", lambda *given, **_: recipes.append(given[3]))
    monkeypatch.setattr(cards.data, "Loader", lambda *_, **__: None)
    recipe = FitConfig(epochs=5, warmup_epochs=1, epochs_of="forget", timing="transformers")
    benchmark = SimpleNamespace(source=None, recipe=recipe, forward=None)
    cards.relearn(None, benchmark, SimpleNamespace(parts={"forget": np.arange(4)}), 1)
    assert recipes[0].steps == cards.STEPS and recipes[0].epochs is None
    assert recipes[0].warmup_epochs is None and recipes[0].epochs_of is None
    assert recipes[0].timing == "own"


def test_the_shipped_page_and_the_findings_are_those_of_the_shipped_cards():
    found = stored_cards()
    assert (cards.FOLDER / "CARDS.md").read_text(encoding="utf-8") == page(found)
    said = prose(FINDINGS)
    of = {(own.suite, own.metric): own for own in found}

    def r(suite, *metrics):
        return [f"{of[suite, metric].relearnt:.2f}".lstrip("0") for metric in metrics]

    def may(suite, *metrics):
        return [of[suite, metric].ranks for metric in metrics]

    authors, digit, tenth, notes, news = (
        "authors-cards", "digits-class", "digits-random", "tdec-cards", "muse-cards"
    )  # fmt: skip
    order = ("forget_odds_rest", "forget_odds_top", "forget_log_ratio", "log10_fq", "js_forget")
    failed = ("forget_prob", "forget_rouge", "extraction_strength")
    assert all(may(authors, *order)) and not any(may(authors, *failed))
    told = (
        "our three terms of forgetting (R {}, {} and {}), log10 of forget quality ({}), JS "
        "divergence of answers ({}) | mean probability ({}), ROUGE-L ({}), extraction strength ({})"
    )
    assert told.format(*r(authors, *order, *failed)) in said
    assert all(may(digit, "fa", "ua", "forget_loss"))
    doubted = ("mia", "js_forget", "mia_auc", "mia_entropy")
    assert not any(may(digit, *doubted))
    told = (
        "the loss (R {}) | the SVC attack that AG4 averages (R {}), JS divergence ({}), membership "
        "by loss ({}) and by entropy ({})"
    )
    assert told.format(*r(digit, "forget_loss", *doubted)) in said
    assert all(may(tenth, "fa", "ua", "mia"))
    assert not any(may(tenth, "forget_loss", "mia_entropy"))
    js, changed, auc = (of[tenth, metric] for metric in ("js_forget", "changed_forget", "mia_auc"))
    assert js.low < 0.5 and changed.low < 0.5 and not auc.ranks
    told = (
        f"the SVC attack (R {r(tenth, 'mia')[0]}) | the loss (R {r(tenth, 'forget_loss')[0]}), JS "
        f"divergence (area {js.area:.2f}), share answered otherwise ({changed.area:.2f}), "
        f"membership by loss ({auc.area:.2f} [{auc.low:.2f}, {auc.high:.2f}])"
    )
    assert re.sub(r"\b0\.", ".", told) in said
    assert all(may(notes, "forget_el", "forget_ma"))
    told = "extraction likelihood (R {}), memorisation accuracy ({})"
    assert told.format(*r(notes, "forget_el", "forget_ma")) in said
    named = ("forget_accuracy", "forget_loss", "min_k_auc", "verbmem", "knowmem_f", "privleak")
    assert may(news, *named) == [True] * 2 + [False] * 4
    told = (
        "token accuracy (R {}), the loss ({}) | Min-k AUC ({}), VerbMem ({}), KnowMem ({}), "
        "PrivLeak ({})"
    )
    assert told.format(*r(news, *named)) in said
    kept = [of[key] for key in of if key[1] in ("ra", "ta", "mu", "knowmem_r")]
    assert len(kept) == 6 and not any(own.ranks for own in kept)


@pytest.mark.parametrize(
    ("suite", "rule"),
    [
        ("digits-class", replace(VisionBenchmark.gap, doubted=DOUBTED["class"])),
        ("digits-random", VisionBenchmark.gap),
        ("authors-cards", TofuBenchmark.gap),
        ("muse-cards", MuseBenchmark.gap),
    ],
)
def test_a_rule_doubts_what_may_not_rank_by_its_card(suite, rule):
    may = {own.metric: own.ranks for own in stored_cards() if own.suite == suite}
    kept = {"ra", "ta", "knowmem_r", "retain_odds", "ra_odds", "wf_odds"}
    assert set(rule.doubted) == {m for m in rule.metrics if m not in kept and not may[m]}
