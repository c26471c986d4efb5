"""``style: openunlearning`` against the peer's own numbers; see tests/golden/tofu_peer.md."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from stable_forgetting.language.data.corpus import Corpus, Item
from stable_forgetting.language.data.source import TextSource
from stable_forgetting.language.data.templates import make_template
from stable_forgetting.language.measure.scoring import TofuEvaluation, score_parts
from stable_forgetting.language.metrics import tofu
from stable_forgetting.language.metrics.tofu import tofu_compare, tofu_metrics
from tests.language.made import peers_model

GOLDEN = Path(__file__).parents[1] / "golden"
PARTS = {
    "forget": "forget",
    "retain": "retain",
    "test_real_authors": "real_authors",
    "test_world_facts": "world_facts",
    "holdout": "holdout",
}
STYLE = "openunlearning"
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def golden() -> dict:
    return json.loads((GOLDEN / "tofu_peer.json").read_text())


@pytest.fixture(scope="module")
def source(golden) -> TextSource:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(GOLDEN / "tofu_peer_tokenizer.json"), eos_token="<|endoftext|>"
    )
    rows = [row for name in PARTS.values() for row in golden["texts"][name]]
    items = tuple(Item(**{**row, "perturbed": tuple(row["perturbed"])}) for row in rows)
    template = make_template("question_answer", STYLE)
    return TextSource(Corpus(items, "golden"), tokenizer, template, max_length=512)


@pytest.fixture(scope="module")
def parts(golden) -> dict[str, np.ndarray]:
    sizes = [len(golden["texts"][name]) for name in PARTS.values()]
    ends = np.cumsum(sizes)
    return {
        part: np.arange(end - size, end) for part, size, end in zip(PARTS, sizes, ends, strict=True)
    }


@pytest.fixture(scope="module")
def scored(source, parts) -> dict[str, dict]:
    """Model -> part -> scores."""
    found = {}
    for kind in ("gpt_neo", "llama"):
        weights = GOLDEN / f"tofu_peer_{kind}.safetensors"
        model = peers_model(kind, weights, source.vocab_size, style=STYLE)
        settings = TofuEvaluation(style=STYLE)
        found[kind] = score_parts(model, source, parts, settings, trial=False)
    return found


def assert_same(values, result: dict, key: str) -> None:
    """Per sample, in order."""
    wanted = [value[key] for value in result["value_by_index"].values()]
    assert len(wanted) == len(values) > 0
    np.testing.assert_allclose(values, wanted, atol=TOLERANCE, rtol=TOLERANCE)


KINDS = pytest.mark.parametrize("kind", ["gpt_neo", "llama"])


@KINDS
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("forget", "forget"),
        ("retain", "retain"),
        ("ra", "test_real_authors"),
        ("wf", "test_world_facts"),
    ],
)
def test_probabilities_truth_ratios_and_rouge_of_each_row(golden, scored, kind, name, part):
    peer, columns = golden["models"][kind], scored[kind][part].extra
    rouge = peer[f"{name}_Q_A_ROUGE"]
    assert_same(columns["rouge_l_recall"], rouge, "rougeL_recall")
    assert_same(columns["rouge_1_recall"], rouge, "rouge1_recall")
    truth = "forget_truth_ratio" if part == "forget" else f"{name}_Truth_Ratio"
    assert_same(tofu.truth_ratios(columns, STYLE), peer[truth], "score")
    assert_same(tofu.probabilities(columns), peer[f"{name}_Q_A_Prob"], "prob")
    if name in ("ra", "wf"):
        normalised = tofu.normalised_probabilities(columns, STYLE)
        assert_same(normalised, peer[f"{name}_Q_A_Prob_normalised"], "prob")
    if part == "forget":
        assert_same(columns["answer_loss"], peer["forget_Q_A_Prob"], "avg_loss")
        assert_same(columns["paraphrase_loss"], peer["forget_Q_A_PARA_Prob"], "avg_loss")
        assert_same(columns["perturbed_loss"], peer["forget_Q_A_PERT_Prob"], "avg_loss")


@KINDS
def test_memorisation_and_membership(golden, scored, kind):
    peer, parts = golden["models"][kind], scored[kind]
    assert_same(parts["forget"].extra["extraction_strength"], peer["extraction_strength"], "score")
    assert_same(parts["forget"].extra["exact_memorization"], peer["exact_memorization"], "score")
    for part in ("forget", "holdout"):
        wanted = list(peer["mia_min_k"][part].values())
        np.testing.assert_allclose(parts[part].extra["min_k"], wanted, atol=TOLERANCE)


@KINDS
def test_aggregates(golden, scored, kind):
    peer = golden["models"][kind]
    ours = tofu_metrics(scored[kind], style=STYLE)
    wanted = {
        "forget_prob": peer["forget_Q_A_Prob"],
        "forget_rouge": peer["forget_Q_A_ROUGE"],
        "forget_truth_ratio": peer["forget_truth_ratio"],
        "retain_prob": peer["retain_Q_A_Prob"],
        "retain_rouge": peer["retain_Q_A_ROUGE"],
        "retain_truth_ratio": peer["retain_Truth_Ratio"],
        "ra_prob": peer["ra_Q_A_Prob_normalised"],
        "ra_rouge": peer["ra_Q_A_ROUGE"],
        "ra_truth_ratio": peer["ra_Truth_Ratio"],
        "wf_prob": peer["wf_Q_A_Prob_normalised"],
        "wf_rouge": peer["wf_Q_A_ROUGE"],
        "wf_truth_ratio": peer["wf_Truth_Ratio"],
        "extraction_strength": peer["extraction_strength"],
        "exact_memorization": peer["exact_memorization"],
        "min_k_auc": peer["mia_min_k"],
    }
    for name, result in wanted.items():
        assert ours[name] == pytest.approx(100 * result["agg_value"], abs=100 * TOLERANCE), name
    assert ours["mu"] == pytest.approx(peer["model_utility"]["agg_value"], abs=TOLERANCE)


def test_forget_quality_and_privacy_leakage(golden, scored):
    peer = golden["models"]["llama"]
    ours = tofu_compare(scored["llama"], scored["gpt_neo"], style=STYLE)
    assert ours["fq"] == pytest.approx(peer["forget_quality"]["agg_value"], rel=TOLERANCE)
    assert 0 < ours["fq"] < 0.9
    assert ours["privleak"] == pytest.approx(peer["privleak"]["agg_value"], abs=1e-4)


def test_the_clean_style_differs_where_it_should(scored):
    """The comparison above can fail: other conventions give other numbers."""
    forget = scored["llama"]["forget"].extra
    assert (tofu.truth_ratios(forget, "clean") != tofu.truth_ratios(forget, STYLE)).all()
