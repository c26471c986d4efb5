from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.corpus import Item
from stable_forgetting.language.measure.scoring import TofuEvaluation, score_parts
from stable_forgetting.language.metrics.rouge import rouge
from stable_forgetting.language.metrics.tofu import tofu_compare, tofu_metrics
from stable_forgetting.language.models.build import build_model
from tests.language.made import sharper, source_of

WORDS = [
    *("red", "blue", "small", "tall", "house", "river", "stone", "bird"),
    *("sings", "runs", "quietly", "north"),
]


def make_items() -> tuple[Item, ...]:
    stream = np.random.Generator(np.random.PCG64(0))

    def text(low: int, high: int) -> str:
        return " ".join(stream.choice(WORDS, stream.integers(low, high)))

    def item(name: str, wrong: int) -> Item:
        full = name == "full"
        answer = text(3, 9) if full else text(1, 3)
        paraphrase = text(3, 9) if full else None
        others = tuple(text(3, 9) for _ in range(wrong))
        return Item(name, -1, text(4, 8), answer, paraphrase, others)

    sets = [("full", 5)] * 8 + [("real_authors", 3)] * 3 + [("world_facts", 3)] * 3
    return tuple(item(*one) for one in [*sets, *[("holdout", 0)] * 4])


PARTS = {
    "forget": np.asarray([6, 7, 4]),
    "retain": np.asarray([0, 1, 2, 3]),
    "test_real_authors": np.arange(8, 11),
    "test_world_facts": np.arange(11, 14),
    "holdout": np.arange(14, 18),
}


@pytest.fixture(scope="module")
def world():
    """(model, make a source from items)."""
    items = make_items()
    tokenizer = source_of(items).tokenizer

    def source(style: str = "clean", changed: tuple[Item, ...] = items):
        return source_of(changed, style=style, tokenizer=tokenizer, max_length=128)

    config = CausalModelConfig(kind="llama", dim=16, depth=1, heads=2)
    return sharper(build_model(config, len(tokenizer), 0), 8.0), source


def settings(**fields) -> TofuEvaluation:
    return TofuEvaluation(max_new_tokens=6, **fields)


def test_parts_hold_what_they_should(world):
    model, source = world
    text = source()
    scores = score_parts(model, text, PARTS, settings(), trial=False)
    assert list(scores) == list(PARTS)
    for part, indices in PARTS.items():
        columns = scores[part].extra
        assert scores[part].indices.tolist() == indices.tolist()
        scores[part].check_finite()
        pairs = [text.encode_index(index) for index in indices]
        assert columns["answer_tokens"].tolist() == [len(pair.labels) for pair in pairs]
        np.testing.assert_allclose(scores[part].loss, columns["answer_loss"], rtol=1e-5)
        assert ("perturbed_loss" in columns) == (part != "holdout")
        assert ("rouge_l_recall" in columns) == (part != "holdout")
    assert scores["forget"].extra["perturbed_loss"].shape == (3, 5)
    assert scores["test_world_facts"].extra["perturbed_loss"].shape == (3, 3)
    facts = scores["test_real_authors"].extra
    assert facts["paraphrase_loss"].tolist() == facts["answer_loss"].tolist()
    made = tofu_metrics(scores) | tofu_compare(scores, scores)
    assert made["fq"] == 1 and made["mu"] is not None


def test_losses_are_those_of_separate_forwards(world):
    model, source = world
    text = source()
    scores = score_parts(model, text, PARTS, settings(), trial=True)

    def loss(item: Item, answer: str) -> float:
        pair = text.encode(item.question, answer)
        with torch.no_grad():
            logits = model(torch.from_numpy(pair.ids)[None]).logits[0, pair.start - 1 : -1]
        labels = torch.from_numpy(pair.labels)
        return float(torch.nn.functional.cross_entropy(logits, labels))

    for part in ("forget", "test_world_facts"):
        for row, index in enumerate(PARTS[part]):
            item, columns = text.corpus.items[index], scores[part].extra
            assert columns["answer_loss"][row] == pytest.approx(loss(item, item.answer), abs=1e-5)
            paraphrase = loss(item, item.paraphrase or item.answer)
            assert columns["paraphrase_loss"][row] == pytest.approx(paraphrase, abs=1e-5)
            wrong = [loss(item, answer) for answer in item.perturbed]
            assert columns["perturbed_loss"][row].tolist() == pytest.approx(wrong, abs=1e-5)


def test_rouge_is_of_what_the_model_says(world):
    model, source = world
    text = source()
    scores = score_parts(model, text, PARTS, settings(), trial=False)
    said, truths = [], []
    for index in PARTS["forget"]:
        item = text.corpus.items[index]
        prompt = torch.from_numpy(text.prompt_ids(item.question))[None]
        end = text.encoder.end
        out = model.generate(
            prompt, do_sample=False, max_new_tokens=6, eos_token_id=end, pad_token_id=end
        )
        tokens = out[0, prompt.shape[1] :]
        said.append(text.tokenizer.decode(tokens, skip_special_tokens=True))
        truths.append(item.answer)
    wanted = rouge(truths, said)
    assert scores["forget"].extra["rouge_l_recall"].tolist() == wanted.rouge_l.tolist()
    assert any(said)


def test_a_trial_generates_nothing(world):
    model, source = world
    scores = score_parts(model, source(), PARTS, settings(), trial=True)
    assert not any("rouge" in name for part in scores.values() for name in part.extra)
    assert tofu_metrics(scores)["mu"] is None


def test_batches_and_sharing_change_nothing(world):
    model, source = world
    full = score_parts(model, source(), PARTS, settings(), trial=False)
    for options in ({"token_budget": 40}, {"share_prompts": False}, {"generation_batch": 2}):
        other = score_parts(model, source(), PARTS, settings(**options), trial=False)
        for part, scores in full.items():
            for name, column in scores.extra.items():
                np.testing.assert_allclose(other[part].extra[name], column, atol=1e-5)


def test_items_without_wrong_answers_may_be_among_the_others(world):
    model, source = world
    items = list(make_items())
    items[0] = replace(items[0], perturbed=(), paraphrase=None)
    items[1] = replace(items[1], perturbed=items[1].perturbed[:2])
    scores = score_parts(model, source("clean", tuple(items)), PARTS, settings(), trial=True)
    columns = scores["retain"].extra
    assert columns["perturbed_count"].tolist() == [0, 2, 5, 5]
    assert (columns["perturbed_loss"][0] == 0).all() and (
        columns["perturbed_loss"][1, 2:] == 0
    ).all()
    scores["retain"].check_finite()
    whole = score_parts(model, source(), PARTS, settings(), trial=True)["retain"].extra
    np.testing.assert_allclose(
        columns["perturbed_loss"][2:], whole["perturbed_loss"][2:], atol=1e-5
    )


def test_what_counts_tokens_leaves_the_end_out_and_the_peer_floors(world):
    model, source = world
    clean = score_parts(model, source(), PARTS, settings(), trial=True)["forget"].extra
    peer = score_parts(
        model, source(), PARTS, settings(style="openunlearning"), trial=True
    )["forget"].extra  # fmt: skip
    counted = clean["answer_tokens"] - 1
    assert clean["exact_memorization"] == pytest.approx(
        np.rint(clean["exact_memorization"] * counted) / counted
    )
    lower = np.maximum(clean["extraction_strength"], 1 / counted)
    np.testing.assert_allclose(peer["extraction_strength"], lower)


def test_an_answer_may_be_capped_by_its_reference(world):
    model, source = world
    shapes = []
    handle = model.base_model.register_forward_pre_hook(
        lambda _, __, inputs: shapes.append(inputs["input_ids"].numel() * inputs["use_cache"]),
        with_kwargs=True,
    )
    part = {"forget": PARTS["forget"]}
    free = TofuEvaluation(max_new_tokens=30)
    score_parts(model, source(), part, free, trial=False)
    long = sum(shapes)
    shapes.clear()
    score_parts(model, source(), part, free.model_copy(update={"reference_cap": 0.5}), trial=False)
    handle.remove()
    longest = max(len(source().encode_index(index).labels) for index in PARTS["forget"])
    assert sum(map(bool, shapes)) <= -(-longest // 2) and sum(shapes) < long


@pytest.mark.parametrize("style", ["tofu", "openunlearning"])
def test_other_styles_run_end_to_end(world, style):
    model, source = world
    limit = 20 if style == "tofu" else 6
    config = TofuEvaluation(style=style, max_new_tokens=limit)
    scores = score_parts(model, source(style), PARTS, config, trial=False)
    made = tofu_metrics(scores, style=style) | tofu_compare(scores, scores, style=style)
    assert made["fq"] == 1 and 0 <= made["forget_rouge"] <= 100
