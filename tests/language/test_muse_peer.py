"""MUSE's metrics against both peers' own numbers; see tests/golden/muse_peer.md."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from stable_forgetting.language.data.muse import SHOTS, MuseData
from stable_forgetting.language.data.source import TextSource
from stable_forgetting.language.data.templates import make_template
from stable_forgetting.language.measure.ask import score_rows
from stable_forgetting.language.measure.muse import (
    Conventions,
    Recited,
    Written,
    muse_compare,
    muse_metrics,
)
from stable_forgetting.language.measure.requests import RequestConfig
from tests.language.made import peers_model

GOLDEN = Path(os.environ.get("MUSE_PEER", Path(__file__).parents[1] / "golden"))
TOLERANCE = 1e-6
CONTEXT = 1024
ASKED = ("verbmem", "knowmem_forget", "knowmem_retain")
RECITED = ("verbmem", "privleak_forget", "privleak_holdout")
PARTS = tuple(dict.fromkeys(ASKED + RECITED))


@pytest.fixture(scope="module")
def golden() -> dict:
    return json.loads((GOLDEN / "muse_peer.json").read_text())


@pytest.fixture(scope="module")
def corpus(golden, tmp_path_factory):
    """The rows through the reader, from files in the authors' layout."""
    root = tmp_path_factory.mktemp("data")
    for name, rows in golden["rows"].items():
        path = root / "muse" / "news" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows))
    return MuseData(corpus="news", source="folder").read(root)


def tokenizer_of(kind: str):
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    file = str(GOLDEN / "muse_peer_tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, eos_token="<|endoftext|>")
    if kind == "gpt_neo":
        return tokenizer
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    token = ("<s>", tokenizer.convert_tokens_to_ids("<s>"))
    backend = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[token])
    ends = {"bos_token": "<s>", "eos_token": "<|endoftext|>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **ends)


@pytest.fixture(scope="module")
def scored(corpus) -> dict:
    """(model, style) -> part -> scores."""
    results = {}
    for kind in ("gpt_neo", "llama"):
        tokenizer = tokenizer_of(kind)
        template = make_template("question_answer", "clean")
        source = TextSource(corpus, tokenizer, template, max_length=CONTEXT)
        weights, end = GOLDEN / f"muse_peer_{kind}.safetensors", tokenizer.eos_token_id
        model = peers_model(kind, weights, len(tokenizer), end=end, context=CONTEXT)
        shots = {name: [corpus.items[k] for k in corpus.where(name + SHOTS)] for name in ASKED[1:]}
        parts = {part: corpus.where(part) for part in PARTS}
        for style in ("muse", "openunlearning", "clean"):
            conventions = Conventions(source, style, CONTEXT, shots)
            metrics = {
                part: [Written(conventions)] * (part in ASKED)
                + [Recited(conventions)] * (part in RECITED)
                for part in PARTS
            }
            results[kind, style] = score_rows(
                model, source, parts, metrics, RequestConfig(), encode=conventions.sequence
            )
    return results


KINDS = pytest.mark.parametrize("kind", ["gpt_neo", "llama"])
STYLES = pytest.mark.parametrize("style", ["muse", "openunlearning"])


@KINDS
@STYLES
def test_every_column_is_the_peers_per_sample(golden, scored, kind, style):
    peer, compared = golden["models"][kind][style], 0
    for part in PARTS:
        for name, wanted in peer[part].items():
            if name != "mean":
                ours = scored[kind, style][part].extra[name]
                assert len(ours) == len(wanted) > 0
                np.testing.assert_allclose(
                    ours, wanted, atol=TOLERANCE, rtol=TOLERANCE, err_msg=part
                )
                compared += 1
    assert compared == {"muse": 5, "openunlearning": 7}[style]


@KINDS
@STYLES
def test_aggregates_are_the_peers(golden, scored, kind, style):
    peer = golden["models"][kind][style]
    ours = muse_metrics({**scored[kind, style]})
    names = {"verbmem": "verbmem", "knowmem_f": "knowmem_forget", "knowmem_r": "knowmem_retain"}
    for name, part in names.items():
        assert ours[name] == pytest.approx(100 * peer[part]["mean"], abs=100 * TOLERANCE)
    auc = peer["auc"] if style == "openunlearning" else 1 - peer["auc"]
    assert ours["min_k_auc"] == pytest.approx(100 * auc, abs=100 * TOLERANCE)
    assert 0 < ours["verbmem"] < 100, "the comparison says something"
    if kind == "llama":
        assert 0 < ours["knowmem_f"] < 100


def test_privacy_leakage_is_the_peers_in_both_directions(golden, scored):
    llama, other = scored["llama", "openunlearning"], scored["gpt_neo", "openunlearning"]
    ours = muse_compare(llama, other, style="openunlearning")["privleak"]
    assert ours == pytest.approx(golden["privleak"], abs=1e-4)
    peer = {kind: golden["models"][kind]["muse"]["auc"] for kind in ("llama", "gpt_neo")}
    authors = 100 * (peer["llama"] - peer["gpt_neo"]) / peer["gpt_neo"]
    measured = muse_compare(scored["llama", "muse"], scored["gpt_neo", "muse"])["privleak"]
    assert measured == pytest.approx(authors, abs=1e-4) and measured != 0


def test_styles_differ_where_they_should(scored):
    """The comparison above can fail: other conventions give other numbers."""
    ours = {style: scored["llama", style] for style in ("muse", "openunlearning", "clean")}
    recited = [scores["privleak_forget"].extra["min_k"] for scores in ours.values()]
    assert not np.allclose(recited[0], recited[1], atol=1e-4)
    written = [scores["verbmem"].extra["rouge_l_f1"] for scores in ours.values()]
    assert not np.allclose(written[0], written[1], atol=1e-4), "stems"
