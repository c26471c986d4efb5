from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.spatial.distance import jensenshannon
from scipy.stats import hmean, ks_2samp

from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.measure.goal import References
from stable_forgetting.common.measure.scores import Scores
from stable_forgetting.language.benchmarks.tofu import TofuBenchmark
from stable_forgetting.language.measure.scoring import TofuEvaluation
from stable_forgetting.language.metrics import tofu
from stable_forgetting.language.metrics.memorization import (
    exact_memorization,
    extraction_strength,
    membership_auc,
    min_k,
    privacy_leakage,
)
from stable_forgetting.language.metrics.rouge import rouge, tokens_of
from stable_forgetting.language.metrics.tofu import (
    LOKU_PART,
    MOST_PROBABLE,
    RATES,
    SEQUENTIAL_PARTS,
    chosen_right,
    forget_quality,
    log_odds,
    sequential_metrics,
    tofu_compare,
    tofu_metrics,
)

STYLES = ["clean", "tofu", "openunlearning"]


def columns(right, wrong, answer=None, **extra) -> dict[str, np.ndarray]:
    right = np.asarray(right, dtype=np.float64)
    answer = right if answer is None else np.asarray(answer, dtype=np.float64)
    wrong = np.asarray(wrong, dtype=np.float64)
    return {"answer_loss": answer, "paraphrase_loss": right, "perturbed_loss": wrong, **extra}


def drawn(rows: int = 40, wrong: int = 5, seed: int = 0, shift: float = 0.0) -> dict:
    stream = np.random.Generator(np.random.PCG64(seed))
    return columns(
        stream.uniform(0.5, 2.5, rows) + shift,
        stream.uniform(1.0, 3.0, (rows, wrong)),
        stream.uniform(0.1, 2.0, rows),
        rouge_l_recall=stream.uniform(0, 1, rows),
        extraction_strength=stream.uniform(0, 1, rows),
        exact_memorization=stream.uniform(0, 1, rows),
        min_k=stream.uniform(1, 4, rows) + shift,
    )


def everything(seed: int = 0, shift: float = 0.0) -> dict[str, dict]:
    parts = ["forget", "retain", "test_real_authors", "test_world_facts", "holdout"]
    return {part: drawn(seed=10 * seed + k, shift=shift) for k, part in enumerate(parts)}


# Truth ratios ------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
def test_a_truth_ratio_is_geometric_mean_of_wrong_over_right(style):
    p_right, p_wrong = 0.5, np.asarray([0.1, 0.4])
    given = columns([-math.log(p_right)], [-np.log(p_wrong)])
    ratio = math.sqrt(0.1 * 0.4) / p_right
    assert tofu.truth_ratios(given, style)[0] == pytest.approx(ratio, rel=1e-9)
    assert tofu.closeness(given, style)[0] == pytest.approx(ratio, rel=1e-9)
    assert tofu.preference(given, style)[0] == pytest.approx(1 - ratio, rel=1e-9)
    assert tofu.mass(given, style)[0] == pytest.approx(0.5 / (0.5 + 0.2), rel=1e-9)
    options = tofu.normalised_probabilities(given, style)
    assert options[0] == pytest.approx(0.5 / (0.5 + 0.1 + 0.4), rel=1e-9)


@pytest.mark.parametrize("style", STYLES)
def test_the_aggregates_bend_where_they_should(style):
    given = columns([2.0, 1.0], [[1.0], [1.0]])  # wrong is likelier; equally likely
    assert tofu.closeness(given, style) == pytest.approx([math.exp(-1), 1.0], rel=1e-8)
    assert tofu.preference(given, style) == pytest.approx([0.0, 0.0], abs=1e-8)


@pytest.mark.parametrize(
    ("right", "wrong", "peer"), [(25.0, 24.8, 0.149), (30.0, 30.0, 0.00093), (60.0, 58.0, 6.5e-16)]
)
def test_a_collapsed_model(right, wrong, peer):
    """The peer's 1e-10 outweighs the probabilities; in log space nothing happens."""
    given = columns([right], [[wrong] * 5])
    for style in ("clean", "tofu"):
        found = tofu.truth_ratios(given, style)[0]
        assert found == pytest.approx(math.exp(right - wrong), rel=1e-9)
        assert tofu.closeness(given, style)[0] == pytest.approx(math.exp(wrong - right))
    assert tofu.truth_ratios(given, "openunlearning")[0] == pytest.approx(peer, rel=0.02)


def test_log_space_survives_what_the_exponential_does_not():
    given = columns([2000.0, 10.0], [[900.0, 1100.0], [3000.0, 3000.0]])
    assert tofu.log_truth_ratios(given).tolist() == [1000.0, -2990.0]
    assert tofu.closeness(given, "clean").tolist() == [0.0, 0.0]
    assert tofu.preference(given, "clean").tolist() == [0.0, 1.0]
    assert tofu.mass(given, "clean").tolist() == [0.0, 1.0]
    assert tofu.normalised_probabilities(given, "clean").tolist() == [0.0, 1.0]
    assert np.isnan(tofu.normalised_probabilities(given, "openunlearning")).sum() == 0


def test_options_are_the_right_answer_and_then_the_wrong_ones():
    given = columns([1.0, 2000.0], [[2.0, 4.0], [1999.0, 0.0]], perturbed_count=np.asarray([2, 1]))
    p = np.exp([-1.0, -2.0, -4.0])
    e = math.e
    expected = [p / p.sum(), [1 / (1 + e), e / (1 + e), 0.0]]
    np.testing.assert_allclose(tofu.options(given), expected, rtol=1e-12)
    right = tofu.normalised_probabilities(given, "clean")
    np.testing.assert_allclose(tofu.options(given)[:, 0], right, rtol=1e-12)
    assert tofu.options(given | {"perturbed_count": np.asarray([2, 0])}) is None


@pytest.mark.parametrize("style", STYLES)
def test_absent_wrong_answers_do_not_count(style):
    count = np.asarray([2, 0, 1])
    given = columns([1.0, 1.0, 1.0], [[2.0, 4.0], [0.0, 0.0], [3.0, 0.0]], perturbed_count=count)
    assert tofu.truth_ratios(given, style) == pytest.approx([math.exp(-2), math.exp(-2)], rel=1e-8)
    options = tofu.normalised_probabilities(given, style)
    p, q, r = math.exp(-1), math.exp(-2) + math.exp(-4), math.exp(-3)
    assert options == pytest.approx([p / (p + q), p / (p + r)], rel=1e-8)
    assert not tofu.compared({"answer_loss": np.zeros(3)}).any()


# Forget quality ----------------------------------------------------------------------------------


def test_total_separation_of_four_hundred():
    values = np.arange(400.0)
    found = forget_quality(values, values + 1000)
    wanted = math.log10(2) - (math.lgamma(801) - 2 * math.lgamma(401)) / math.log(10)
    assert found["log10_fq"] == pytest.approx(wanted, abs=1e-6)  # 1.06e-239, known from tables
    assert found["fq"] == pytest.approx(1.06e-239, rel=0.01)


def test_almost_the_same_samples_are_no_news(recwarn):
    values = np.arange(300.0)
    found = forget_quality(values, values + 0.5)
    assert found["ks"] == pytest.approx(1 / 300) and found["log10_fq"] == pytest.approx(0.0)
    assert not recwarn.list


@pytest.mark.parametrize("style", STYLES)
def test_comparing_is_invariant_and_symmetric_about_what_it_should_be(style):
    first, second = {"forget": drawn(seed=1)}, {"forget": drawn(seed=2, shift=0.5)}
    found = tofu_compare(first, second, style=style)
    wanted = ks_2samp(
        tofu.truth_ratios(first["forget"], style), tofu.truth_ratios(second["forget"], style)
    )
    assert found["fq"] == pytest.approx(wanted.pvalue, rel=1e-12)
    assert tofu_compare(second, first, style=style)["fq"] == pytest.approx(found["fq"])
    assert tofu_compare(first, first, style=style)["fq"] == 1
    assert found["privleak"] is None


def test_lokus_reference_is_other_rows():
    ours = {"forget": drawn(40, seed=1)}
    theirs = {"forget": drawn(40, seed=2), LOKU_PART: drawn(320, seed=3)}
    found = tofu_compare(ours, theirs, fq_reference="loku")
    wanted = ks_2samp(
        tofu.log_truth_ratios(ours["forget"]), tofu.log_truth_ratios(theirs[LOKU_PART])[:300]
    )
    assert found["fq"] == pytest.approx(wanted.pvalue)
    assert found["fq"] != tofu_compare(ours, theirs)["fq"]
    long = {"forget": drawn(400, seed=4)}
    found = tofu_compare(long, theirs, fq_reference="loku")["ks"]
    first = tofu.log_truth_ratios(long["forget"])[:300]
    assert found == ks_2samp(first, tofu.log_truth_ratios(theirs[LOKU_PART])[:300]).statistic
    with pytest.raises(DataError, match=LOKU_PART):
        tofu_compare(ours, {"forget": drawn()}, fq_reference="loku")


def test_forget10_has_forget_quality_on_lokus_rows_too():
    ours, theirs = {"forget": drawn(400, seed=4)}, {"forget": drawn(400, seed=5)}
    found = tofu_compare(ours, theirs)
    loku = tofu_compare(ours, {LOKU_PART: theirs["forget"]}, fq_reference="loku")
    assert found["log10_fq_300"] == loku["log10_fq"] != found["log10_fq"]
    few = tofu_compare({"forget": drawn(299)}, {"forget": drawn(299, seed=1)})
    assert few["log10_fq_300"] is None and few["log10_fq"] is not None


# One model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
def test_utility_is_the_harmonic_mean_of_nine(style):
    scores = everything()
    found = tofu_metrics(scores, style=style)
    nine = []
    for part, options in (
        ("retain", False),
        ("test_real_authors", True),
        ("test_world_facts", True),
    ):
        given = scores[part]
        p = np.exp(-given["answer_loss"])
        others = np.exp(-given["perturbed_loss"]).sum(axis=1)
        ratio = np.exp(given["paraphrase_loss"] - given["perturbed_loss"].mean(axis=1))
        nine.append((p / (p + others) if options else p).mean())
        nine.append(np.maximum(0, 1 - ratio).mean())
        nine.append(given["rouge_l_recall"].mean())
    assert found["mu"] == pytest.approx(hmean(nine), rel=1e-8)
    six = [value for k, value in enumerate(nine) if k % 3 != 2]
    assert found["mu_likelihood"] == pytest.approx(hmean(six), rel=1e-8)
    forget = scores["forget"]
    ratio = np.exp(forget["paraphrase_loss"] - forget["perturbed_loss"].mean(axis=1))
    assert found["forget_truth_ratio"] == pytest.approx(
        100 * np.minimum(ratio, 1 / ratio).mean(), rel=1e-8
    )
    assert found["forget_prob"] == pytest.approx(100 * np.exp(-forget["answer_loss"]).mean())
    assert found["extraction_strength"] == pytest.approx(100 * forget["extraction_strength"].mean())


def test_mass_is_an_option():
    scores = everything()
    ratio, mass = tofu_metrics(scores), tofu_metrics(scores, truth="mass")
    wanted = 100 * tofu.mass(scores["retain"], "clean").mean()
    assert mass["retain_truth_ratio"] == pytest.approx(wanted)
    assert mass["retain_truth_ratio"] != ratio["retain_truth_ratio"]
    assert mass["retain_prob"] == ratio["retain_prob"]


def test_a_trial_has_no_rouge_and_no_utility():
    scores = everything()
    for part in scores.values():
        del part["rouge_l_recall"]
    found = tofu_metrics(scores)
    assert found["mu"] is None and found["mu_likelihood"] is not None
    assert "forget_rouge" not in found
    del scores["holdout"]
    assert tofu_metrics(scores)["min_k_auc"] is None
    only = tofu_metrics({"forget": scores["forget"]})
    assert only["mu"] is None and only["forget_prob"] > 0


def test_every_metric_has_a_specification():
    scores, reference = everything(0), everything(1, shift=0.3)
    made = set(tofu_metrics(scores)) | set(tofu_compare(scores, reference))
    specs, others = TofuBenchmark.metrics, {*TofuBenchmark.answer_metrics, "forget_loss"}
    assert made | {*SEQUENTIAL_PARTS} | others == {spec.name for spec in specs}
    assert all(spec.doc for spec in specs)
    assert set(RATES) <= made and set(TofuBenchmark.gap.metrics) <= made
    found = tofu_metrics(scores) | tofu_compare(scores, reference)
    assert found.pop("log10_fq_300") is None, "fewer than 300 rows"
    assert all(value is not None and math.isfinite(value) for value in found.values())


def test_answers_are_compared_over_the_right_and_the_wrong_ones():
    """Two questions, one wrong answer each: p is shared out between the two of them."""
    ours = columns([1.0, 1.0], -np.log([[0.2], [0.3]]), -np.log([0.6, 0.1]))
    theirs = columns([1.0, 1.0], -np.log([[0.5], [0.1]]), -np.log([0.5, 0.3]))
    sides = [{"forget": scores_of(side)} for side in (ours, theirs)]
    config = SimpleNamespace(evaluation=TofuEvaluation())
    found = TofuBenchmark.compare(config, *sides)
    p, q = np.array([[0.75, 0.25], [0.25, 0.75]]), np.array([[0.5, 0.5], [0.75, 0.25]])
    assert found["js_forget"] == pytest.approx((jensenshannon(p, q, axis=1) ** 2).mean())
    assert found["changed_forget"] == 50, "the second question; of equals the right answer counts"
    assert found["js_retain"] is None, "it was not asked"
    assert TofuBenchmark.compare(config, sides[0], sides[0])["js_forget"] == 0


def scores_of(columns: dict[str, np.ndarray]) -> Scores:
    zeros = np.zeros(len(columns["answer_loss"]), np.float32)
    arrays = dict.fromkeys(("loss", "probability", "margin", "correct"), zeros)
    return Scores(indices=np.arange(len(zeros)), extra=columns, **arrays)


def of_losses(*values):
    return {"forget": {"answer_loss": np.asarray(values)}}


def test_log_odds_saturate_at_neither_end():
    p = np.asarray([1e-4, 0.01, 0.5, 0.9])
    odds = log_odds({"answer_loss": -np.log(p)})
    np.testing.assert_allclose(odds, np.log(p / (1 - p)), rtol=1e-12)
    far, further = (log_odds({"answer_loss": np.asarray([loss])})[0] for loss in (40.0, 70.0))
    assert far - further == pytest.approx(30)
    known = log_odds({"answer_loss": np.asarray([0.0, 1e-7])})
    np.testing.assert_allclose(known, math.log(MOST_PROBABLE / (1 - MOST_PROBABLE)), rtol=1e-12)


def test_remembered_and_destroyed_answers_do_not_cancel():
    retrain, torn = tofu_metrics(of_losses(4, 4, 4)), tofu_metrics(of_losses(1, 4, 7))
    assert torn["forget_odds_top"] > retrain["forget_odds_top"] + 1
    assert torn["forget_odds_rest"] < retrain["forget_odds_rest"] - 1
    one = tofu_metrics(of_losses(2))
    assert one["forget_odds_top"] == one["forget_odds_rest"]


def test_forgetting_beyond_retrain_is_not_free():
    """Of two models that keep all, the one at Retrain's loss is nearer; in percent they are one."""
    rule = TofuBenchmark.gap
    scores, retrain = everything(0), everything(0)
    scores["forget"] = dict(scores["forget"])
    like, beyond = everything(0, shift=0.2), everything(0, shift=0.2)
    for forgotten, extra in ((retrain, 9), (like, 8.5), (beyond, 18)):
        losses = np.asarray(forgotten["forget"]["answer_loss"]) + extra
        forgotten["forget"] = {**forgotten["forget"], "answer_loss": losses}
    target, near, far, original = map(tofu_metrics, (retrain, like, beyond, scores))
    assert abs(near["forget_prob"] - far["forget_prob"]) < 0.02
    near_ag, far_ag, original_ag = (
        rule.distance(row, References(retrain=target), trial=False) for row in (near, far, original)
    )
    assert near_ag < far_ag and near_ag < original_ag
    assert far_ag - near_ag > 1


# Memorisation ------------------------------------------------------------------------------------


def hits_of(*answers: str) -> tuple[np.ndarray, np.ndarray]:
    """'.' is a miss, 'x' a hit."""
    counts = np.asarray([len(answer) for answer in answers])
    return np.asarray([c == "x" for c in "".join(answers)], dtype=bool), counts


def test_extraction_strength_is_the_right_suffix():
    hits, counts = hits_of("..xx", "xxxx", "xxx.", ".", "x", "", "x.x")
    found = extraction_strength(hits, counts, floor=False)
    assert found == pytest.approx([0.5, 1.0, 0.0, 0.0, 1.0, 0.0, 1 / 3])
    assert exact_memorization(hits, counts) == pytest.approx([0.5, 1.0, 0.75, 0.0, 1.0, 0.0, 2 / 3])


@pytest.mark.parametrize("floor", [True, False])
def test_extraction_strength_is_the_search_it_stands_for(floor):
    stream = np.random.Generator(np.random.PCG64(0))
    counts = stream.integers(0, 9, 60)
    hits = stream.random(counts.sum()) < 0.7
    wanted, start = [], 0
    for count in counts:
        own = hits[start : start + count]
        start += count
        k = next((k for k in range(count) if own[k:].all()), count - 1 if floor else count)
        wanted.append(1 - k / count if count else 0.0)
    assert extraction_strength(hits, counts, floor=floor) == pytest.approx(wanted)


def test_min_k_takes_the_least_likely_tokens():
    loss, counts = np.asarray([1.0, 5.0, 3.0, 2.0, 4.0, 7.0, 1.0]), np.asarray([5, 1, 0, 1])
    assert min_k(loss, counts, 0.4) == pytest.approx([4.5, 7.0, 0.0, 1.0])
    assert min_k(loss, counts, 1.0) == pytest.approx([3.0, 7.0, 0.0, 1.0])
    assert min_k(loss, counts, 0.01) == pytest.approx([5.0, 7.0, 0.0, 1.0])


def test_the_attack_counts_ties_half():
    from sklearn.metrics import roc_auc_score

    members, others = np.asarray([1.0, 2.0, 2.0, 5.0]), np.asarray([2.0, 3.0, 0.5])
    labels = [0] * 4 + [1] * 3
    wanted = roc_auc_score(labels, np.concatenate([members, others]))
    assert membership_auc(members, others) == pytest.approx(wanted)
    assert membership_auc(np.zeros(3), np.ones(2)) == 1.0
    assert membership_auc(np.ones(3), np.ones(2)) == 0.5


def test_privacy_leakage_is_relative_to_retrain():
    assert privacy_leakage(1.0, 0.5) == pytest.approx(-100.0)
    assert privacy_leakage(0.5, 0.5) == 0.0
    assert privacy_leakage(0.2, 0.6) == pytest.approx(100.0)
    assert privacy_leakage(0.2, 1.0) is None
    assert privacy_leakage(1.0, 1.0, epsilon=1e-10) == 0.0


# ROUGE -------------------------------------------------------------------------------------------

TEXTS = [
    ("The author's full name is Hsiao Yun-Hwa.", "The author is named Hsiao Yun Hwa"),
    ("running runners ran quickly", "a runner runs quick; he ran"),
    ("a a b a", "a b b a a a"),
    ("", "something"),
    ("something", "!?"),
    ("Ünïcode Straße 12/05/1991", "unicode strasse 12 05 1991 Straße"),
    ("one two three", "three two one"),
]


@pytest.mark.parametrize(
    ("kind", "stem", "name"),
    [("recall", True, "recall"), ("f1", True, "fmeasure"), ("f1", False, "fmeasure")],
)
def test_rouge_is_googles(kind, stem, name):
    from rouge_score import rouge_scorer

    scorer = rouge_scorer.RougeScorer(["rouge1", "rougeL"], use_stemmer=stem)
    found = rouge(*zip(*TEXTS, strict=True), kind=kind, stem=stem)
    for place, (target, prediction) in enumerate(TEXTS):
        wanted = scorer.score(target, prediction)
        assert found.rouge_1[place] == pytest.approx(getattr(wanted["rouge1"], name), abs=1e-12)
        assert found.rouge_l[place] == pytest.approx(getattr(wanted["rougeL"], name), abs=1e-12)
    assert set(found.rouge_l) - {0.0, 1.0}
    assert tokens_of("Running 3 tests") == ["run", "3", "test"]


def test_workers_give_the_same(monkeypatch):
    monkeypatch.setattr("stable_forgetting.language.metrics.rouge.WORTH_A_POOL", 2)
    targets, predictions = zip(*TEXTS, strict=True)
    here, there = (rouge(targets, predictions, workers=n) for n in (0, 1))
    assert here.rouge_l.tolist() == there.rouge_l.tolist()
    assert here.rouge_1.tolist() == there.rouge_1.tolist()


# Sequential requests -----------------------------------------------------------------------------


def test_accuracy_is_a_choice_among_paraphrase_and_wrong_answers():
    count = np.asarray([2, 2, 2, 1, 0])
    wrong = [[2.0, 3.0], [0.5, 3.0], [1.0, 2.0], [1.5, 0.0], [0.0, 0.0]]
    given = columns([1.0] * 5, wrong, perturbed_count=count)
    assert chosen_right(given).tolist() == [True, False, False, True]
    found = sequential_metrics(
        {"forget": given, "retain": drawn(), "unused": columns([1.0], [[2.0]])}
    )
    assert found["su"] == 50.0 and found["du"] == 100.0
    assert found["rd"] == 100 * chosen_right(drawn()).mean()
    assert "su_earlier" not in found
    nothing = columns([1.0], [[0.0]], perturbed_count=np.asarray([0]))
    assert sequential_metrics({"earlier": nothing}) == {"su_earlier": None}
